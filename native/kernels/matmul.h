// SPDX-License-Identifier: Apache-2.0
// Products of row-major matrices.
#pragma once

#include <cstdint>

#include "common/bfloat16.h"

namespace singa_lite {

// y (batch, m, n) = a (batch, m, k) b (batch, k, n); transposed operands are stored (k, m) and (n, k).
struct Matmul {
  std::int64_t batch, m, n, k;
  bool transpose_a, transpose_b;
};

// Each returns false, and does nothing, if this build has no code for it.
bool matmul(const Matmul& product, const float* a, const float* b, float* y);

// a and b of bfloat16, sums of float; bias, a row or null, is added to every row, then max(y, 0) with relu.
bool matmul(const Matmul& product, const Bfloat16* a, const Bfloat16* b, const float* bias, bool relu, float* y);
bool matmul(const Matmul& product, const Bfloat16* a, const Bfloat16* b, const float* bias, bool relu, Bfloat16* y);

// Whether products and convolutions multiply numbers of bfloat16; if not, they widen them, see Note [bfloat16 products] in
// onednn.h.
bool multiplies_bfloat16();

}  // namespace singa_lite
