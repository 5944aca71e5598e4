// SPDX-License-Identifier: Apache-2.0
// Blocks of 8-bit codes; the notes in singa_lite/backend/cpu/quantize.py say what a message is and how its draws are made.
// Compiled without fused multiply-add, which would round other than numpy: codes and sums have numpy's bits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/clones.h"
#include "kernels/registry.h"
#include "kernels/threads.h"

namespace singa_lite {
namespace {

constexpr std::size_t kBlock = 256, kLanes = 32;  // values with one scale; Philox counters of a block
constexpr std::uint32_t kInfinity = 0x7f800000u;
constexpr float kLargest = 127, kSmallest = 0x1p-126f;  // of codes, and of scales that are not 0

// Rows of messages, and the values they stand for.
struct Rows {
  std::size_t num_rows = 0, row_size = 0, num_values = 0;
  std::size_t blocks_a_row() const { return (row_size + kBlock - 1) / kBlock; }
  std::size_t num_blocks() const { return num_rows * blocks_a_row(); }
  std::size_t row_bytes() const { return 4 * blocks_a_row() + row_size; }
};

// One block: where its values, scale and codes are.
struct Block {
  std::size_t first, size, num_here;  // of `size` values `num_here` exist, the rest are 0
  std::size_t scale, codes;           // bytes from the first message on
};

ALWAYS_INLINE Block block_of(const Rows& rows, std::size_t number) {
  const std::size_t row = number / rows.blocks_a_row(), start = number % rows.blocks_a_row() * kBlock;
  const std::size_t first = row * rows.row_size + start, size = std::min(kBlock, rows.row_size - start);
  const std::size_t left = first < rows.num_values ? rows.num_values - first : 0;
  const std::size_t message = row * rows.row_bytes();
  return {first, size, std::min(size, left), message + start / kBlock * 4, message + 4 * rows.blocks_a_row() + start};
}

ALWAYS_INLINE float scale_of(const float* values) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < kBlock; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  if (largest >= kInfinity) return std::numeric_limits<float>::quiet_NaN();
  float value;
  std::memcpy(&value, &largest, sizeof value);
  const float scale = value / kLargest;
  return scale < kSmallest ? 0 : scale;
}

// Note [8-bit draws].
ALWAYS_INLINE void draw(std::uint64_t seed, std::uint64_t counter, std::size_t block, float* draws) {
  alignas(64) std::uint32_t words[4][kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) {
    const std::uint64_t lower = block * kLanes + i;
    words[0][i] = std::uint32_t(lower);
    words[1][i] = std::uint32_t(lower >> 32);
    words[2][i] = std::uint32_t(counter);
    words[3][i] = std::uint32_t(counter >> 32);
  }
  std::uint32_t key[2] = {std::uint32_t(seed), std::uint32_t(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      const std::uint64_t first = 0xD2511F53ull * words[0][i], second = 0xCD9E8D57ull * words[2][i];
      words[0][i] = std::uint32_t(second >> 32) ^ words[1][i] ^ key[0];
      words[1][i] = std::uint32_t(second);
      words[2][i] = std::uint32_t(first >> 32) ^ words[3][i] ^ key[1];
      words[3][i] = std::uint32_t(first);
    }
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  for (int part = 0; part < 8; ++part)
    for (std::size_t i = 0; i < kLanes; ++i) {
      const std::int32_t half = std::int32_t(words[part / 2][i] >> (part % 2 * 16) & 0xffff);
      draws[std::size_t(part) * kLanes + i] = float(2 * half + 1) * 0x1p-17f;
    }
}

template <bool is_nearest>
ALWAYS_INLINE void code_block(const float* values, float scale, const float* draws, std::int8_t* codes) {
  for (std::size_t i = 0; i < kBlock; ++i) {
    const float step = values[i] / scale;
    const float rounded = is_nearest ? std::nearbyint(step) : std::floor(step + draws[i]);
    codes[i] = std::int8_t(std::int32_t(std::min(std::max(rounded, -kLargest), kLargest)));
  }
}

template <bool is_nearest>
ALWAYS_INLINE void quantize_all(const Rows& rows, const float* x, std::uint8_t* messages, float* rest,
                                std::uint64_t seed, std::uint64_t counter, std::size_t begin, std::size_t end) {
  alignas(64) float values[kBlock], draws[kBlock];
  alignas(64) std::int8_t codes[kBlock];
  for (std::size_t number = begin; number < end; ++number) {
    const Block block = block_of(rows, number);
    std::copy(x + block.first, x + block.first + block.num_here, values);
    std::fill(values + block.num_here, values + kBlock, 0.0f);
    const float scale = scale_of(values);
    if (scale > 0) {
      if (!is_nearest) draw(seed, counter, number, draws);
      code_block<is_nearest>(values, scale, draws, codes);
    } else {
      std::fill(codes, codes + kBlock, std::int8_t(0));
    }
    std::memcpy(messages + block.scale, &scale, sizeof scale);
    std::memcpy(messages + block.codes, codes, block.size);
    if (!is_nearest) continue;
    const bool is_finite = scale == scale;
    for (std::size_t i = 0; i < block.num_here; ++i)
      rest[block.first + i] = is_finite ? values[i] - scale * float(codes[i]) : 0.0f;
  }
}

// Add what a block stands for to `total`, or put it there.
template <bool adds>
ALWAYS_INLINE void decode(const std::uint8_t* messages, const Block& block, std::size_t count, float* total) {
  float scale;
  std::memcpy(&scale, messages + block.scale, sizeof scale);
  const std::uint8_t* codes = messages + block.codes;
  for (std::size_t i = 0; i < count; ++i) {
    const float value = scale * float(std::int8_t(codes[i]));
    total[i] = adds ? total[i] + value : value;
  }
}

}  // namespace

namespace int8_loops {

CLONES void quantize(const Rows& rows, const float* x, std::uint8_t* messages, std::uint64_t seed,
                     std::uint64_t counter, std::size_t begin, std::size_t end) {
  quantize_all<false>(rows, x, messages, nullptr, seed, counter, begin, end);
}

CLONES void quantize_nearest(const Rows& rows, const float* x, std::uint8_t* messages, float* rest, std::size_t begin,
                             std::size_t end) {
  quantize_all<true>(rows, x, messages, rest, 0, 0, begin, end);
}

CLONES void dequantize(const Rows& rows, const std::uint8_t* messages, float* y, std::size_t begin, std::size_t end) {
  for (std::size_t number = begin; number < end; ++number) {
    const Block block = block_of(rows, number);
    decode<false>(messages, block, block.num_here, y + std::min(block.first, rows.num_values));
  }
}

CLONES void mean(const Rows& rows, const std::uint8_t* messages, float* y, std::size_t begin, std::size_t end) {
  for (std::size_t number = begin; number < end; ++number) {
    const Block block = block_of(rows, number);  // of the first row
    float* total = y + block.first;
    decode<false>(messages, block, block.size, total);
    for (std::size_t row = 1; row < rows.num_rows; ++row)
      decode<true>(messages + row * rows.row_bytes(), block, block.size, total);
    for (std::size_t i = 0; i < block.size; ++i) total[i] /= float(rows.num_rows);
  }
}

}  // namespace int8_loops

namespace {

constexpr std::size_t kWork = 4 * kBlock;  // a block takes about as long as so many elements of a plain loop

// The rows of `messages` for `num_values` values; num_rows is 0 if they don't fit.
Rows rows_of(const View& messages, std::size_t row_size, std::size_t num_values) {
  Rows rows{0, row_size, num_values};
  if (messages.type != 'B' || !messages.is_row_major || messages.ndim() != 2) return rows;
  if (std::size_t(messages.shape[1]) != rows.row_bytes()) return rows;
  const std::size_t num_rows = std::size_t(messages.shape[0]);
  if (num_values <= num_rows * row_size) rows.num_rows = num_rows;
  return rows;
}

bool is_natural(const Call& call, const char* name) { return call.number(name) >= 0 && call.number(name) < 0x1p53; }

Step prepare_quantize(const Call& call) {
  if (call.inputs.size() != 1 || call.outputs.size() != 1 || !call.has_numbers({"row_size", "seed", "counter"})) return {};
  const View &x = call.inputs[0], &messages = call.outputs[0];
  if (!x.is_floats() || !messages.is_writeable) return {};
  for (const char* name : {"row_size", "seed", "counter"})
    if (!is_natural(call, name)) return {};
  const Rows rows = rows_of(messages, std::size_t(call.number("row_size")), x.size());
  if (rows.num_rows == 0) return {};
  const auto seed = std::uint64_t(call.number("seed")), counter = std::uint64_t(call.number("counter"));
  return [rows, seed, counter, from = x.floats(), to = static_cast<std::uint8_t*>(messages.data)] {
    parallel_for(rows.num_blocks(), kWork, [&](std::size_t begin, std::size_t end) {
      int8_loops::quantize(rows, from, to, seed, counter, begin, end);
    });
    return true;
  };
}

Step prepare_nearest(const Call& call) {
  if (call.inputs.size() != 1 || call.outputs.size() != 2 || !call.has_numbers({"row_size"})) return {};
  const View &x = call.inputs[0], &messages = call.outputs[0], &rest = call.outputs[1];
  if (!x.is_floats() || !rest.is_floats() || !messages.is_writeable || !rest.is_writeable) return {};
  if (rest.size() != x.size() || !is_natural(call, "row_size")) return {};
  const Rows rows = rows_of(messages, std::size_t(call.number("row_size")), x.size());
  if (rows.num_rows == 0) return {};
  return [rows, from = x.floats(), to = static_cast<std::uint8_t*>(messages.data), left = rest.floats()] {
    parallel_for(rows.num_blocks(), kWork, [&](std::size_t begin, std::size_t end) {
      int8_loops::quantize_nearest(rows, from, to, left, begin, end);
    });
    return true;
  };
}

Step prepare_dequantize(const Call& call) {
  if (call.inputs.size() != 1 || call.outputs.size() != 1 || !call.has_numbers({"row_size"})) return {};
  const View &messages = call.inputs[0], &y = call.outputs[0];
  if (!y.is_floats() || !y.is_writeable || !is_natural(call, "row_size")) return {};
  const Rows rows = rows_of(messages, std::size_t(call.number("row_size")), y.size());
  if (rows.num_rows == 0) return {};
  return [rows, from = static_cast<const std::uint8_t*>(messages.data), to = y.floats()] {
    parallel_for(rows.num_blocks(), kBlock, [&](std::size_t begin, std::size_t end) {
      int8_loops::dequantize(rows, from, to, begin, end);
    });
    return true;
  };
}

Step prepare_mean(const Call& call) {
  if (call.inputs.size() != 1 || call.outputs.size() != 1 || !call.has_numbers({})) return {};
  const View &messages = call.inputs[0], &y = call.outputs[0];
  if (!y.is_floats() || !y.is_writeable) return {};
  const Rows rows = rows_of(messages, y.size(), y.size());
  if (rows.num_rows == 0) return {};
  return [rows, from = static_cast<const std::uint8_t*>(messages.data), to = y.floats()] {
    parallel_for(rows.blocks_a_row(), kBlock * rows.num_rows, [&](std::size_t begin, std::size_t end) {
      int8_loops::mean(rows, from, to, begin, end);
    });
    return true;
  };
}

const Registration quantize("quantize_int8", prepare_quantize);
const Registration nearest("quantize_int8_nearest", prepare_nearest);
const Registration dequantize("dequantize_int8", prepare_dequantize);
const Registration mean("mean_of_int8", prepare_mean);

}  // namespace
}  // namespace singa_lite
