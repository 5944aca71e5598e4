// SPDX-License-Identifier: Apache-2.0
// A random choice of indices, the numbers of `permuted` in backend/cpu/random.py.
#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/clones.h"
#include "kernels/registry.h"
#include "kernels/threads.h"

namespace singa_lite {
namespace index_loops {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15u;

ALWAYS_INLINE std::uint64_t mix(std::uint64_t word) {
  word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
  word = (word ^ word >> 27) * 0x94D049BB133111EBu;
  return word ^ word >> 31;
}

struct Permutation {
  std::uint64_t n, half;
  std::array<std::uint64_t, 4> keys;

  Permutation(std::uint64_t n, std::uint64_t seed, std::uint64_t counter) : n(n), half(1) {
    while (half < 32 && (n - 1) >> (2 * half)) ++half;
    const std::uint64_t start = seed ^ counter * kGolden;
    for (std::uint64_t round = 0; round < keys.size(); ++round) keys[round] = mix(start + (round + 1) * kGolden);
  }

  ALWAYS_INLINE std::uint64_t once(std::uint64_t index) const {
    const std::uint64_t mask = (std::uint64_t(1) << half) - 1;
    std::uint64_t left = index >> half, right = index & mask;
    for (const std::uint64_t key : keys) {
      const std::uint64_t next = left ^ (mix(right ^ key) & mask);
      left = right;
      right = next;
    }
    return left << half | right;
  }
};

// Most leave 0 .. n - 1 at most a few times, so all of a batch are moved once, and then those outside again, together:
// one after the other each would wait for its own multiplications.
template <class Index>
ALWAYS_INLINE void choose_in(const Permutation& permutation, Index* indices, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBatch = 256;
  std::uint64_t moved[kBatch];
  std::uint32_t positions[kBatch];  // of the moved that are left
  for (std::size_t first = begin; first < end; first += kBatch) {
    const std::size_t size = std::min(kBatch, end - first);
    for (std::size_t i = 0; i < kBatch; ++i) moved[i] = permutation.once(first + i);
    for (std::size_t i = 0; i < size; ++i) positions[i] = std::uint32_t(i);
    for (std::size_t left = size; left;) {
      std::size_t outside = 0;
      for (std::size_t i = 0; i < left; ++i) {
        const std::uint64_t index = moved[i];
        const std::uint32_t position = positions[i];
        indices[first + position] = Index(index);  // also one outside, which is moved again: no branch to guess
        moved[outside] = index;
        positions[outside] = position;
        outside += index >= permutation.n;
      }
      left = outside;
      for (std::size_t i = 0; i < left; ++i) moved[i] = permutation.once(moved[i]);
    }
  }
}
CLONES void choose(const Permutation& permutation, std::int32_t* indices, std::size_t begin, std::size_t end) {
  choose_in(permutation, indices, begin, end);
}
CLONES void choose(const Permutation& permutation, std::int64_t* indices, std::size_t begin, std::size_t end) {
  choose_in(permutation, indices, begin, end);
}

}  // namespace index_loops

namespace {

using index_loops::Permutation;

const Registration random_indices("random_indices", [](const Call& call) -> Step {
  if (!call.inputs.empty() || call.outputs.size() != 1 || !call.has_numbers({"n", "seed", "counter"})) return {};
  const View& indices = call.outputs[0];
  if ((indices.type != 'i' && indices.type != 'l') || !indices.is_row_major || !indices.is_writeable) return {};
  for (const char* name : {"n", "seed", "counter"})
    if (!(call.number(name) >= 0 && call.number(name) < 0x1p53)) return {};
  const double n = call.number("n");
  if (n < 1 || n < double(indices.size()) || (indices.type == 'i' && n > 0x1p31)) return {};
  const Permutation permutation(std::uint64_t(n), std::uint64_t(call.number("seed")), std::uint64_t(call.number("counter")));
  constexpr std::size_t kWork = 32;  // of an index, in elements
  const auto step_into = [&](auto* to) -> Step {
    return [permutation, to, k = indices.size()] {
      parallel_for(k, kWork, [&](std::size_t begin, std::size_t end) { index_loops::choose(permutation, to, begin, end); });
      return true;
    };
  };
  if (indices.type == 'i') return step_into(static_cast<std::int32_t*>(indices.data));
  return step_into(static_cast<std::int64_t*>(indices.data));
});

}  // namespace
}  // namespace singa_lite
