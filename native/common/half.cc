// SPDX-License-Identifier: Apache-2.0
#include "common/half.h"

#include <cstring>

#include "common/bfloat16.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__)
#define SINGA_LITE_X86 1
#include <immintrin.h>
#endif

namespace singa_lite {
namespace {

float to_float(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t(half & 0x8000u) << 16;
  std::uint32_t exponent = (half >> 10) & 0x1fu;
  std::uint32_t mantissa = half & 0x3ffu;
  std::uint32_t bits;
  if (exponent == 31) {
    bits = 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u);  // a NaN becomes quiet
  } else if (exponent != 0) {
    bits = ((exponent + 112) << 23) | (mantissa << 13);
  } else if (mantissa != 0) {  // subnormal: shift up until the hidden bit appears
    exponent = 113;
    while (!(mantissa & 0x400u)) {
      mantissa <<= 1;
      --exponent;
    }
    bits = (exponent << 23) | ((mantissa & 0x3ffu) << 13);
  } else {
    bits = 0;
  }
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::uint16_t to_half(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return std::uint16_t(sign | 0x7e00u | ((bits >> 13) & 0x3ffu));
  if (bits >= 0x47800000u) return std::uint16_t(sign | 0x7c00u);  // 65536 and above
  std::uint32_t mantissa, shift, base;
  if (bits >= 0x38800000u) {  // normal half
    mantissa = bits & 0x7fffffu;
    shift = 13;
    base = ((bits >> 23) - 112) << 10;
  } else {
    if (bits < 0x33000000u) return std::uint16_t(sign);  // below half of the smallest subnormal
    mantissa = (bits & 0x7fffffu) | 0x800000u;
    shift = 126 - (bits >> 23);
    base = 0;
  }
  const std::uint32_t rest = mantissa & ((1u << shift) - 1), middle = 1u << (shift - 1);
  std::uint32_t half = base + (mantissa >> shift);
  if (rest > middle || (rest == middle && (half & 1u))) ++half;  // may carry into the exponent, rightly
  return std::uint16_t(sign | half);
}

// Loops that the compiler turns into vectors, for the instruction set of the function they are in.
ALWAYS_INLINE void widen_bfloat16(const std::uint16_t* from, float* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Bfloat16 number;
    number.bits = from[i];
    to[i] = number;
  }
}

ALWAYS_INLINE void round_to_bfloat16(const float* from, std::uint16_t* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = Bfloat16::rounded(from[i]);
}

#ifdef SINGA_LITE_X86
bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}

__attribute__((target("avx2"))) void bfloat16_to_float_avx2(const std::uint16_t* from, float* to,
                                                            std::size_t count) {
  widen_bfloat16(from, to, count);
}

__attribute__((target("avx2"))) void float_to_bfloat16_avx2(const float* from, std::uint16_t* to,
                                                            std::size_t count) {
  round_to_bfloat16(from, to, count);
}

bool has_f16c() {
  static const bool has = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  return has;
}

__attribute__((target("avx,f16c"))) void half_to_float_f16c(const std::uint16_t* from, float* to,
                                                            std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

__attribute__((target("avx,f16c"))) void float_to_half_f16c(const float* from, std::uint16_t* to,
                                                            std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < count; ++i) to[i] = to_half(from[i]);
}
#endif

}  // namespace

void half_to_float_portable(const std::uint16_t* from, float* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

void float_to_half_portable(const float* from, std::uint16_t* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = to_half(from[i]);
}

void half_to_float(const std::uint16_t* from, float* to, std::size_t count) {
#ifdef SINGA_LITE_X86
  if (has_f16c()) return half_to_float_f16c(from, to, count);
#endif
  half_to_float_portable(from, to, count);
}

void float_to_half(const float* from, std::uint16_t* to, std::size_t count) {
#ifdef SINGA_LITE_X86
  if (has_f16c()) return float_to_half_f16c(from, to, count);
#endif
  float_to_half_portable(from, to, count);
}

void bfloat16_to_float_portable(const std::uint16_t* from, float* to, std::size_t count) {
  widen_bfloat16(from, to, count);
}

void float_to_bfloat16_portable(const float* from, std::uint16_t* to, std::size_t count) {
  round_to_bfloat16(from, to, count);
}

void bfloat16_to_float(const std::uint16_t* from, float* to, std::size_t count) {
#ifdef SINGA_LITE_X86
  if (has_avx2()) return bfloat16_to_float_avx2(from, to, count);
#endif
  bfloat16_to_float_portable(from, to, count);
}

void float_to_bfloat16(const float* from, std::uint16_t* to, std::size_t count) {
#ifdef SINGA_LITE_X86
  if (has_avx2()) return float_to_bfloat16_avx2(from, to, count);
#endif
  float_to_bfloat16_portable(from, to, count);
}

}  // namespace singa_lite
