// SPDX-License-Identifier: Apache-2.0
// IEEE 754 half precision and bfloat16 (bfloat16.h): conversion of arrays to and from float, rounding to nearest, ties to
// even; a NaN becomes quiet and keeps its sign. Uses F16C and AVX2 where the processor has them; every path gives the same
// bits, NaN payloads included.
#pragma once

#include <cstddef>
#include <cstdint>

namespace singa_lite {

void half_to_float(const std::uint16_t* from, float* to, std::size_t count);
void float_to_half(const float* from, std::uint16_t* to, std::size_t count);
void bfloat16_to_float(const std::uint16_t* from, float* to, std::size_t count);
void float_to_bfloat16(const float* from, std::uint16_t* to, std::size_t count);

// The portable paths, for the test that compares them with the fast ones.
void half_to_float_portable(const std::uint16_t* from, float* to, std::size_t count);
void float_to_half_portable(const float* from, std::uint16_t* to, std::size_t count);
void bfloat16_to_float_portable(const std::uint16_t* from, float* to, std::size_t count);
void float_to_bfloat16_portable(const float* from, std::uint16_t* to, std::size_t count);

}  // namespace singa_lite
