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

// ---- bfloat16 --------------------------------------------------------------------------------------------------------

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The value of a finite bfloat16 by its definition; 0x7f80 is what would be next after the largest.
double value_of_bfloat16(std::uint16_t narrow) {
  const int exponent = (narrow >> 7) & 255, mantissa = narrow & 127;
  const double sign = narrow & 0x8000 ? -1 : 1;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134));
}

void test_every_bfloat16_widens_exactly() {
  Array<std::uint16_t> narrow(kHalves);
  Floats floats(kHalves), portable(kHalves);
  for (std::size_t i = 0; i < kHalves; ++i) narrow[i] = std::uint16_t(i);
  bfloat16_to_float(narrow.data(), floats.data(), kHalves);
  bfloat16_to_float_portable(narrow.data(), portable.data(), kHalves);
  CHECK(std::memcmp(floats.data(), portable.data(), kHalves * sizeof(float)) == 0);
  for (std::size_t i = 0; i < kHalves; ++i) {
    const std::size_t size = i & 0x7fff;
    if (size > 0x7f80)
      CHECK(std::isnan(floats[i]));
    else
      CHECK_NEAR(floats[i], size == 0x7f80 ? (i >> 15 ? -kInfF : kInfF) : value_of_bfloat16(std::uint16_t(i)), 0);
    CHECK(std::signbit(floats[i]) == (i >= 0x8000));
  }
}

// Its neighbours are the upper half of its bits and the next number; of two as near, the even one.
std::uint16_t nearest_bfloat16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint16_t down = std::uint16_t(bits >> 16), up = std::uint16_t(down + 1);
  if (std::isnan(value)) return std::uint16_t(down | 0x40);
  if (std::isinf(value)) return down;
  const double below = std::abs(double(value) - value_of_bfloat16(down));
  const double above = std::abs(double(value) - value_of_bfloat16(up));
  return above < below || (above == below && (down & 1)) ? up : down;
}

void test_bfloat16_rounding(const float* values, std::size_t count) {
  Array<std::uint16_t> narrow(count), portable(count);
  float_to_bfloat16(values, narrow.data(), count);
  float_to_bfloat16_portable(values, portable.data(), count);
  for (std::size_t i = 0; i < count; ++i) {
    CHECK_EQUAL(portable[i], narrow[i]);
    CHECK_EQUAL(narrow[i], nearest_bfloat16(values[i]));
  }
}

void test_bfloat16_of(std::uint32_t bits, std::uint16_t expected) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  Floats values(19, 0, value);  // vectors and what is left of one
  Array<std::uint16_t> narrow(19);
  float_to_bfloat16(values.data(), narrow.data(), 19);
  for (std::size_t i = 0; i < 19; ++i) CHECK_EQUAL(narrow[i], expected);
  test_bfloat16_rounding(values.data(), 19);
}

void test_floats_round_to_the_nearest_even_bfloat16() {
  test_bfloat16_of(0x00000000, 0x0000);
  test_bfloat16_of(0x80000000, 0x8000);
  test_bfloat16_of(0x3f808000, 0x3f80);  // half way: to even, down
  test_bfloat16_of(0x3f818000, 0x3f82);  // half way: to even, up
  test_bfloat16_of(0x3f808001, 0x3f81);
  test_bfloat16_of(0x3fffffff, 0x4000);  // into the next exponent
  test_bfloat16_of(0x7f7f7fff, 0x7f7f);  // the largest that stays finite
  test_bfloat16_of(0x7f7f8000, 0x7f80);
  test_bfloat16_of(0xff7fffff, 0xff80);
  test_bfloat16_of(0x7f800000, 0x7f80);
  test_bfloat16_of(0xff800000, 0xff80);
  test_bfloat16_of(0x00000001, 0x0000);  // subnormal numbers
  test_bfloat16_of(0x00008000, 0x0000);
  test_bfloat16_of(0x00018000, 0x0002);
  test_bfloat16_of(0x807fffff, 0x8080);
  test_bfloat16_of(0x7f800001, 0x7fc0);  // NaN: signalling, none of whose bits would be left; quiet; negative
  test_bfloat16_of(0x7fffffff, 0x7fff);
  test_bfloat16_of(0xffc12345, 0xffc1);
  test_bfloat16_of(0xffffffff, 0xffff);
  Floats any(200003, 1);
  Random random(13);
  for (std::size_t i = 0; i < any.size(); ++i) {
    std::uint32_t bits = std::uint32_t(random.bits());
    if (i % 3 == 0) bits = (bits & 0xffff0000u) | 0x8000u;  // half way
    std::memcpy(any.data() + i, &bits, sizeof bits);
  }
  test_bfloat16_rounding(any.data(), any.size());
}

void test_odd_sizes_of_bfloat16() {
  for (std::size_t n : kSizes)
    for (std::size_t offset : {0, 1, 3, 5}) {
      const Floats x = random_floats(n, 14, offset);
      test_bfloat16_rounding(x.data(), n);
      Array<std::uint16_t> narrow(n, offset);
      Floats back(n, offset, kNanF);
      float_to_bfloat16(x.data(), narrow.data(), n);
      bfloat16_to_float(narrow.data(), back.data(), n);
      for (std::size_t i = 0; i < n; ++i) CHECK_NEAR(back[i], value_of_bfloat16(narrow[i]), 0);
    }
}

}  // namespace

int main() {
  test_every_half_widens_exactly();
  test_floats_round_to_nearest_even();
  test_odd_sizes();
  test_every_bfloat16_widens_exactly();
  test_floats_round_to_the_nearest_even_bfloat16();
  test_odd_sizes_of_bfloat16();
}
