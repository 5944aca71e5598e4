// SPDX-License-Identifier: Apache-2.0
#include "kernels/loss.h"

#include <algorithm>
#include <vector>

#include "check.h"
#include "kernels/softmax.h"

using namespace singa_lite;

namespace {

std::vector<double> softmax_of(const float* x, std::size_t columns, double* log_total) {
  const double most = *std::max_element(x, x + columns);
  std::vector<double> y(columns);
  double total = 0;
  for (std::size_t c = 0; c < columns; ++c) total += y[c] = std::exp(double(x[c]) - most);
  for (double& one : y) one /= total;
  *log_total = std::log(total) + most;
  return y;
}

template <class Id>
void test_rows(std::size_t rows, std::size_t columns, float spread, std::size_t offset) {
  Floats x = random_floats(rows * columns, 41, offset);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] *= spread;
  Array<Id> labels(rows, offset);
  Random random(42);
  for (std::size_t r = 0; r < rows; ++r) labels[r] = Id(r == 0 ? columns - 1 : random.below(columns));
  Floats y(x.size(), offset, kNanF), probabilities(x.size(), offset, kNanF), dx(x.size(), offset, kNanF);
  float largest;
  for (std::size_t at = 0; at < y.size(); at += columns) softmax_row(x.data() + at, y.data() + at, columns, &largest);
  const float loss = softmax_cross_entropy(x.data(), labels.data(), probabilities.data(), rows, columns);
  softmax_cross_entropy_backward(0.75f, probabilities.data(), labels.data(), dx.data(), rows, columns);
  double expected_loss = 0;
  for (std::size_t r = 0; r < rows; ++r) {
    double log_total;
    const std::vector<double> row = softmax_of(x.data() + r * columns, columns, &log_total);
    expected_loss += (log_total - x[r * columns + std::size_t(labels[r])]) / double(rows);
    for (std::size_t c = 0; c < columns; ++c) {
      const std::size_t at = r * columns + c;
      CHECK_NEAR(y[at], row[c], 1e-6);
      CHECK_NEAR(probabilities[at], row[c], 1e-6);
      CHECK_NEAR(dx[at], 0.75 / double(rows) * (row[c] - (std::size_t(labels[r]) == c ? 1 : 0)), 1e-6);
    }
  }
  if (rows) CHECK_NEAR(loss, expected_loss, 1e-5);
}

// One row of each: the result of an infinity or a NaN is what the formula gives, and no conversion goes astray.
void test_specials(std::size_t columns) {
  float largest;
  for (std::size_t index : {std::size_t(0), columns / 2, columns - 1}) {
    for (float special : {kNanF, kInfF}) {
      Floats x = random_floats(columns, 43, 1), y(columns, 1, 0.0f);
      x[index] = special;
      softmax_row(x.data(), y.data(), columns, &largest);
      CHECK(std::isnan(y[index]));
    }
    Floats x = random_floats(columns, 43, 1), y(columns, 1, kNanF);
    x[index] = columns == 1 ? x[index] : -kInfF;
    softmax_row(x.data(), y.data(), columns, &largest);
    CHECK_NEAR(y[index], columns == 1 ? 1 : 0, 0);
  }
  Floats lowest(columns, 0, -std::numeric_limits<float>::max()), y(columns, 0, kNanF);
  lowest[columns - 1] = std::numeric_limits<float>::max();  // their difference is infinite
  softmax_row(lowest.data(), y.data(), columns, &largest);
  CHECK_NEAR(y[columns - 1], 1, 0);
  Floats nothing(columns, 0, -kInfF);
  softmax_row(nothing.data(), y.data(), columns, &largest);
  CHECK(std::isnan(y[0]));
}

}  // namespace

int main() {
  for_threads([] {
    for (std::size_t columns : {1, 2, 7, 8, 10, 17, 1000})
      for (std::size_t rows : {0, 1, 3, 64, 1001})
        for (float spread : {1.0f, 30.0f, 200.0f}) {
          test_rows<std::int32_t>(rows, columns, spread, 1);
          test_rows<std::int64_t>(rows, columns, spread, 0);
        }
    for (std::size_t columns : {1, 7, 8, 33}) test_specials(columns);
  });
}
