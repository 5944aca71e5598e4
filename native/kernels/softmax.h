// SPDX-License-Identifier: Apache-2.0
// Softmax of one row, for losses; that of an array along any axis is registered (registry.h).
#pragma once

#include <cstddef>

namespace singa_lite {

constexpr std::size_t kPowerCost = 8;  // of one exponential, in elements moved

// y = e^(x - largest) / total, of count > 0 elements; returns total, the sum of e^(x - largest), and the largest.
float softmax_row(const float* x, float* y, std::size_t count, float* largest);

}  // namespace singa_lite
