// SPDX-License-Identifier: Apache-2.0
// A product of two matrices some rows at a time, so that more can be done with them while they are in the cache.
#pragma once

#include <cstdint>
#include <functional>

#include "kernels/widen.h"

namespace singa_lite {

// a (m, k) times b (k, n), or (n, k) with transpose_b: both of float or both of bfloat16, sums of float.
struct RowProduct {
  std::int64_t m = 0, n = 0, k = 0;
  bool transpose_b = false;
  Operand a, b;
};

// Called with the number of a row, how many rows follow each other, and their sums; from several threads at once.
using FinishRows = std::function<void(std::int64_t first, std::int64_t count, float* sums)>;

// Compute all rows and finish them. Sums are at y, or where it is null in scratch, which keeps them until finish returns.
void multiply_rows(const RowProduct& p, float* y, const FinishRows& finish);

}  // namespace singa_lite
