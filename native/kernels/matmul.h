// SPDX-License-Identifier: Apache-2.0
// Products of row-major matrices.
#pragma once

#include <cstdint>

namespace singa_lite {

// y (batch, m, n) = a (batch, m, k) b (batch, k, n); transposed operands are stored (k, m) and (n, k).
struct Matmul {
  std::int64_t batch, m, n, k;
  bool transpose_a, transpose_b;
};

// Returns false, and does nothing, if this build has no code for it.
bool matmul(const Matmul& product, const float* a, const float* b, float* y);

}  // namespace singa_lite
