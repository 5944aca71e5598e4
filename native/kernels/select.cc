// SPDX-License-Identifier: Apache-2.0
// Note [selection]: the bits of |x|, read as an integer, sort as |x| does, NaN above infinity. A sample gives a key that a
// little more than k elements reach; one vectorised pass collects those, and a radix select among them, a few per cent of
// the whole, finds the k-th key. Were it too high, a histogram of all keys gives one that is not.
#include "kernels/select.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/clones.h"
#include "kernels/threads.h"

namespace singa_lite {

using Key = std::uint32_t;
using Positions = std::vector<std::uint32_t>;

namespace {

constexpr Key kSizeBits = 0x7fffffffu;
constexpr Key kNan = 0x7f800001u;         // all NaNs are equal
constexpr std::size_t kMinSample = 1 << 12, kMaxSample = 1 << 16;
constexpr std::size_t kPerSample = 64;    // elements for one of the sample, whose sorting then costs less than a pass
constexpr std::size_t kBlock = 16;        // elements looked at together; at 1 % most blocks hold nothing
constexpr std::size_t kRun = 4096;        // elements between two checks of the space left

ALWAYS_INLINE Key load(const float* values, std::size_t i) {
  Key bits;
  std::memcpy(&bits, values + i, sizeof bits);
  return bits & kSizeBits;
}

Key key(const float* values, std::size_t i) { return std::min(load(values, i), kNan); }

Key key_of(float threshold) {
  if (!(threshold > 0)) return 0;
  Key bits;
  std::memcpy(&bits, &threshold, sizeof bits);
  return bits;
}

}  // namespace

namespace select_loops {

CLONES std::size_t count_keys(const float* values, std::size_t count, Key bound) {
  std::size_t total = 0;
  for (std::size_t start = 0; start < count; start += 1 << 20) {
    const std::size_t end = std::min(count, start + (std::size_t(1) << 20));
    std::uint32_t part = 0;
#pragma omp simd reduction(+ : part)
    for (std::size_t i = start; i < end; ++i) part += load(values, i) >= bound ? 1u : 0u;
    total += part;
  }
  return total;
}

// Append base + i for every key >= bound; to has space for count entries. Returns how many were appended.
CLONES std::size_t collect(const float* values, std::size_t count, Key bound, std::uint32_t base, std::uint32_t* to) {
  std::size_t found = 0, i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    std::uint32_t hits = 0;
#pragma omp simd reduction(+ : hits)
    for (std::size_t j = 0; j < kBlock; ++j) hits += load(values, i + j) >= bound ? 1u : 0u;
    if (hits == 0) continue;
    for (std::size_t j = 0; j < kBlock; ++j) {  // without a branch: which one hits can't be predicted
      to[found] = base + std::uint32_t(i + j);
      found += load(values, i + j) >= bound ? 1 : 0;
    }
  }
  for (; i < count; ++i)
    if (load(values, i) >= bound) to[found++] = base + std::uint32_t(i);
  return found;
}

}  // namespace select_loops

namespace {

Positions collect_part(const float* values, std::size_t begin, std::size_t end, Key bound, std::size_t expected) {
  Positions found(expected + kRun + kBlock);
  std::size_t size = 0;
  for (std::size_t start = begin; start < end; start += kRun) {
    const std::size_t count = std::min(kRun, end - start);
    if (found.size() < size + count + kBlock) found.resize(2 * found.size() + kRun);
    size += select_loops::collect(values + start, count, bound, std::uint32_t(start), found.data() + size);
  }
  found.resize(size);
  return found;
}

// Positions of all keys >= bound, ascending.
Positions collect(const float* values, std::size_t count, Key bound, std::size_t expected) {
  const std::size_t parts = std::size_t(num_threads());
  std::vector<Positions> found(parts);
  parallel_for(parts, count / parts, [&](std::size_t begin, std::size_t end) {
    for (std::size_t part = begin; part < end; ++part)
      found[part] =
          collect_part(values, count * part / parts, count * (part + 1) / parts, bound, expected / parts);
  });
  Positions all = std::move(found[0]);
  for (std::size_t part = 1; part < parts; ++part) all.insert(all.end(), found[part].begin(), found[part].end());
  return all;
}

// A key that about k elements and a few more reach; 0 when nearly all must.
Key sampled_bound(const float* values, std::size_t count, std::size_t k) {
  const std::size_t size = std::clamp(count / kPerSample, kMinSample, kMaxSample), stride = count / size;
  if (stride < 4) return 0;
  std::vector<Key> sample(size);
  for (std::size_t i = 0; i < size; ++i) sample[i] = key(values, i * stride);
  const double expected = double(k) * double(size) / double(count);
  const double wanted = expected + 5 * std::sqrt(expected) + 8;  // 5 deviations: hardly ever too few
  if (wanted >= double(size)) return 0;
  const auto nth = sample.begin() + std::ptrdiff_t(wanted);
  std::nth_element(sample.begin(), nth, sample.end(), std::greater<Key>());
  return *nth;
}

// The largest multiple of 2^20 that at least k keys reach.
Key counted_bound(const float* values, std::size_t count, std::size_t k) {
  std::vector<std::size_t> counts((kSizeBits >> 20) + 1);
  for (std::size_t i = 0; i < count; ++i) ++counts[key(values, i) >> 20];
  std::size_t bin = counts.size(), above = 0;
  while (bin > 0 && above < k) above += counts[--bin];
  return Key(bin) << 20;
}

// The k-th largest of the keys (k >= 1), 11 bits at a time from above.
Key kth_largest(const std::vector<Key>& keys, std::size_t k) {
  Key prefix = 0, mask = 0;
  for (int shift : {20, 10, 0}) {
    const int bits = shift == 20 ? 11 : 10;
    std::vector<std::size_t> counts(std::size_t(1) << bits);
    for (Key one : keys)
      if ((one & mask) == prefix) ++counts[(one >> shift) & ((1u << bits) - 1)];
    std::size_t digit = counts.size() - 1;
    while (counts[digit] < k) k -= counts[digit--];
    prefix |= Key(digit) << shift;
    mask |= ((1u << bits) - 1) << shift;
  }
  return prefix;
}

}  // namespace

