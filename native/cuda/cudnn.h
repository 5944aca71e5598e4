// SPDX-License-Identifier: Apache-2.0
// Convolutions through cuDNN 9, opened at run time: its functions, a handle, and one planned convolution.
//
// No file of NVIDIA's is needed to build this. Prototypes and numbers are our own; native/tests/cudnn_header.cc
// compares them with NVIDIA's header where there is one. The older convolution calls are used: they choose among the
// same kernels as the graph calls for plain NCHW convolutions, but don't fuse.
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

// cuDNN is missing, too old, or refused a call; the text says which call and cuDNN's reason.
struct CudnnError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// cuDNN's numbers.
enum Status : int { kSuccess = 0 };
enum class DType : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2 };
enum class Layout : int { kNchw = 0 };
enum class Mode : int { kCrossCorrelation = 1 };
enum class Math : int { kDefault = 0, kTensorOp = 1, kFma = 3 };
enum class Determinism : int { kDeterministic = 1 };

// What cuDNN says of one algorithm.
struct Performance {
  int algorithm;
  Status status;
  float time_ms;
  std::size_t memory_bytes;
  Determinism determinism;
  Math math;
  int reserved[3];
};

using Opaque = void*;  // cuDNN's handles and descriptors

// One direction of a convolution: two inputs, a and b, and one output, each with a descriptor. The three directions
// have the same prototypes: forward (x, w) -> y, backward data (w, dy) -> dx, backward weight (x, dy) -> dw.
using Find = Status(Opaque handle, Opaque a, const void* a_data, Opaque b, const void* b_data, Opaque convolution,
                    Opaque out, void* out_data, int asked, int* found, Performance*, void* workspace, std::size_t);
using Rank = Status(Opaque handle, Opaque a, Opaque b, Opaque convolution, Opaque out, int asked, int* found,
                    Performance*);
using WorkspaceSize = Status(Opaque handle, Opaque a, Opaque b, Opaque convolution, Opaque out, int algorithm,
                             std::size_t*);
using Run = Status(Opaque handle, const void* alpha, Opaque a, const void* a_data, Opaque b, const void* b_data,
                   Opaque convolution, int algorithm, void* workspace, std::size_t, const void* beta, Opaque out,
                   void* out_data);
using Create = Status(Opaque*);
using Destroy = Status(Opaque);
using Version = std::size_t();
using ErrorText = const char*(Status);
using LastErrorText = void(char*, std::size_t);
using SetStream = Status(Opaque handle, Opaque stream);
using SetTensor = Status(Opaque, Layout, DType, int n, int c, int h, int w);
using SetFilter = Status(Opaque, DType, Layout, int outputs, int inputs, int h, int w);
using SetConvolution = Status(Opaque, int pad_h, int pad_w, int stride_h, int stride_w, int dilation_h, int dilation_w,
                              Mode, DType compute);
using SetGroups = Status(Opaque, int);
using SetMath = Status(Opaque, Math);
using AddTensor = Status(Opaque handle, const void* alpha, Opaque a, const void* a_data, const void* beta, Opaque c,
                         void* c_data);
using BackwardBias = Status(Opaque handle, const void* alpha, Opaque dy, const void* dy_data, const void* beta,
                            Opaque db, void* db_data);

enum class Direction : int { kForward, kBackwardData, kBackwardWeight };

struct DirectionCalls {
  const char* name;
  Find* find;
  Rank* rank;
  WorkspaceSize* workspace_size;
  Run* run;
};

// The library and the functions used of it.
class Cudnn {
 public:
  static constexpr std::size_t kOldest = 90000;  // 9.0; until 8 a part of the status numbers differed

  // Opens the first of `names` that exists. Throws CudnnError: none does, a function is missing, or it is too old.
  explicit Cudnn(const std::vector<std::string>& names);

  // Throws CudnnError with cuDNN's text unless `status` is success.
  void check(Status status, const std::string& what) const;
  const DirectionCalls& calls(Direction direction) const { return directions_[int(direction)]; }
  const std::string& name() const { return library_.name(); }
  std::size_t version() const { return version_; }  // 90 000 + 100 minor + patch

  // the same for every direction
  Create *create_handle, *create_tensor, *create_filter, *create_convolution;
  Destroy *destroy_handle, *destroy_tensor, *destroy_filter, *destroy_convolution;
  SetStream* set_stream;
  SetTensor* set_tensor;
  SetFilter* set_filter;
  SetConvolution* set_convolution;
  SetGroups* set_groups;
  SetMath* set_math;
  AddTensor* add_tensor;
  BackwardBias* backward_bias;

 private:
  template <class Function>
  void load(Function*& function, const char* symbol) const;
  void load(DirectionCalls& calls, const char* name, const std::string& kind) const;

  Library library_;
  std::size_t version_ = 0;
  ErrorText* error_text_ = nullptr;
  LastErrorText* last_error_text_ = nullptr;
  DirectionCalls directions_[3];
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

// x (N, C, H, W), w (O, C / groups, kh, kw), y (N, O, oh, ow); pairs are (height, width).
struct Geometry {
  DType dtype;
  std::array<int, 4> x, w, y;
  std::array<int, 2> stride, padding, dilation;
  int groups;

  std::string text() const;
};

// One direction of one convolution: its descriptors and, once chosen, its algorithm. Sums are float32, or float64 for
// float64. All data are row-major on the handle's device; inputs a and b as in the note of Find.
class Convolution {
 public:
  Convolution(std::shared_ptr<Handle> handle, Direction direction, const Geometry& geometry, bool allow_tf32);

  // Times every algorithm that `workspace_bytes` permit and keeps the fastest; overwrites `out`, waits for the device.
  // Must not be called while the stream is captured.
  void measure(Opaque stream, const void* a, const void* b, void* out, void* workspace, std::size_t workspace_bytes);
  // Keeps the algorithm cuDNN expects to be the fastest with at most `limit_bytes` of workspace; starts nothing.
  void estimate(std::size_t limit_bytes);
  // Starts the convolution on `stream`. `bias`, if not null, has O elements: forward adds it to y, backward weight
  // writes the sum of dy to it.
  void run(Opaque stream, const void* a, const void* b, void* out, void* bias, void* workspace,
           std::size_t workspace_bytes);

  int algorithm() const { return algorithm_; }  // cuDNN's number; -1 until one is chosen
  Math math() const { return math_; }
  std::size_t workspace_bytes() const { return workspace_bytes_; }

 private:
  static constexpr int kMostAlgorithms = 16;  // cuDNN has 8, some with two kinds of arithmetic

  void check(Status status, const char* call) const;
  void choose(const Performance* candidates, int count, std::size_t limit_bytes);
  void set_math(Math math);

  std::shared_ptr<Handle> handle_;
  const Cudnn& cudnn_;
  const DirectionCalls& calls_;
  Direction direction_;
  Geometry geometry_;
  Math wanted_math_;
  Object x_, w_, y_, bias_, convolution_;
  Opaque a_ = nullptr, b_ = nullptr, out_ = nullptr;
  int algorithm_ = -1;
  Math math_ = Math::kDefault;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace singa_lite::cudnn
