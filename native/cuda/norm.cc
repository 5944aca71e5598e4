// SPDX-License-Identifier: Apache-2.0
#include "cuda/norm.h"

namespace singa_lite::cudnn {

namespace {

// Backward computes with the inverse_std it is given; cuDNN checks eps all the same.
constexpr double kUnusedEps = 1e-5;

}  // namespace

NormCalls::NormCalls(const Cudnn& cudnn) {
  cudnn.load(derive, "cudnnDeriveBNTensorDescriptor");
  cudnn.load(train, "cudnnBatchNormalizationForwardTraining");
  cudnn.load(infer, "cudnnBatchNormalizationForwardInference");
  cudnn.load(backward, "cudnnBatchNormalizationBackward");
}

BatchNorm::BatchNorm(std::shared_ptr<Handle> handle, DType dtype, const Shape& x)
    : handle_(std::move(handle)),
      cudnn_(*handle_->cudnn),
      calls_(*cudnn_.norm),
      dtype_(dtype),
      shape_(x),
      x_(*handle_),
      parameters_(*handle_) {
  check(cudnn_.set_tensor(x_, Layout::kNchw, dtype, x[0], x[1], x[2], x[3]), "cudnnSetTensor4dDescriptor");
  check(calls_.derive(parameters_, x_, NormMode::kSpatial), "cudnnDeriveBNTensorDescriptor");
}

void BatchNorm::check(Status status, const char* call) const {
  if (status != kSuccess) cudnn_.check(status, std::string(call) + " for " + name_of(dtype_) + text_of(" x", shape_));
}

void BatchNorm::train(Opaque stream, const void* x, const void* scale, const void* bias, void* y, void* mean,
                      void* inverse_std, void* running_mean, void* running_var, double momentum, double eps) {
  const std::lock_guard lock(handle_->mutex);
  check(calls_.train(handle_->on(stream), NormMode::kSpatial, scalar(dtype_, true), scalar(dtype_, false), x_, x, x_, y,
                     parameters_, scale, bias, momentum, running_mean, running_var, eps, mean, inverse_std),
        "cudnnBatchNormalizationForwardTraining");
}

void BatchNorm::infer(Opaque stream, const void* x, const void* scale, const void* bias, const void* mean,
                      const void* var, void* y, double eps) {
  const std::lock_guard lock(handle_->mutex);
  check(calls_.infer(handle_->on(stream), NormMode::kSpatial, scalar(dtype_, true), scalar(dtype_, false), x_, x, x_, y,
                     parameters_, scale, bias, mean, var, eps),
        "cudnnBatchNormalizationForwardInference");
}

void BatchNorm::backward(Opaque stream, const void* dy, const void* x, const void* scale, const void* mean,
                         const void* inverse_std, void* dx, void* dscale, void* dbias) {
  const std::lock_guard lock(handle_->mutex);
  const void* one = scalar(dtype_, true);
  const void* zero = scalar(dtype_, false);
  check(calls_.backward(handle_->on(stream), NormMode::kSpatial, one, zero, one, zero, x_, x, x_, dy, x_, dx,
                        parameters_, scale, dscale, dbias, kUnusedEps, mean, inverse_std),
        "cudnnBatchNormalizationBackward");
}

}  // namespace singa_lite::cudnn
