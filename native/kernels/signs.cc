// SPDX-License-Identifier: Apache-2.0
// Signs as bits, and adding them back times a scale for each segment: see backend/cpu/signs.py, whose bits these are.
#include <cstdint>
#include <cstring>

#include "kernels/clones.h"
#include "kernels/registry.h"
#include "kernels/threads.h"

namespace singa_lite {
namespace signs_loops {

// Whole bytes: 8 values each, 4 bytes together.
CLONES void pack(const float* values, std::uint8_t* bits, std::size_t num_bytes) {
  std::size_t i = 0;
  for (; i + 4 <= num_bytes; i += 4) {
    std::uint32_t found = 0;
#pragma omp simd reduction(| : found)
    for (unsigned bit = 0; bit < 32; ++bit) found |= (values[8 * i + bit] >= 0 ? 1u : 0u) << bit;
    for (unsigned byte = 0; byte < 4; ++byte) bits[i + byte] = std::uint8_t(found >> 8 * byte);
  }
  for (; i < num_bytes; ++i) {
    unsigned found = 0;
    for (unsigned bit = 0; bit < 8; ++bit) found |= unsigned(values[8 * i + bit] >= 0) << bit;
    bits[i] = std::uint8_t(found);
  }
}

// Values 8 i to 8 i + 7 get `sent` or its negative.
CLONES void add(const std::uint8_t* bits, float sent, float* values, std::size_t num_bytes) {
  std::uint32_t word;
  std::memcpy(&word, &sent, sizeof word);
  for (std::size_t i = 0; i < num_bytes; ++i) {
    const std::uint32_t is_minus = ~std::uint32_t(bits[i]);
    for (unsigned bit = 0; bit < 8; ++bit) {  // without a choice, which is slower as a vector
      const std::uint32_t with_sign = word ^ (is_minus << (31 - bit) & 0x80000000u);
      float term;
      std::memcpy(&term, &with_sign, sizeof term);
      values[8 * i + bit] += term;
    }
  }
}

}  // namespace signs_loops

namespace {

constexpr std::size_t kWork = 8;  // of a byte, in elements

bool is_set(const std::uint8_t* bits, std::size_t i) { return bits[i / 8] >> i % 8 & 1; }

bool are_bytes(const View& view, std::size_t num_elements) {
  return view.type == 'B' && view.is_row_major && view.size() >= (num_elements + 7) / 8;
}

const Registration pack_signs("pack_signs", [](const Call& call) -> Step {
  if (call.inputs.size() != 1 || call.outputs.size() != 1 || !call.has_numbers({})) return {};
  const View &x = call.inputs[0], &bits = call.outputs[0];
  if (!x.is_floats() || !are_bytes(bits, x.size()) || !bits.is_writeable) return {};
  return [values = x.floats(), n = x.size(), to = static_cast<std::uint8_t*>(bits.data), size = bits.size()] {
    parallel_for(n / 8, kWork, [&](std::size_t begin, std::size_t end) {
      signs_loops::pack(values + 8 * begin, to + begin, end - begin);
    });
    for (std::size_t i = n / 8; i < size; ++i) to[i] = 0;
    for (std::size_t i = n / 8 * 8; i < n; ++i) to[i / 8] = std::uint8_t(to[i / 8] | (values[i] >= 0) << i % 8);
    return true;
  };
});

const Registration add_signs("add_signs", [](const Call& call) -> Step {
  if (call.inputs.size() != 3 || call.outputs.size() != 1 || !call.has_numbers({"factor"})) return {};
  const View &bits = call.inputs[0], &scales = call.inputs[1], &ends = call.inputs[2], &flat = call.outputs[0];
  if (!flat.is_floats() || !flat.is_writeable || !scales.is_floats() || ends.type != 'l' || !ends.is_row_major) return {};
  if (!are_bytes(bits, flat.size()) || scales.size() != ends.size()) return {};
  return [from = static_cast<const std::uint8_t*>(bits.data), scale_of = scales.floats(), num_segments = scales.size(),
          end_of = static_cast<const std::int64_t*>(ends.data), values = flat.floats(), n = std::int64_t(flat.size()),
          factor = float(call.number("factor"))] {
    std::int64_t start = 0;
    for (std::size_t segment = 0; segment < num_segments; start = end_of[segment++])
      if (end_of[segment] < start || end_of[segment] > n) return false;
    if (start != n) return false;
    std::size_t i = 0;
    for (std::size_t segment = 0; segment < num_segments; ++segment) {
      const float sent = scale_of[segment] * factor;
      const std::size_t end = std::size_t(end_of[segment]), first_byte = (i + 7) / 8, last_byte = end / 8;
      const auto one_by_one = [&](std::size_t until) {
        for (; i < until; ++i) values[i] += is_set(from, i) ? sent : -sent;
      };
      if (first_byte < last_byte) {
        one_by_one(8 * first_byte);
        parallel_for(last_byte - first_byte, kWork, [&](std::size_t begin, std::size_t stop) {
          signs_loops::add(from + first_byte + begin, sent, values + 8 * (first_byte + begin), stop - begin);
        });
        i = 8 * last_byte;
      }
      one_by_one(end);
    }
    return true;
  };
});

}  // namespace
}  // namespace singa_lite
