// SPDX-License-Identifier: Apache-2.0
#include "kernels/tiles.h"

#include "check.h"

using namespace singa_lite;

namespace {

// c += or = a b for stored or transposed a and b, where b has more rows than are used.
void test_product(std::int64_t m, std::int64_t n, std::int64_t k, bool transpose, bool adds, int level) {
  const std::int64_t packed = k + 3, step = n + 5;
  const Floats a = random_floats(std::size_t(m * k), 1, 0), b = random_floats(std::size_t(packed * n), 2, 0);
  const Floats before = random_floats(std::size_t(m * step), 3, 0);
  const Matrix left = transpose ? Matrix{a.data(), 1, m} : Matrix{a.data(), k, 1};
  const Matrix right = transpose ? Matrix{b.data(), 1, packed} : Matrix{b.data(), n, 1};
  Floats panels(panel_floats(packed, n), 0, kNanF), c(std::size_t(m * step), 0, 0.0f);
  for (std::size_t i = 0; i < std::size_t(m * step); ++i) c[i] = before[i];
  pack_panels(right, packed, n, panels.data());
  multiply_panels(left, {panels.data(), packed}, m, n, k, adds, c.data(), step, level);
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < step; ++j) {
      const std::size_t index = std::size_t(i * step + j);
      if (j >= n) {
        CHECK(c[index] == before[index]);
        continue;
      }
      double sum = adds ? before[index] : 0;
      for (std::int64_t l = 0; l < k; ++l)
        sum += double(left.data[i * left.row + l * left.column]) * right.data[l * right.row + j * right.column];
      CHECK_NEAR(c[index], sum, 1e-4);
    }
}

}  // namespace

int main() {
  for (int level : {1, 3, 4}) {
    if (level > processor_level()) continue;
    for (std::int64_t m : {1, 2, 7, 8, 29})
      for (std::int64_t n : {1, 7, 32, 33, 70})
        for (std::int64_t k : {1, 4, 101, 300})
          for (bool transpose : {false, true})
            for (bool adds : {false, true}) test_product(m, n, k, transpose, adds, level);
  }
}
