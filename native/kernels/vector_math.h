// SPDX-License-Identifier: Apache-2.0
// Functions of one float that compilers turn into code for whole vectors: no branches, no calls, no tables. The names are
// those that formulas.h uses; errors, in units of the last place, are the largest that native/tests/vector_math_test.cc
// finds. Polynomials are minimax fits of ours (relative error below 5e-9).
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/clones.h"

namespace singa_lite::vector_math {

ALWAYS_INLINE float where(bool condition, float yes, float no) { return condition ? yes : no; }

ALWAYS_INLINE float from_bits(std::int32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
ALWAYS_INLINE std::int32_t to_bits(float value) {
  std::int32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline constexpr std::int32_t kInfinityBits = 0x7f800000, kNanBits = 0x7fc00000, kSignBit = -0x7fffffff - 1;

ALWAYS_INLINE float sqrt(float x) { return std::sqrt(x); }
ALWAYS_INLINE float abs(float x) { return std::fabs(x); }
ALWAYS_INLINE float ceil(float x) { return std::ceil(x); }
ALWAYS_INLINE float floored_quotient(float a, float b) { return std::floor(a / b); }

// ---- e^x -----------------------------------------------------------------------------------------------------------

// 2^n for a whole n in -126 .. 127
ALWAYS_INLINE float power_of_two(std::int32_t n) { return from_bits((n + 127) << 23); }

// x = n ln 2 + r with |r| <= ln 2 / 2: 1.5 * 2^23 leaves no bits for a fraction, so adding it rounds to whole
ALWAYS_INLINE float reduced(float x, float* n) {
  *n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  return (x - *n * 0.693359375f) - *n * -2.12194440e-4f;
}

// (e^r - 1 - r) / r^2
ALWAYS_INLINE float exp_rest(float r) {
  float p = 1.97852924e-4f;
  p = p * r + 1.39435880e-3f;
  p = p * r + 8.33350407e-3f;
  p = p * r + 4.16663141e-2f;
  p = p * r + 1.66666659e-1f;
  return p * r + 5.00000006e-1f;
}

// 1.0
ALWAYS_INLINE float exp(float x) {
  const float inside = x > 89.0f ? 89.0f : x < -104.0f ? -104.0f : x;  // NaN stays
  float n;
  const float r = reduced(inside, &n);
  const float p = 1.0f + (r + r * r * exp_rest(r));
  const std::int32_t whole = std::int32_t(n == n ? n : 0.0f), half = whole >> 1;
  return p * power_of_two(half) * power_of_two(whole - half);  // in two steps, as results may be subnormal
}

// 1.5
ALWAYS_INLINE float expm1(float x) {
  const float inside = x > 89.0f ? 89.0f : x < -30.0f ? -30.0f : x;
  float n;
  const float r = reduced(inside, &n), p = r + r * r * exp_rest(r);
  const std::int32_t whole = std::int32_t(n == n ? n : 0.0f), half = whole >> 1;
  const float first = power_of_two(half), second = power_of_two(whole - half), scale = first * second;
  const float y = whole > 126 ? (1.0f + p) * first * second : p * scale + (scale - 1.0f);
  return x == 0 ? x : y;  // -0 stays
}

// ---- logarithms ----------------------------------------------------------------------------------------------------

// 0.9
ALWAYS_INLINE float log(float x) {
  // x = 2^k m with m in sqrt(1/2) .. sqrt(2), f = m - 1
  constexpr std::int32_t kRootHalf = 0x3f3504f3;
  const bool is_small = x < 1.17549435e-38f;
  const std::int32_t bits = to_bits(is_small ? x * 8388608.0f : x) - kRootHalf;
  const float f = from_bits((bits & 0x007fffff) + kRootHalf) - 1.0f;
  const float k = float(bits >> 23) - (is_small ? 23.0f : 0.0f);
  float p = 6.94262058e-2f;
  p = p * f - 1.17454589e-1f;
  p = p * f + 1.18352538e-1f;
  p = p * f - 1.23902083e-1f;
  p = p * f + 1.42251548e-1f;
  p = p * f - 1.66690790e-1f;
  p = p * f + 2.00018486e-1f;
  p = p * f - 2.49999860e-1f;
  p = p * f + 3.33333173e-1f;
  const float square = f * f, low = k * -2.12194440e-4f + (f * square * p - 0.5f * square);
  const float y = (low + f) + k * 0.693359375f;
  const float infinity = from_bits(kInfinityBits);
  return x > 0 ? (x == infinity ? x : y) : (x == 0 ? -infinity : from_bits(kNanBits));
}

// 1.5
ALWAYS_INLINE float log1p(float x) {
  const float u = 1.0f + x, rest = x - (u - 1.0f), infinity = from_bits(kInfinityBits);
  const float y = log(u) + rest / u;
  return x == infinity || x == 0 ? x : u == 0 ? -infinity : y;
}

// ---- a^b, in double: what is a float exactly comes out exactly -----------------------------------------------------

ALWAYS_INLINE double from_bits(std::int64_t bits) {
  double value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
ALWAYS_INLINE std::int64_t to_bits(double value) {
  std::int64_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline constexpr double kRoundToWhole = 6755399441055744.0;  // 1.5 * 2^52: a sum with up to 2^51 has no bits for a fraction

// Of a normal x > 0: x = 2^k m with m in sqrt(1/2) .. sqrt(2), and log m = 2 artanh z with z = (m - 1) / (m + 1).
ALWAYS_INLINE double log2_double(double x) {
  constexpr std::int64_t kRootHalf = 0x3fe6a09e667f3bcd, kMantissa = 0x000fffffffffffff;
  const std::int64_t bits = to_bits(x) - kRootHalf;
  // k + 1024 as the last bits of 2^52: below x86-64-v4 no instruction converts vectors of 64-bit integers
  const std::uint64_t above_zero = (std::uint64_t(bits) + (std::uint64_t(1024) << 52)) >> 52;
  const double k = from_bits(std::int64_t(0x4330000000000000 | above_zero)) - (4503599627370496.0 + 1024.0);
  const double m = from_bits((bits & kMantissa) + kRootHalf), z = (m - 1.0) / (m + 1.0), square = z * z;
  double p = 0.28290508149015653;
  p = p * square + 0.3199053551410329;
  p = p * square + 0.41220926068860303;
  p = p * square + 0.5770779422815552;
  p = p * square + 0.9617966941136389;
  return k + z * (p * square + 2.885390081777853);
}

// 2^x, |x| <= 1000
ALWAYS_INLINE double exp2_double(double x) {
  const double shifted = x + kRoundToWhole, rest = x - (shifted - kRoundToWhole);
  double p = 1.5201921111969773e-5;
  p = p * rest + 1.5469291123314816e-4;
  p = p * rest + 1.3333922565165973e-3;
  p = p * rest + 9.618027253724215e-3;
  p = p * rest + 5.550410353446627e-2;
  p = p * rest + 2.4022651198157224e-1;
  p = p * rest + 6.931471807284475e-1;
  p = p * rest + 9.999999999616827e-1;
  return p * from_bits(std::int64_t(std::uint64_t(to_bits(shifted) + 1023) << 52));
}

// 0.501
ALWAYS_INLINE float pow(float base, float exponent) {
  constexpr double kInfinity = __builtin_inf();
  const double a = base, b = exponent, magnitude = std::fabs(a);
  const double log = magnitude == 0 ? -kInfinity : magnitude == kInfinity ? kInfinity : log2_double(magnitude);
  const double x = b * log, inside = x > 1000 ? 1000 : x < -1000 ? -1000 : x;  // NaN stays
  const double y = exp2_double(inside);
  const double half = 0.5 * b;
  const bool is_large = std::fabs(b) >= 16777216;  // a float from 2^24 on is even
  const bool is_whole = is_large | ((b + kRoundToWhole) - kRoundToWhole == b);
  const bool is_odd = !is_large & is_whole & ((half + kRoundToWhole) - kRoundToWhole != half);
  const double with_sign = is_odd & (to_bits(a) < 0) ? -y : y;
  const double of_reals = (a < 0) & (magnitude != kInfinity) & !is_whole ? __builtin_nan("") : with_sign;
  const bool is_one = (b == 0) | (a == 1) | ((a == -1) & (std::fabs(b) == kInfinity));  // whatever the other is
  return float(is_one ? 1.0 : (a != a) | (b != b) ? a + b : of_reals);
}

// ---- sigmoid, tanh, the normal distribution ------------------------------------------------------------------------

// 1.7; 1 / (1 + e^-x)
ALWAYS_INLINE float logistic(float x) {
  const float power = exp(-abs(x)), largest = x < 0 ? power : 1.0f;
  return largest - largest * (power / (1.0f + power));
}

// 2.4; its derivative
ALWAYS_INLINE float logistic_grad(float x) {
  const float power = exp(-abs(x));
  return power / (1.0f + power * (2.0f + power));
}

// 2.2; (e^2a - 1) / (e^2a + 1) with a = |x|
ALWAYS_INLINE float tanh(float x) {
  const float a = abs(x), inside = a < 10.0f ? 2.0f * a : 20.0f;
  float n;
  const float r = reduced(inside, &n), scale = power_of_two(std::int32_t(n));
  const float power = (r + r * r * exp_rest(r)) * scale + (scale - 1.0f);  // e^2a - 1
  const float y = power / (power + 2.0f);
  return x == x ? from_bits(to_bits(y) | (to_bits(x) & kSignBit)) : x;
}

// e^(-x^2 / 2), |x| <= 20; the square is taken in two parts, of which the first is exact
ALWAYS_INLINE float exp_half_square(float x) {
  const float high = from_bits(to_bits(x) & ~0xfff), rest = -0.5f * (x - high) * (x + high);
  const float power = exp(-0.5f * high * high);
  return power + power * (rest + rest * rest * (0.5f + rest * (0.166666667f + rest * 0.0416666667f)));
}

// 3; the density of the normal distribution
ALWAYS_INLINE float normal_pdf(float x) {
  const float a = abs(x) > 15.0f ? 15.0f : abs(x);  // as in normal_cdf, so that both take one exponential; NaN stays
  return 0.398942280f * exp_half_square(a);
}

// 6.2; the probability of less than x
ALWAYS_INLINE float normal_cdf(float x) {
  const float a = abs(x) > 15.0f ? 15.0f : abs(x), z = x * x, t = 1.0f / (1.0f + 0.3f * a);
  float q = -7.47043449e-6f;  // (cdf - 1/2) / x for |x| <= 1
  q = q * z + 1.12976207e-4f;
  q = q * z - 1.18581372e-3f;
  q = q * z + 9.97309411e-3f;
  q = q * z - 6.64903182e-2f;
  q = q * z + 3.98942278e-1f;
  float p = 0.0256009098f;  // cdf(-a) e^(a^2 / 2) / t for a >= 1
  p = p * t - 0.0698822815f;
  p = p * t + 0.0280079356f;
  p = p * t + 0.0262875557f;
  p = p * t + 0.0520829381f;
  p = p * t + 0.0902401907f;
  p = p * t + 0.108256429f;
  p = p * t + 0.119757918f;
  p = p * t + 0.119679183f;
  const float tail = exp_half_square(a) * (p * t);
  return abs(x) < 1.0f ? 0.5f + x * q : x < 0 ? tail : 1.0f - tail;
}

}  // namespace singa_lite::vector_math
