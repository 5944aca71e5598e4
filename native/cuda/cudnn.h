// SPDX-License-Identifier: Apache-2.0
// cuDNN 9, opened at run time: what all families of calls share. Each family (convolution.h, norm.h, rnn.h) has a file
// with the functions it uses and what is planned with them.
//
// No file of NVIDIA's is needed to build this. Prototypes and numbers are our own; native/tests/cudnn_header.cc
// compares them with NVIDIA's header where there is one.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/library.h"

namespace singa_lite::cudnn {

// cuDNN is missing, too old, or failed a call; the text names the call and cuDNN's reason.
struct CudnnError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// cuDNN's numbers.
enum Status : int { kSuccess = 0 };
enum class DType : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 9 };
enum class Layout : int { kRowMajor = 0, kChannelsLast = 1 };  // NCHW, NHWC
enum class Math : int { kDefault = 0, kTensorOp = 1, kFma = 3 };

using Opaque = void*;  // cuDNN's handles and descriptors
using Create = Status(Opaque*);
using Destroy = Status(Opaque);
using Version = std::size_t();
using ErrorText = const char*(Status);
using LastErrorText = void(char*, std::size_t);
using SetStream = Status(Opaque handle, Opaque stream);
using SetTensor = Status(Opaque, Layout, DType, int n, int c, int h, int w);

// The functions of each family.
struct ConvolutionCalls;
struct NormCalls;
struct RecurrentCalls;

// The library and the functions used of it.
class Cudnn {
 public:
  static constexpr std::size_t kOldest = 90000;  // 9.0; until 8 a part of the status numbers differed

  // Opens the first of `names` that exists. Throws CudnnError: none does, a function is missing, or it is too old.
  explicit Cudnn(const std::vector<std::string>& names);

  // Throws CudnnError with cuDNN's text unless `status` is success.
  void check(Status status, const std::string& what) const;
  // Finds a function. Throws CudnnError with its name where the library has none.
  template <class Function>
  void load(Function*& function, const std::string& symbol) const {
    function = library_.find<Function>(symbol.c_str());
    if (function == nullptr) throw_missing(symbol);
  }

  Create *create_handle, *create_tensor;
  Destroy *destroy_handle, *destroy_tensor;
  SetStream* set_stream;
  SetTensor* set_tensor;
  std::shared_ptr<const ConvolutionCalls> convolution;
  std::shared_ptr<const NormCalls> norm;
  std::shared_ptr<const RecurrentCalls> recurrent;

 private:
  [[noreturn]] void throw_missing(const std::string& symbol) const;

  Library library_;
  std::size_t version_ = 0;
  ErrorText* error_text_ = nullptr;
  LastErrorText* last_error_text_ = nullptr;
};

// A handle or descriptor, destroyed with its owner.
class Object {
 public:
  Object(std::shared_ptr<const Cudnn> cudnn, Create* create, Destroy* destroy);
  ~Object() { destroy_(object_); }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  operator Opaque() const { return object_; }

 private:
  std::shared_ptr<const Cudnn> cudnn_;
  Destroy* destroy_;
  Opaque object_ = nullptr;
};

// cuDNN's state on the device that is current when it is made. One call at a time.
class Handle {
 public:
  explicit Handle(std::shared_ptr<const Cudnn> library)
      : cudnn(std::move(library)), object_(cudnn, cudnn->create_handle, cudnn->destroy_handle) {}
  Opaque object() const { return object_; }
  // The handle, its kernels from now on `stream`; call with `mutex` held.
  Opaque on(Opaque stream);

  const std::shared_ptr<const Cudnn> cudnn;
  std::mutex mutex;

 private:
  Object object_;
  Opaque stream_ = nullptr;  // a new handle's is the default stream
};

// A tensor descriptor.
struct Tensor : Object {
  explicit Tensor(const Handle& handle)
      : Object(handle.cudnn, handle.cudnn->create_tensor, handle.cudnn->destroy_tensor) {}
};

using Shape = std::array<int, 4>;  // (N, C, H, W)
using Pair = std::array<int, 2>;   // (height, width)

// 1 or 0 in the type that cuDNN reads beside data of `dtype`.
const void* scalar(DType dtype, bool one);
const char* name_of(DType dtype);
// The arithmetic of products: cuDNN's default rounds float32 inputs to TF32 where the device has it.
Math math_of(DType dtype, bool allow_tf32);

// "name (1, 2)"
template <std::size_t n>
std::string text_of(const char* name, const std::array<int, n>& values) {
  std::string text = name;
  for (std::size_t i = 0; i < n; ++i) text += (i ? ", " : " (") + std::to_string(values[i]);
  return text + ')';
}

}  // namespace singa_lite::cudnn
