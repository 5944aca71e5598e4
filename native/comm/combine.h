// SPDX-License-Identifier: Apache-2.0
// Adding, averaging, maximum and minimum of several arrays, in the order given; float32 values travelling narrower.
#pragma once

#include <cstddef>

#include "comm/types.h"

namespace singa_lite {

// out[i] = op over s of sources[s][i], folded from sources[0] on, so equal inputs give equal bits anywhere.
// float16 and bfloat16 are folded in float32 and rounded once; mean divides once, after the sum; max and min hand on
// NaN. out may be one of the sources. If `widen`, sources are float16 or bfloat16 and out is float32, rounded as they and
// divided by `scale`. Throws std::logic_error for kUInt8.
void combine(DType dtype, ReduceOp op, const void* const* sources, std::size_t num_sources, void* out,
             std::size_t count, bool widen = false, float scale = 1);

// From float32, multiplied by `scale`, to `wire`, kFloat16 or kBFloat16; and back, divided by `scale`.
void to_wire(DType wire, const float* from, void* to, std::size_t count, float scale = 1);
void from_wire(DType wire, const void* from, float* to, std::size_t count, float scale = 1);

}  // namespace singa_lite
