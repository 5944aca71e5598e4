// SPDX-License-Identifier: Apache-2.0
// Note [blocks of codes]: a block's codes are first one byte each, written or read by a loop over its values that becomes
// vectors; a second loop packs or unpacks these bytes. Bytes are taken apart by shifts, so that the order of bytes in the
// host's words doesn't matter. A block is packed to a multiple of 8 values, for which there is always space.
#include "kernels/quantize.h"

#include <algorithm>
#include <cstring>

#include "kernels/clones.h"

namespace singa_lite {
namespace {

constexpr std::size_t kBlock = 512;  // values; a multiple of 32, so that only the last block ends within a word
constexpr std::uint32_t kExponent = 0x7f800000u;

ALWAYS_INLINE std::size_t round_up(std::size_t count) { return (count + 7) / 8 * 8; }

template <int bits>
ALWAYS_INLINE std::uint8_t code_of(float sum, float threshold) {
  if constexpr (bits == 1) return sum > threshold ? 1 : 0;
  else return sum >= threshold ? 3 : sum <= -threshold ? 2 : 0;
}

template <int bits>
ALWAYS_INLINE float value_of(std::uint8_t code, float threshold) {
  if constexpr (bits == 1) return code ? 1.0f : -1.0f;
  else return code == 3 ? threshold : code == 2 ? -threshold : 0.0f;
}

template <int bits>
ALWAYS_INLINE void pack(const std::uint8_t* block, std::size_t count, std::uint8_t* codes) {
  constexpr std::size_t kEach = 8 / bits;
  for (std::size_t i = 0; i < count / kEach; ++i) {
    unsigned byte = 0;
    for (std::size_t j = 0; j < kEach; ++j) byte |= unsigned(block[i * kEach + j]) << (8 - bits * (j + 1));
    codes[i] = std::uint8_t(byte);
  }
}

template <int bits>
ALWAYS_INLINE void unpack(const std::uint8_t* codes, std::size_t count, std::uint8_t* block) {
  constexpr std::size_t kEach = 8 / bits;
  for (std::size_t i = 0; i < count / kEach; ++i)
    for (std::size_t j = 0; j < kEach; ++j)
      block[i * kEach + j] = std::uint8_t((codes[i] >> (8 - bits * (j + 1))) & ((1 << bits) - 1));
}

template <int bits>
ALWAYS_INLINE void quantize_all(float threshold, const float* gradient, float* residual, std::size_t count,
                                std::uint8_t* codes) {
  alignas(64) std::uint8_t block[kBlock];
  for (std::size_t start = 0; start < count; start += kBlock) {
    const std::size_t size = std::min(kBlock, count - start);
    for (std::size_t i = 0; i < size; ++i) {
      const float sum = residual[start + i] + gradient[start + i];
      block[i] = code_of<bits>(sum, threshold);
      residual[start + i] = sum - value_of<bits>(code_of<bits>(sum, threshold), threshold);
    }
    std::fill(block + size, block + round_up(size), std::uint8_t(0));
    pack<bits>(block, round_up(size), codes + start * bits / 8);
  }
}

template <int bits, bool adds>
ALWAYS_INLINE void dequantize_all(float threshold, const std::uint8_t* codes, float* values, std::size_t count) {
  alignas(64) std::uint8_t block[kBlock];
  for (std::size_t start = 0; start < count; start += kBlock) {
    const std::size_t size = std::min(kBlock, count - start);
    unpack<bits>(codes + start * bits / 8, round_up(size), block);
    for (std::size_t i = 0; i < size; ++i) {
      const float value = value_of<bits>(block[i], threshold);
      values[start + i] = adds ? values[start + i] + value : value;
    }
  }
}

}  // namespace

namespace quantize_loops {

CLONES bool are_sums_finite(const float* gradient, const float* residual, std::size_t count) {
  std::uint32_t found = 0;
#pragma omp simd reduction(| : found)
  for (std::size_t i = 0; i < count; ++i) {
    const float sum = residual[i] + gradient[i];
    std::uint32_t word;
    std::memcpy(&word, &sum, sizeof word);
    found |= (word & kExponent) == kExponent ? 1u : 0u;
  }
  return found == 0;
}

CLONES void quantize_1bit(float threshold, const float* gradient, float* residual, std::size_t count,
                          std::uint8_t* codes) {
  quantize_all<1>(threshold, gradient, residual, count, codes);
}

CLONES void quantize_2bit(float threshold, const float* gradient, float* residual, std::size_t count,
                          std::uint8_t* codes) {
  quantize_all<2>(threshold, gradient, residual, count, codes);
}

CLONES void dequantize_1bit(float threshold, bool adds, const std::uint8_t* codes, float* values, std::size_t count) {
  if (adds) dequantize_all<1, true>(threshold, codes, values, count);
  else dequantize_all<1, false>(threshold, codes, values, count);
}

CLONES void dequantize_2bit(float threshold, bool adds, const std::uint8_t* codes, float* values, std::size_t count) {
  if (adds) dequantize_all<2, true>(threshold, codes, values, count);
  else dequantize_all<2, false>(threshold, codes, values, count);
}

}  // namespace quantize_loops

bool quantize(int bits, float threshold, const float* gradient, float* residual, std::size_t count,
              std::uint8_t* codes) {
  if (!quantize_loops::are_sums_finite(gradient, residual, count)) return false;
  const std::size_t used = round_up(count) * std::size_t(bits) / 8;
  std::fill(codes + used, codes + (used + 3) / 4 * 4, std::uint8_t(0));
  if (bits == 1) quantize_loops::quantize_1bit(threshold, gradient, residual, count, codes);
  else quantize_loops::quantize_2bit(threshold, gradient, residual, count, codes);
  return true;
}

void dequantize(int bits, float threshold, bool adds, const std::uint8_t* codes, float* values, std::size_t count) {
  if (bits == 1) quantize_loops::dequantize_1bit(threshold, adds, codes, values, count);
  else quantize_loops::dequantize_2bit(threshold, adds, codes, values, count);
}

}  // namespace singa_lite
