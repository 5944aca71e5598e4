// SPDX-License-Identifier: Apache-2.0
// Sums over axes, as exact as pairwise sums: at most kRun values are added up in float, everything else in double. How
// the work is split depends on the shape alone, so the number of threads does not show in the result.
#pragma once

#include <cstddef>
#include <vector>

#include "common/bfloat16.h"

namespace singa_lite {

// The axes of a row-major array, adjacent ones of the same kind joined: those of sizes[first], sizes[first + 2], ... are
// summed, the others stay.
struct SummedAxes {
  std::vector<std::size_t> sizes;
  std::size_t first;  // 0 or 1
};

// out = sum of x over these axes, divided by divisor. No size is 0.
void sum(const float* x, float* out, const SummedAxes& axes, double divisor);
void sum(const Bfloat16* x, float* out, const SummedAxes& axes, double divisor);

}  // namespace singa_lite
