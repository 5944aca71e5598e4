// SPDX-License-Identifier: Apache-2.0
// Element-by-element kernels: the formulas of singa_lite/backend/formulas.h, which are registered (registry.h), and
// kernels without a formula there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/bfloat16.h"
#include "kernels/widen.h"

namespace singa_lite {

constexpr std::size_t kMostInputs = 3;

// A formula, compiled.
struct Formula {
  const char* name;
  std::size_t num_inputs;
  const char* numbers;  // names of its attributes, separated by ", "
  std::size_t cost;     // of an element, in elements moved
  // to[i] = value(from[0][i], ...) for count elements; to may be from[0].
  void (*loop)(const float* const* from, const float* numbers, float* to, std::size_t count);
};
const std::vector<Formula>& formulas();

// How inputs are broadcast to the elements of a result: its axes, outermost first, and how far each input moves along each, in
// elements: 0 where it is repeated, 0 or 1 along the last.
struct Broadcast {
  std::vector<std::size_t> sizes;
  std::vector<std::array<std::size_t, kMostInputs>> strides;
};
// Computed in float, rounded once.
void apply(const Formula& formula, const Broadcast& axes, const std::array<Operand, kMostInputs>& inputs,
           const float* numbers, const Operand& out);

// y += b in every row (b may be null), then max(y, 0) with relu.
void add_row(const float* b, bool relu, float* y, std::size_t rows, std::size_t columns);

// Whether cloned functions multiply and add with one rounding: on processors of level x86-64-v3, compiled by GCC 12 or later.
bool fuses_multiply_add();

float max_abs(const float* x, std::size_t count);  // 0 for none, NaN if one is
void clip(const float* x, float* y, float low, float high, std::size_t count);

void to_half(const float* from, std::uint16_t* to, std::size_t count);
void from_half(const std::uint16_t* from, float* to, std::size_t count);
void to_bfloat16(const float* from, Bfloat16* to, std::size_t count);
void from_bfloat16(const Bfloat16* from, float* to, std::size_t count);

}  // namespace singa_lite
