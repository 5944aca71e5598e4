// SPDX-License-Identifier: Apache-2.0
// Average pooling by cuDNN.
#pragma once

#include "cuda/cudnn.h"

namespace singa_lite::cudnn {

// cuDNN's numbers.
enum class PoolMode : int { kAverageWithPadding = 1, kAverageWithoutPadding = 2 };
enum class NanPropagation : int { kPropagate = 1 };

using SetPooling = Status(Opaque, PoolMode, NanPropagation, int window_h, int window_w, int pad_h, int pad_w,
                          int stride_h, int stride_w);
using PoolForward = Status(Opaque handle, Opaque pooling, const void* alpha, Opaque x, const void* x_data,
                           const void* beta, Opaque y, void* y_data);
using PoolBackward = Status(Opaque handle, Opaque pooling, const void* alpha, Opaque y, const void* y_data, Opaque dy,
                            const void* dy_data, Opaque x, const void* x_data, const void* beta, Opaque dx,
                            void* dx_data);

struct PoolCalls {
  explicit PoolCalls(const Cudnn& cudnn);

  Create* create_pooling;
  Destroy* destroy_pooling;
  SetPooling* set_pooling;
  PoolForward* forward;
  PoolBackward* backward;
};

// Windows on x (N, C, H, W) that give y (N, C, oh, ow); pairs are (height, width).
struct Windows {
  DType dtype;
  Shape x, y;
  Pair kernel_size, stride, padding;
  bool count_include_pad;  // whether a window's sum is divided by all of its elements, or by those inside x

  std::string text() const;
};

// Average pooling of one shape. All data are row-major on the handle's device; sums are float32, or float64 for
// float64.
class AveragePool {
 public:
  AveragePool(std::shared_ptr<Handle> handle, const Windows& windows);

  void forward(Opaque stream, const void* x, void* y);
  void backward(Opaque stream, const void* dy, void* dx);

 private:
  void check(Status status, const char* call) const;

  std::shared_ptr<Handle> handle_;
  const Cudnn& cudnn_;
  const PoolCalls& calls_;
  Windows windows_;
  Tensor x_, y_;
  Object pooling_;
};

}  // namespace singa_lite::cudnn
