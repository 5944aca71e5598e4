// SPDX-License-Identifier: Apache-2.0
// Products of float32 matrices in one thread, as parts of kernels that have more to do with the result while it is in the
// cache. Sums over k are added up in an order that depends on k alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace singa_lite {

// A matrix inside an array: element (i, j) is data[i * row + j * column].
struct Matrix {
  const float* data;
  std::int64_t row, column;

  Matrix from(std::int64_t i, std::int64_t j) const { return {data + i * row + j * column, row, column}; }
};

constexpr std::int64_t kPanel = 32;  // columns that are packed side by side

// Floats of the packed form of a matrix (k, n).
constexpr std::size_t panel_floats(std::int64_t k, std::int64_t n) {
  return std::size_t(k * ((n + kPanel - 1) / kPanel * kPanel));
}

// Pack b (k, n): kPanel columns after each other, row by row, with zeros behind the last one. The panel with column j,
// a multiple of kPanel, begins at k * j.
void pack_panels(const Matrix& b, std::int64_t k, std::int64_t n, float* panels);

struct Panels {
  const float* data;
  std::int64_t k;  // rows that were packed
};

// c (m, n) = a (m, k) b, or c += a b, where b is the first k rows of what was packed, and c has rows of c_step floats.
void multiply_panels(const Matrix& a, const Panels& b, std::int64_t m, std::int64_t n, std::int64_t k, bool adds,
                     float* c, std::int64_t c_step);

// The same by the code for a level of x86-64 that this processor has: 1, 3 or 4.
void multiply_panels(const Matrix& a, const Panels& b, std::int64_t m, std::int64_t n, std::int64_t k, bool adds,
                     float* c, std::int64_t c_step, int level);

// The highest of these levels that this processor has.
int processor_level();

}  // namespace singa_lite
