// SPDX-License-Identifier: Apache-2.0
// Adding, averaging, maximum and minimum of several arrays, in the order given.
#pragma once

#include <cstddef>

#include "comm/types.h"

namespace singa_lite {

// out[i] = op over s of sources[s][i], folded from sources[0] on, so equal inputs give equal bits anywhere.
// float16 is folded in float32 and rounded once; mean divides once, after the sum; max and min hand on NaN.
// out may be one of the sources. If `widen`, sources are float16 and out is float32 holding the rounded half.
void combine(DType dtype, ReduceOp op, const void* const* sources, std::size_t num_sources, void* out,
             std::size_t count, bool widen = false);

}  // namespace singa_lite