Positions top_k(const float* values, std::size_t count, std::size_t k) {
  if (k == 0) return {};
  Positions found = collect(values, count, sampled_bound(values, count, k), k + k / 4);
  if (found.size() < k) found = collect(values, count, counted_bound(values, count, k), k + k / 4);
  std::vector<Key> keys(found.size());
  for (std::size_t i = 0; i < found.size(); ++i) keys[i] = key(values, found[i]);
  const Key border = kth_largest(keys, k);
  std::size_t equals = k;  // how many of those at the border are taken
  for (Key one : keys) equals -= one > border ? 1 : 0;
  std::size_t size = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const bool is_taken = keys[i] > border || (keys[i] == border && equals > 0);
    if (keys[i] == border && is_taken) --equals;
    found[size] = found[i];
    size += is_taken ? 1 : 0;
  }
  found.resize(size);
  return found;
}

std::size_t threshold_count(const float* values, std::size_t count, float threshold) {
  const Key bound = key_of(threshold);
  const std::size_t parts = std::size_t(num_threads());
  std::vector<std::size_t> found(parts);
  parallel_for(parts, count / parts, [&](std::size_t begin, std::size_t end) {
    for (std::size_t part = begin; part < end; ++part) {
      const std::size_t from = count * part / parts, to = count * (part + 1) / parts;
      found[part] = select_loops::count_keys(values + from, to - from, bound);
    }
  });
  std::size_t total = 0;
  for (std::size_t part : found) total += part;
  return total;
}

Positions threshold_select(const float* values, std::size_t count, float threshold) {
  return collect(values, count, key_of(threshold), count / 64);
}

template <class Index>
void gather(const Positions& positions, const float* values, Index* indices, float* selected) {
  for (std::size_t i = 0; i < positions.size(); ++i) {
    indices[i] = Index(positions[i]);
    selected[i] = values[positions[i]];
  }
}

namespace {

template <class Index>
bool lie_inside(const Index* indices, std::size_t num_indices, std::size_t count) {
  bool inside = true;
  for (std::size_t i = 0; i < num_indices; ++i) inside &= indices[i] >= 0 && std::size_t(indices[i]) < count;
  return inside;
}

}  // namespace

template <class Index>
bool scatter_add(const Index* indices, const float* values, std::size_t num_indices, float* flat, std::size_t count) {
  if (!lie_inside(indices, num_indices, count)) return false;
  for (std::size_t i = 0; i < num_indices; ++i) flat[indices[i]] += values[i];
  return true;
}

template <class Index>
bool scatter_fill(const Index* indices, float value, std::size_t num_indices, float* flat, std::size_t count) {
  if (!lie_inside(indices, num_indices, count)) return false;
  for (std::size_t i = 0; i < num_indices; ++i) flat[indices[i]] = value;
  return true;
}

#define FOR_INDEX(Index)                                                                                     \
  template void gather(const Positions&, const float*, Index*, float*);                                      \
  template bool scatter_add(const Index*, const float*, std::size_t, float*, std::size_t);                   \
  template bool scatter_fill(const Index*, float, std::size_t, float*, std::size_t);
FOR_INDEX(std::int32_t)
FOR_INDEX(std::int64_t)
#undef FOR_INDEX

}  // namespace singa_lite
