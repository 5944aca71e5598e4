// SPDX-License-Identifier: Apache-2.0
// Layer norm of one row, for kernels that have the row in the cache.
#pragma once

#include <cstddef>

namespace singa_lite::layer_norm_loops {

// y = (x - mean) * inverse_std * scale + bias, with mean and 1 / sqrt(var + eps) of the row. y may be x.
void forward(const float* x, const float* scale, const float* bias, float* y, std::size_t columns, double eps, float* mean,
             float* inverse_std);

}  // namespace singa_lite::layer_norm_loops
