// SPDX-License-Identifier: Apache-2.0
#include "kernels/elementwise.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/half.h"
#include "kernels/clones.h"
#include "kernels/threads.h"
#include "kernels/widen.h"

namespace singa_lite {
namespace elementwise_loops {

CLONES void clip(const float* x, float* y, float low, float high, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) {
    const float above = x[i] < low ? low : x[i];  // NaN stays NaN
    y[i] = above > high ? high : above;
  }
}

// NaN if one is: NaN's bits without the sign are above infinity's, so integers of the same order find both.
CLONES std::uint32_t largest_bits(const std::uint32_t* x, std::size_t count) {
  std::uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t size = x[i] & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  return largest;
}

CLONES void add_row(const float* b, float low, float* y, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) {
    const float value = b ? y[i] + b[i] : y[i];
    y[i] = value < low ? low : value;  // NaN is passed on
  }
}

CLONES float multiply_add(float a, float b, float c) { return a * b + c; }

}  // namespace elementwise_loops

bool fuses_multiply_add() {
  const float x = 1 + 0x1p-12f;  // its square has one bit more than a float holds
  return elementwise_loops::multiply_add(x, x, -(1 + 0x1p-11f)) != 0;
}

void add_row(const float* b, bool relu, float* y, std::size_t rows, std::size_t columns) {
  parallel_for(rows, columns, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row)
      elementwise_loops::add_row(b, relu ? 0.0f : -INFINITY, y + row * columns, columns);
  });
}

float max_abs(const float* x, std::size_t count) {
  std::vector<std::uint32_t> largest(std::size_t(num_threads()) + 1, 0u);
  const auto* bits = reinterpret_cast<const std::uint32_t*>(x);
  std::size_t parts = largest.size() - 1;
  parallel_for(parts, count / std::max<std::size_t>(parts, 1), [&](std::size_t begin, std::size_t end) {
    for (std::size_t part = begin; part < end; ++part) {
      const std::size_t from = count * part / parts, to = count * (part + 1) / parts;
      largest[part] = elementwise_loops::largest_bits(bits + from, to - from);
    }
  });
  const std::uint32_t all = *std::max_element(largest.begin(), largest.end());
  float value;
  __builtin_memcpy(&value, &all, sizeof value);
  return value;
}

void clip(const float* x, float* y, float low, float high, std::size_t count) {
  parallel_for(count, 1, [&](std::size_t begin, std::size_t end) {
    elementwise_loops::clip(x + begin, y + begin, low, high, end - begin);
  });
}

void to_half(const float* from, std::uint16_t* to, std::size_t count) {
  parallel_for(count, 1, [&](std::size_t begin, std::size_t end) {
    float_to_half(from + begin, to + begin, end - begin);
  });
}

void from_half(const std::uint16_t* from, float* to, std::size_t count) {
  parallel_for(count, 1, [&](std::size_t begin, std::size_t end) {
    half_to_float(from + begin, to + begin, end - begin);
  });
}

void to_bfloat16(const float* from, Bfloat16* to, std::size_t count) {
  parallel_for(count, 1, [&](std::size_t begin, std::size_t end) { narrow(from + begin, to + begin, end - begin); });
}

void from_bfloat16(const Bfloat16* from, float* to, std::size_t count) {
  parallel_for(count, 1, [&](std::size_t begin, std::size_t end) { widen(from + begin, to + begin, end - begin); });
}

}  // namespace singa_lite
