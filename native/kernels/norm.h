// SPDX-License-Identifier: Apache-2.0
// Batch normalisation over every axis but the channel's.
#pragma once

#include <cstddef>

namespace singa_lite {

// x is (batch, channels, inner), in blocks of so many channels, see Note [memory formats] in layout.h.
struct Norm {
  std::size_t batch, channels, inner, block = 1;
};

// T: float, or Bfloat16 for what has an element for each of x; all else, and every sum, is float or wider.

// y = normal(x), plus residual if there is one, and not less than 0 with relu; residual has x's memory format.
// running = (1 - momentum) running + momentum batch, with the unbiased variance.
template <class T>
void batchnorm_train(const Norm& norm, const T* x, const float* scale, const float* bias, const T* residual, bool relu,
                     T* y, float* mean, float* inverse_std, float* running_mean, float* running_var, double momentum,
                     double eps);
template <class T>
void batchnorm_infer(const Norm& norm, const T* x, const float* scale, const float* bias, const float* mean,
                     const float* var, T* y, double eps);

// bias: null, or that of a forward pass with relu and no residual, whose gradient dy then is.
template <class T>
void batchnorm_backward(const Norm& norm, const T* dy, const T* x, const float* scale, const float* bias,
                        const float* mean, const float* inverse_std, T* dx, float* dscale, float* dbias);

}  // namespace singa_lite
