// SPDX-License-Identifier: Apache-2.0
#include "kernels/elementwise.h"

#include <algorithm>

#include "check.h"

using namespace singa_lite;

namespace {

// With a zero of each sign, infinities and a NaN where there is room.
Floats special_floats(std::size_t count, std::uint64_t seed, std::size_t offset) {
  Floats x = random_floats(count, seed, offset);
  const float specials[] = {0.0f, -0.0f, kInfF, -kInfF, kNanF, 1e-42f};
  for (std::size_t i = 0; i < 6; ++i)
    if (count > 7 * (i + 1)) x[count - 7 * (i + 1)] = specials[i];
  return x;
}

void test_relu(std::size_t n, std::size_t offset) {
  const Floats x = special_floats(n, 1, offset), dy = random_floats(n, 2, offset);
  Floats y(n, offset, kNanF), dx(n, offset, kNanF);
  relu(x.data(), y.data(), n);
  relu_backward(dy.data(), y.data(), dx.data(), n);
  for (std::size_t i = 0; i < n; ++i) {
    CHECK_NEAR(y[i], x[i] < 0 ? 0.0f : x[i], 0);
    CHECK_NEAR(dx[i], y[i] > 0 ? dy[i] : 0.0f, 0);
  }
}

float apply(Arithmetic op, float a, float b) {
  switch (op) {
    case Arithmetic::kAdd: return a + b;
    case Arithmetic::kSub: return a - b;
    case Arithmetic::kMul: return a * b;
    default: return a / b;
  }
}

void test_arithmetic(std::size_t rows, std::size_t period, std::size_t offset, bool in_place) {
  const std::size_t n = rows * period;
  for (Arithmetic op : {Arithmetic::kAdd, Arithmetic::kSub, Arithmetic::kMul, Arithmetic::kDiv}) {
    const Floats a = special_floats(n, 3, offset), b = random_floats(period, 4, offset);
    Floats out(n, offset, kNanF);
    if (in_place) std::copy(a.data(), a.data() + n, out.data());
    arithmetic(op, in_place ? out.data() : a.data(), b.data(), out.data(), n, period);
    for (std::size_t i = 0; i < n; ++i) CHECK_NEAR(out[i], apply(op, a[i], b[i % period]), 0);
  }
}

void test_sum_rows(std::size_t rows, std::size_t columns, std::size_t offset) {
  const Floats x = random_floats(rows * columns, 5, offset);
  Floats out(columns, offset, kNanF);
  sum_rows(x.data(), out.data(), rows, columns);
  for (std::size_t c = 0; c < columns; ++c) {
    double total = 0, sizes = 1;
    for (std::size_t r = 0; r < rows; ++r) {
      total += x[r * columns + c];
      sizes += std::abs(x[r * columns + c]);
    }
    CHECK_NEAR(out[c], total, 2.4e-7 * sizes);  // four times the rounding of a float
  }
}

void test_max_abs(std::size_t n, std::size_t offset) {
  Floats x = random_floats(n, 6, offset);
  float largest = 0;
  for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(x[i]));
  CHECK_NEAR(max_abs(x.data(), n), largest, 0);
  for (std::size_t place : {std::size_t(0), n / 2, n - 1}) {
    if (n == 0) break;
    const float kept = x[place];
    for (float extreme : {-kInfF, -3.5f, kNanF, -kNanF}) {
      x[place] = extreme;
      CHECK_NEAR(max_abs(x.data(), n), std::abs(extreme), 0);
    }
    x[place] = kept;
  }
}

void test_clip(std::size_t n, std::size_t offset) {
  const Floats x = special_floats(n, 7, offset);
  Floats y(n, offset, kNanF);
  clip(x.data(), y.data(), -0.25f, 0.5f, n);
  for (std::size_t i = 0; i < n; ++i)
    CHECK_NEAR(y[i], std::isnan(x[i]) ? kNanF : std::min(std::max(x[i], -0.25f), 0.5f), 0);
}

void test_halves(std::size_t n, std::size_t offset) {
  const Floats x = random_floats(n, 8, offset);
  Array<std::uint16_t> halves(n, offset);
  Floats back(n, offset, kNanF);
  to_half(x.data(), halves.data(), n);
  from_half(halves.data(), back.data(), n);
  for (std::size_t i = 0; i < n; ++i) CHECK_NEAR(back[i], x[i], 1.0 / 2048);
}

void test_size(std::size_t n, std::size_t offset) {
  test_relu(n, offset);
  test_max_abs(n, offset);
  test_clip(n, offset);
  test_halves(n, offset);
  if (n) test_arithmetic(1, n, offset, offset == 1);
  test_arithmetic(n, 1, offset, offset == 0);
  test_sum_rows(n, 1, offset);
  test_sum_rows(3, n, offset);
}

}  // namespace

int main() {
  for_threads([] {
    for (std::size_t n : kSizes)
      for (std::size_t offset : {0, 1, 3}) test_size(n, offset);
    test_size(kLargeSize, 1);
    for (std::size_t columns : {2, 7, 16, 33, 1025, 2049}) {
      test_arithmetic(37, columns, 1, false);
      test_sum_rows(37, columns, 1);
      test_sum_rows(0, columns, 0);
    }
  });
}
