// SPDX-License-Identifier: Apache-2.0
#include "common/half.h"

#include "check.h"

using namespace singa_lite;

namespace {

constexpr std::size_t kHalves = 1 << 16;

// The value of a half by its definition.
double value_of(std::uint16_t half) {
  const int exponent = (half >> 10) & 31, mantissa = half & 1023;
  const double sign = half & 0x8000 ? -1 : 1;
  if (exponent == 31) return mantissa ? double(kNanF) : sign * double(kInfF);
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

void test_every_half_widens_exactly() {
  Array<std::uint16_t> halves(kHalves);
  Floats floats(kHalves), portable(kHalves);
  for (std::size_t i = 0; i < kHalves; ++i) halves[i] = std::uint16_t(i);
  half_to_float(halves.data(), floats.data(), kHalves);
  half_to_float_portable(halves.data(), portable.data(), kHalves);
  CHECK(std::memcmp(floats.data(), portable.data(), kHalves * sizeof(float)) == 0);
  for (std::size_t i = 0; i < kHalves; ++i) {
    CHECK_NEAR(floats[i], value_of(std::uint16_t(i)), 0);
    CHECK(std::signbit(floats[i]) == (i >= 0x8000));
  }
}

// The nearest half by search among all; of two as near the one with an even mantissa.
std::uint16_t nearest_half(float value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::abs(double(value));
  if (size >= 65520) return sign | 0x7c00;  // half way from 65504 to what would be next
  std::uint16_t low = 0, high = 0x7bff;     // value_of(low) <= size
  while (low < high) {
    const std::uint16_t middle = std::uint16_t((low + high + 1) / 2);
    if (value_of(middle) <= size)
      low = middle;
    else
      high = std::uint16_t(middle - 1);
  }
  const double below = size - value_of(low);
  const double above = (low == 0x7bff ? 65536 : value_of(std::uint16_t(low + 1))) - size;
  const bool goes_up = above < below || (above == below && (low & 1));
  return std::uint16_t(sign | (low + (goes_up ? 1 : 0)));
}

void test_rounding(const float* values, std::size_t count) {
  Array<std::uint16_t> halves(count), portable(count);
  float_to_half(values, halves.data(), count);
  float_to_half_portable(values, portable.data(), count);
  for (std::size_t i = 0; i < count; ++i) {
    CHECK_EQUAL(portable[i], halves[i]);
    if (std::isnan(values[i]))
      CHECK((halves[i] & 0x7c00) == 0x7c00 && (halves[i] & 0x3ff) != 0);
    else
      CHECK_EQUAL(halves[i], nearest_half(values[i]));
  }
}

void test_floats_round_to_nearest_even() {
  const Floats specials = [] {
    const float values[] = {0, -0.0f, 65504, 65519.996f, 65520, 65536, 1e30f, kInfF, -kInfF, kNanF, -kNanF, 0x1p-24f,
                            0x1p-25f, 0x1.000002p-25f, 0x1.fffffep-26f, 0x1.8p-24f, -0x1.8p-24f, 0x1p-14f,
                            0x1.ffcp-15f, 0x1.ffep-15f, 1e-45f, -1e-45f, 1e-40f, 1 + 0x1p-11f, 1 + 0x1.8p-10f};
    Floats made(sizeof values / sizeof *values);
    std::memcpy(made.data(), values, sizeof values);
    return made;
  }();
  test_rounding(specials.data(), specials.size());
  Floats any(200003, 1);  // every exponent, and signalling NaNs
  Random random(11);
  for (std::size_t i = 0; i < any.size(); ++i) {
    std::uint32_t bits = std::uint32_t(random.bits());
    if (i % 2) bits = (bits & 0x80ffffffu) | (0x30u + std::uint32_t(random.below(0x18))) << 24;  // where halves are
    std::memcpy(any.data() + i, &bits, sizeof bits);
  }
  test_rounding(any.data(), any.size());
}

void test_odd_sizes() {
  for (std::size_t n : kSizes)
    for (std::size_t offset : {0, 1, 3, 5}) {
      const Floats x = random_floats(n, 12, offset);
      test_rounding(x.data(), n);
      Array<std::uint16_t> halves(n, offset);
      Floats back(n, offset, kNanF);
      float_to_half(x.data(), halves.data(), n);
      half_to_float(halves.data(), back.data(), n);
      for (std::size_t i = 0; i < n; ++i) CHECK_NEAR(back[i], value_of(halves[i]), 0);
    }
}

}  // namespace

int main() {
  test_every_half_widens_exactly();
  test_floats_round_to_nearest_even();
  test_odd_sizes();
}
