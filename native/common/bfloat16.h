// SPDX-License-Identifier: Apache-2.0
// A bfloat16 number, the upper half of a float: widened exactly, rounded to nearest, ties to even; a NaN becomes quiet and
// keeps its sign. Both are plain integer arithmetic, which compilers turn into code for whole vectors.
//
// Note [bfloat16]: AVX512_BF16 rounds in the same way but for subnormal numbers, which it takes for zero. So its instruction
// is used (kernels/widen.cc) for vectors that have none.
#pragma once

#include <cstdint>

namespace singa_lite {

struct Bfloat16 {
  std::uint16_t bits;

  Bfloat16() = default;
  __attribute__((always_inline)) inline explicit Bfloat16(float value) : bits(rounded(value)) {}
  __attribute__((always_inline)) inline operator float() const {
    const std::uint32_t wide = std::uint32_t(bits) << 16;
    float value;
    __builtin_memcpy(&value, &wide, sizeof value);
    return value;
  }

  __attribute__((always_inline)) static inline std::uint16_t rounded(float value) {
    std::uint32_t wide;
    __builtin_memcpy(&wide, &value, sizeof wide);
    const std::uint32_t upper = wide >> 16;
    const std::uint32_t nearest = (wide + 0x7fffu + (upper & 1u)) >> 16;  // may carry into the exponent, rightly
    const bool is_nan = std::int32_t(wide & 0x7fffffffu) > 0x7f800000;
    return std::uint16_t(is_nan ? upper | 0x40u : nearest);
  }
};

static_assert(sizeof(Bfloat16) == 2, "arrays of it are numpy's");

}  // namespace singa_lite
