// SPDX-License-Identifier: Apache-2.0
// Sums over any axes against sums in double, the same bits on any number of threads.
#include "kernels/reduce.h"

#include <vector>

#include "check.h"

using namespace singa_lite;

namespace {

using Sizes = std::vector<std::size_t>;

std::size_t product(const Sizes& sizes, std::size_t first, std::size_t step) {
  std::size_t all = 1;
  for (std::size_t axis = first; axis < sizes.size(); axis += step) all *= sizes[axis];
  return all;
}

// The offset in out of element i of x.
std::size_t offset_of(const SummedAxes& axes, std::size_t i) {
  std::size_t offset = 0, step = 1;
  for (std::size_t axis = axes.sizes.size(); axis-- > 0;) {
    if (axis % 2 != axes.first) {
      offset += i % axes.sizes[axis] * step;
      step *= axes.sizes[axis];
    }
    i /= axes.sizes[axis];
  }
  return offset;
}

void test_sum(const SummedAxes& axes, std::size_t offset, std::vector<Floats>& before) {
  const std::size_t count = product(axes.sizes, 0, 1), summed = product(axes.sizes, axes.first, 2);
  const Floats x = random_floats(count, 5, offset);
  std::vector<double> totals(count / summed), sizes(count / summed);
  for (std::size_t i = 0; i < count; ++i) {
    totals[offset_of(axes, i)] += x[i];
    sizes[offset_of(axes, i)] += std::abs(x[i]);
  }
  for (const double divisor : {1.0, double(summed)}) {
    Floats out(count / summed, offset, kNanF);
    sum(x.data(), out.data(), axes, divisor);
    for (std::size_t i = 0; i < totals.size(); ++i)
      CHECK_NEAR(out[i], totals[i] / divisor, 2.4e-7 * sizes[i] / divisor);  // four times the rounding of a float
    before.push_back(std::move(out));
  }
}

}  // namespace

int main() {
  std::vector<std::vector<Floats>> runs;
  for_threads([&] {
    std::vector<Floats> results;
    for (std::size_t rows : {1, 2, 3, 16, 63, 64, 65, 200, 1000, 5000})
      for (std::size_t columns : {1, 2, 7, 16, 33, 127, 128, 129, 700}) {
        test_sum({{rows, columns}, 0}, rows % 3, results);
        test_sum({{rows, columns}, 1}, columns % 3, results);
      }
    test_sum({{3, 5000}, 0}, 1, results);
    test_sum({{70, 5000}, 0}, 0, results);
    test_sum({{300000}, 0}, 1, results);
    test_sum({{300000, 3}, 0}, 0, results);
    test_sum({{5, 70, 9}, 1}, 0, results);
    test_sum({{2, 9000, 33}, 1}, 0, results);
    test_sum({{40, 3, 700}, 0}, 1, results);
    test_sum({{4, 3, 2, 5}, 0}, 0, results);
    test_sum({{4, 3, 2, 5}, 1}, 0, results);
    test_sum({{6, 5, 4, 3, 2}, 0}, 0, results);
    test_sum({{200, 3, 80, 2, 3, 4}, 1}, 1, results);
    runs.push_back(std::move(results));
  });
  for (const auto& results : runs)
    for (std::size_t i = 0; i < results.size(); ++i)
      for (std::size_t k = 0; k < results[i].size(); ++k) CHECK_NEAR(results[i][k], runs[0][i][k], 0);
}
