// SPDX-License-Identifier: Apache-2.0
// Ascending indices as few bits, see Note [Elias-Fano] in singa_lite/backend/cpu/indices.py.
#include <algorithm>
#include <cstdint>

#include "kernels/registry.h"

namespace singa_lite {
namespace {

using Word = std::uint32_t;

// k indices as words: those of their lowest bits, then a bit for each.
struct Code {
  std::size_t k, low_bits, num_low_words, num_words;

  Code(std::size_t k, std::size_t low_bits, std::size_t num_words)
      : k(k), low_bits(low_bits), num_low_words((k * low_bits + 31) / 32), num_words(num_words) {}
  std::size_t num_high_bits() const { return 32 * (num_words - num_low_words); }
};

// Whether all are ascending and their bits have a place; nothing is written otherwise.
template <class Index>
bool pack(const Index* indices, const Code& code, Word* words) {
  Index before = 0;
  for (std::size_t j = 0; j < code.k; ++j) {
    if (indices[j] < before) return false;
    before = indices[j];
  }
  if (code.k > 0 && (std::uint64_t(before) >> code.low_bits) + code.k > code.num_high_bits()) return false;
  std::fill(words, words + code.num_words, 0);
  const std::uint64_t mask = (std::uint64_t(1) << code.low_bits) - 1;
  for (std::size_t j = 0; j < code.k; ++j) {
    const std::uint64_t index = std::uint64_t(indices[j]), low = index & mask;
    const std::size_t at = j * code.low_bits, high = std::size_t(index >> code.low_bits) + j;
    if (code.low_bits > 0) {
      const std::uint64_t shifted = low << at % 32;
      words[at / 32] |= Word(shifted);
      if (shifted >> 32) words[at / 32 + 1] |= Word(shifted >> 32);
    }
    words[code.num_low_words + high / 32] |= Word(1) << high % 32;
  }
  return true;
}

template <class Index>
bool unpack(const Word* words, const Code& code, Index* indices) {
  const std::uint64_t mask = (std::uint64_t(1) << code.low_bits) - 1;
  std::size_t j = 0;
  for (std::size_t word = code.num_low_words; word < code.num_words && j < code.k; ++word)
    for (Word rest = words[word]; rest && j < code.k; rest &= rest - 1, ++j) {
      const std::uint64_t high = 32 * (word - code.num_low_words) + std::size_t(__builtin_ctz(rest)) - j;
      const std::size_t at = j * code.low_bits;
      std::uint64_t low = code.low_bits > 0 ? words[at / 32] : 0;
      if (at % 32 + code.low_bits > 32) low |= std::uint64_t(words[at / 32 + 1]) << 32;
      indices[j] = Index(high << code.low_bits | ((low >> at % 32) & mask));
    }
  std::fill(indices + j, indices + code.k, Index(0));
  return true;
}

// What the two kernels are given; `indices` int32 or int64, `words` int32.
bool is_supported(const Call& call, const View& indices, const View& words) {
  if (!call.has_numbers({"low_bits"}) || !indices.is_row_major || !words.is_row_major || words.type != 'i') return false;
  const double low_bits = call.number("low_bits");
  if ((indices.type != 'i' && indices.type != 'l') || !(low_bits >= 0 && low_bits < 32)) return false;
  return words.size() >= (indices.size() * std::size_t(low_bits) + 31) / 32;
}

const Registration pack_indices("pack_indices", [](const Call& call) -> Step {
  if (call.inputs.size() != 1 || call.outputs.size() != 1) return {};
  const View &indices = call.inputs[0], &words = call.outputs[0];
  if (!is_supported(call, indices, words) || !call.outputs[0].is_writeable) return {};
  const Code code(indices.size(), std::size_t(call.number("low_bits")), words.size());
  Word* to = static_cast<Word*>(words.data);
  if (indices.type == 'i')
    return [from = static_cast<const std::int32_t*>(indices.data), code, to] { return pack(from, code, to); };
  return [from = static_cast<const std::int64_t*>(indices.data), code, to] { return pack(from, code, to); };
});

const Registration unpack_indices("unpack_indices", [](const Call& call) -> Step {
  if (call.inputs.size() != 1 || call.outputs.size() != 1) return {};
  const View &words = call.inputs[0], &indices = call.outputs[0];
  if (!is_supported(call, indices, words) || !call.outputs[0].is_writeable) return {};
  const Code code(indices.size(), std::size_t(call.number("low_bits")), words.size());
  const Word* from = static_cast<const Word*>(words.data);
  if (indices.type == 'i')
    return [from, code, to = static_cast<std::int32_t*>(indices.data)] { return unpack(from, code, to); };
  return [from, code, to = static_cast<std::int64_t*>(indices.data)] { return unpack(from, code, to); };
});

}  // namespace
}  // namespace singa_lite
