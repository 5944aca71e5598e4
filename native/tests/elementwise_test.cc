// SPDX-License-Identifier: Apache-2.0
#include "kernels/elementwise.h"

#include <algorithm>
#include <string>

#include "check.h"

using namespace singa_lite;

namespace {

// With a zero of each sign, infinities and a NaN where there is space.
Floats special_floats(std::size_t count, std::uint64_t seed, std::size_t offset) {
  Floats x = random_floats(count, seed, offset);
  const float specials[] = {0.0f, -0.0f, kInfF, -kInfF, kNanF, 1e-42f};
  for (std::size_t i = 0; i < 6; ++i)
    if (count > 7 * (i + 1)) x[count - 7 * (i + 1)] = specials[i];
  return x;
}

const Formula& formula(const std::string& name) {
  for (const Formula& found : formulas())
    if (name == found.name) return found;
  FAIL("no formula %s", name.c_str());
}

Operand of(const Floats& array) { return {const_cast<float*>(array.data())}; }

void test_values(std::size_t n, std::size_t offset) {
  const Floats x = special_floats(n, 1, offset), dy = random_floats(n, 2, offset);
  Floats y(n, offset, kNanF), dx(n, offset, kNanF);
  apply(formula("relu"), {{n}, {{1}}}, {of(x)}, nullptr, of(y));
  apply(formula("relu_backward"), {{n}, {{1, 1}}}, {of(dy), of(y)}, nullptr, of(dx));
  for (std::size_t i = 0; i < n; ++i) {
    CHECK_NEAR(y[i], x[i] < 0 ? 0.0f : x[i], 0);
    CHECK_NEAR(dx[i], y[i] > 0 ? dy[i] : 0.0f, 0);
  }
  apply(formula("sub"), {{n}, {{1, 0}}}, {of(x), of(dy)}, nullptr, of(y));  // with one number
  for (std::size_t i = 0; i < n; ++i) CHECK_NEAR(y[i], x[i] - dy[0], 0);
  Floats over = special_floats(n, 1, offset);
  apply(formula("div"), {{n}, {{1, 1}}}, {of(over), of(dy)}, nullptr, of(over));  // over its first input
  for (std::size_t i = 0; i < n; ++i) CHECK_NEAR(over[i], x[i] / dy[i], 0);
}

// Every formula on arrays that broadcast in every way, against the same formula of one element at a time.
void test_broadcast(const Formula& f, std::size_t rows, std::size_t columns, std::size_t offset) {
  const float numbers[] = {0.5f, 0.25f, 2.0f, 3.0f};
  for (std::size_t ways = 0; ways < (std::size_t(1) << 2 * f.num_inputs); ++ways) {
    Broadcast axes{{rows, columns}, {{}, {}}};
    std::vector<Floats> made;
    std::array<Operand, kMostInputs> inputs{};
    for (std::size_t k = 0; k < f.num_inputs; ++k) {
      const bool is_whole = f.num_inputs != 2 && k == 0, along = is_whole || (ways >> 2 * k & 1);
      const bool across = is_whole || (ways >> 2 * k & 2);
      axes.strides[1][k] = along;
      axes.strides[0][k] = across ? (along ? columns : 1) : 0;
      made.push_back(random_floats((across ? rows : 1) * (along ? columns : 1), 10 + k, offset));
    }
    for (std::size_t k = 0; k < f.num_inputs; ++k) inputs[k] = of(made[k]);
    Floats out(rows * columns, offset, kInfF);
    apply(f, axes, inputs, numbers, of(out));
    for (std::size_t i = 0; i < rows * columns; ++i) {
      const float* from[kMostInputs] = {};
      for (std::size_t k = 0; k < f.num_inputs; ++k)
        from[k] = made[k].data() + i / columns * axes.strides[0][k] + i % columns * axes.strides[1][k];
      float expected;
      f.loop(from, numbers, &expected, 1);
      CHECK_NEAR(out[i], expected, 1e-6);
    }
  }
}

void test_max_abs(std::size_t n, std::size_t offset) {
  Floats x = random_floats(n, 6, offset);
  float largest = 0;
  for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(x[i]));
  CHECK_NEAR(max_abs(x.data(), n), largest, 0);
  for (std::size_t index : {std::size_t(0), n / 2, n - 1}) {
    if (n == 0) break;
    const float kept = x[index];
    for (float extreme : {-kInfF, -3.5f, kNanF, -kNanF}) {
      x[index] = extreme;
      CHECK_NEAR(max_abs(x.data(), n), std::abs(extreme), 0);
    }
    x[index] = kept;
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
  if (n) test_values(n, offset);
  test_max_abs(n, offset);
  test_clip(n, offset);
  test_halves(n, offset);
}

}  // namespace

int main() {
  for_threads([] {
    for (std::size_t n : kSizes)
      for (std::size_t offset : {0, 1, 3}) test_size(n, offset);
    test_size(kLargeSize, 1);
    for (const Formula& f : formulas()) {
      test_broadcast(f, 3, 37, 1);
      test_broadcast(f, 37, 3, 0);
      test_broadcast(f, 9, 4099, 0);  // in several threads
    }
  });
}
