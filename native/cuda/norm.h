// SPDX-License-Identifier: Apache-2.0
// Batch normalisation by cuDNN: over batch and pixels, for each channel.
#pragma once

#include "cuda/cudnn.h"

namespace singa_lite::cudnn {

enum class NormMode : int { kSpatial = 1 };  // cuDNN's number

using DeriveParameters = Status(Opaque parameters, Opaque x, NormMode);
using NormTrain = Status(Opaque handle, NormMode, const void* alpha, const void* beta, Opaque x, const void* x_data,
                         Opaque y, void* y_data, Opaque parameters, const void* scale, const void* bias, double factor,
                         void* running_mean, void* running_var, double eps, void* mean, void* inverse_std);
using NormInfer = Status(Opaque handle, NormMode, const void* alpha, const void* beta, Opaque x, const void* x_data,
                         Opaque y, void* y_data, Opaque parameters, const void* scale, const void* bias,
                         const void* mean, const void* var, double eps);
using NormBackward = Status(Opaque handle, NormMode, const void* alpha_data, const void* beta_data,
                            const void* alpha_parameters, const void* beta_parameters, Opaque x, const void* x_data,
                            Opaque dy, const void* dy_data, Opaque dx, void* dx_data, Opaque parameters,
                            const void* scale, void* dscale, void* dbias, double eps, const void* mean,
                            const void* inverse_std);

struct NormCalls {
  explicit NormCalls(const Cudnn& cudnn);

  DeriveParameters* derive;
  NormTrain* train;
  NormInfer* infer;
  NormBackward* backward;
};

// Batch normalisation of one shape. All data are on the handle's device. x, y and their gradients have this
// shape and dtype; what there is one of for each channel is float32, or float64 for float64.
class BatchNorm {
 public:
  BatchNorm(std::shared_ptr<Handle> handle, DType dtype, const Shape& x, Layout layout);

  // y = (x - mean) inverse_std scale + bias, with inverse_std = 1 / sqrt(var + eps), var the mean square distance.
  // running = (1 - momentum) running + momentum batch, where the variance of n elements is var n / (n - 1): so for one
  // element give no running statistics, both null.
  void train(Opaque stream, const void* x, const void* scale, const void* bias, void* y, void* mean, void* inverse_std,
             void* running_mean, void* running_var, double momentum, double eps);
  // y = (x - mean) / sqrt(var + eps) scale + bias.
  void infer(Opaque stream, const void* x, const void* scale, const void* bias, const void* mean, const void* var,
             void* y, double eps);
  // Gradients of `train`, whose mean and inverse_std are given.
  void backward(Opaque stream, const void* dy, const void* x, const void* scale, const void* mean,
                const void* inverse_std, void* dx, void* dscale, void* dbias);

 private:
  void check(Status status, const char* call) const;

  std::shared_ptr<Handle> handle_;
  const Cudnn& cudnn_;
  const NormCalls& calls_;
  DType dtype_;
  Shape shape_;
  Tensor x_, parameters_;
};

}  // namespace singa_lite::cudnn
