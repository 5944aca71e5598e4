// SPDX-License-Identifier: Apache-2.0
#include "cuda/cudnn.h"

#include "cuda/convolution.h"
#include "cuda/norm.h"
#include "cuda/rnn.h"

namespace singa_lite::cudnn {

namespace {

Library open(const std::vector<std::string>& names) {
  try {
    return Library(names);
  } catch (const std::runtime_error& error) {
    throw CudnnError(std::string("cuDNN 9 cannot be opened: ") + error.what());
  }
}

}  // namespace

Cudnn::Cudnn(const std::vector<std::string>& names) : library_(open(names)) {
  Version* version;
  load(version, "cudnnGetVersion");
  version_ = version();
  if (version_ < kOldest)
    throw CudnnError(library_.name() + " is cuDNN version number " + std::to_string(version_) + ", but at least " +
                     std::to_string(kOldest) + " (9.0) is needed");
  load(error_text_, "cudnnGetErrorString");
  load(last_error_text_, "cudnnGetLastErrorString");
  load(create_handle, "cudnnCreate");
  load(destroy_handle, "cudnnDestroy");
  load(set_stream, "cudnnSetStream");
  load(create_tensor, "cudnnCreateTensorDescriptor");
  load(destroy_tensor, "cudnnDestroyTensorDescriptor");
  load(set_tensor, "cudnnSetTensor4dDescriptor");
  convolution = std::make_shared<ConvolutionCalls>(*this);
  norm = std::make_shared<NormCalls>(*this);
  recurrent = std::make_shared<RecurrentCalls>(*this);
}

void Cudnn::throw_missing(const std::string& symbol) const {
  throw CudnnError(library_.name() + " (version " + std::to_string(version_) + ") has no function " + symbol);
}

void Cudnn::check(Status status, const std::string& what) const {
  if (status == kSuccess) return;
  char reason[512] = "";
  last_error_text_(reason, sizeof reason);
  reason[sizeof reason - 1] = '\0';
  std::string text = what + ": " + error_text_(status) + " (" + std::to_string(int(status)) + ")";
  if (reason[0] != '\0') text += std::string(": ") + reason;
  throw CudnnError(text);
}

Object::Object(std::shared_ptr<const Cudnn> cudnn, Create* create, Destroy* destroy)
    : cudnn_(std::move(cudnn)), destroy_(destroy) {
  cudnn_->check(create(&object_), create == cudnn_->create_handle ? "cudnnCreate" : "cuDNN descriptor");
}

Opaque Handle::on(Opaque stream) {
  if (stream != stream_) {
    cudnn->check(cudnn->set_stream(object_, stream), "cudnnSetStream");
    stream_ = stream;
  }
  return object_;
}

const void* scalar(DType dtype, bool one) {
  static constexpr float kFloats[] = {0, 1};
  static constexpr double kDoubles[] = {0, 1};
  return dtype == DType::kFloat64 ? static_cast<const void*>(&kDoubles[one]) : &kFloats[one];
}

const char* name_of(DType dtype) {
  static constexpr const char* kNames[] = {"float32", "float64", "float16"};
  return dtype == DType::kBFloat16 ? "bfloat16" : kNames[int(dtype)];
}

Math math_of(DType dtype, bool allow_tf32) {
  if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) return Math::kTensorOp;
  return dtype == DType::kFloat32 && !allow_tf32 ? Math::kFma : Math::kDefault;
}

}  // namespace singa_lite::cudnn
