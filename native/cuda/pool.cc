// SPDX-License-Identifier: Apache-2.0
#include "cuda/pool.h"

namespace singa_lite::cudnn {

PoolCalls::PoolCalls(const Cudnn& cudnn) {
  cudnn.load(create_pooling, "cudnnCreatePoolingDescriptor");
  cudnn.load(destroy_pooling, "cudnnDestroyPoolingDescriptor");
  cudnn.load(set_pooling, "cudnnSetPooling2dDescriptor");
  cudnn.load(forward, "cudnnPoolingForward");
  cudnn.load(backward, "cudnnPoolingBackward");
}

std::string Windows::text() const {
  return name_of(dtype) + text_of(" x", x) + text_of(" y", y) + text_of(" kernel_size", kernel_size) +
         text_of(" stride", stride) + text_of(" padding", padding);
}

AveragePool::AveragePool(std::shared_ptr<Handle> handle, const Windows& windows)
    : handle_(std::move(handle)),
      cudnn_(*handle_->cudnn),
      calls_(*cudnn_.pool),
      windows_(windows),
      x_(*handle_),
      y_(*handle_),
      pooling_(handle_->cudnn, calls_.create_pooling, calls_.destroy_pooling) {
  const auto& [dtype, x, y, kernel_size, stride, padding, count_include_pad] = windows_;
  check(cudnn_.set_tensor(x_, Layout::kNchw, dtype, x[0], x[1], x[2], x[3]), "cudnnSetTensor4dDescriptor of x");
  check(cudnn_.set_tensor(y_, Layout::kNchw, dtype, y[0], y[1], y[2], y[3]), "cudnnSetTensor4dDescriptor of y");
  check(calls_.set_pooling(
            pooling_, count_include_pad ? PoolMode::kAverageWithPadding : PoolMode::kAverageWithoutPadding,
            NanPropagation::kPropagate, kernel_size[0], kernel_size[1], padding[0], padding[1], stride[0], stride[1]),
        "cudnnSetPooling2dDescriptor");
}

void AveragePool::check(Status status, const char* call) const {
  if (status != kSuccess) cudnn_.check(status, std::string(call) + " for " + windows_.text());
}

void AveragePool::forward(Opaque stream, const void* x, void* y) {
  const std::lock_guard lock(handle_->mutex);
  const DType dtype = windows_.dtype;
  check(calls_.forward(handle_->on(stream), pooling_, scalar(dtype, true), x_, x, scalar(dtype, false), y_, y),
        "cudnnPoolingForward");
}

void AveragePool::backward(Opaque stream, const void* dy, void* dx) {
  const std::lock_guard lock(handle_->mutex);
  const DType dtype = windows_.dtype;
  // cuDNN wants x and y for every mode, but the gradient of an average does not depend on their values: dx and dy are
  // memory of the same sizes
  check(calls_.backward(handle_->on(stream), pooling_, scalar(dtype, true), y_, dy, y_, dy, x_, dx,
                        scalar(dtype, false), x_, dx),
        "cudnnPoolingBackward");
}

}  // namespace singa_lite::cudnn
