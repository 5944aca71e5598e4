// SPDX-License-Identifier: Apache-2.0
// Element-by-element kernels, sums over rows, and half precision.
#pragma once

#include <cstddef>
#include <cstdint>

namespace singa_lite {

enum class Arithmetic { kAdd, kSub, kMul, kDiv };

void relu(const float* x, float* y, std::size_t count);                             // NaN stays NaN
void relu_backward(const float* dy, const float* y, float* dx, std::size_t count);  // dy * (y > 0)

// out = a op b; out may be a. b has count elements, or repeats every period elements (1: a scalar).
void arithmetic(Arithmetic op, const float* a, const float* b, float* out, std::size_t count, std::size_t period);

// y += b in every row (b may be null), then max(y, 0) with relu.
void add_row(const float* b, bool relu, float* y, std::size_t rows, std::size_t columns);

// out[c] = sum over r of x[r][c].
void sum_rows(const float* x, float* out, std::size_t rows, std::size_t columns);

float max_abs(const float* x, std::size_t count);  // 0 for none, NaN if one is
void clip(const float* x, float* y, float low, float high, std::size_t count);

void to_half(const float* from, std::uint16_t* to, std::size_t count);
void from_half(const std::uint16_t* from, float* to, std::size_t count);

}  // namespace singa_lite
