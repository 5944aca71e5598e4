// SPDX-License-Identifier: Apache-2.0
// What calls of attention and its gradient mean: where queries, keys and values are in the arrays of projections, and the
// loop over heads, which are computed in float.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>
#include <vector>

#include "kernels/registry.h"
#include "kernels/threads.h"
#include "kernels/widen.h"

namespace singa_lite {

// A matrix of one sample and head: rows of d elements, `step` apart, inside a projection of float or Bfloat16.
template <class T>
struct Part {
  T* data = nullptr;
  std::int64_t step = 0;
  std::int64_t sample = 0;  // elements from one sample to the next

  Part of(std::int64_t batch, std::int64_t head, std::int64_t d) const {
    return {data + batch * sample + head * d, step, sample};
  }
  T* row(std::int64_t number) const { return data + number * step; }
};

template <class T>
struct Attention {
  std::int64_t batch = 0, heads = 0, queries = 0, keys = 0, d = 0;
  bool is_causal = false;
  Part<T> q, k, v;  // inputs, or their gradients
  float scale = 1;  // of scores

  // Keys that the queries before `end` see.
  std::int64_t seen(std::int64_t end) const { return is_causal ? std::min(end, keys) : keys; }

  // Read the options of a call, and where the projections are in arrays[first] and, if there are two, the next; false if
  // these are not those of attention.
  bool read(const Call& call, const std::vector<View>& arrays, std::size_t first) {
    if (!call.has_numbers({"num_heads", "causal"})) return false;
    heads = std::int64_t(call.number("num_heads"));
    is_causal = call.number("causal") != 0;
    const std::size_t count = arrays.size() - first;
    if (count != 1 && count != 2) return false;
    const View &x = arrays[first], &memory = arrays.back();
    if (x.ndim() != 3 || memory.ndim() != 3 || x.size() == 0 || memory.size() == 0) return false;
    const std::int64_t columns = x.shape[2], width = count == 1 ? columns / 3 : columns;
    if (count == 1 ? columns % 3 != 0 : memory.shape[2] != 2 * width || memory.shape[0] != x.shape[0]) return false;
    if (heads < 1 || width % heads) return false;
    batch = x.shape[0];
    queries = x.shape[1];
    keys = memory.shape[1];
    d = width / heads;
    scale = float(1 / std::sqrt(double(d)));
    const std::int64_t step = memory.shape[2], sample = step * keys;
    T* from = static_cast<T*>(memory.data) + (count == 1 ? width : 0);
    q = {static_cast<T*>(x.data), columns, columns * queries};
    k = {from, step, sample};
    v = {from + width, step, sample};
    return true;
  }

  bool fits(const View& y) const {
    return y.shape == Shape{batch, queries, heads * d} && (!is_causal || queries == keys);
  }
};

// Memory of a thread, in parts that begin with a cache line.
class Workspace {
 public:
  explicit Workspace(std::initializer_list<std::size_t> sizes) {
    std::size_t all = kLine;
    for (const std::size_t size : sizes) all += rounded(size);
    memory_.resize(all);
    next_ = memory_.data() + (kLine - reinterpret_cast<std::uintptr_t>(memory_.data()) / sizeof(float) % kLine) % kLine;
  }
  float* take(std::size_t size) {
    float* const part = next_;
    next_ += rounded(size);
    return part;
  }

 private:
  static constexpr std::size_t kLine = 16;  // floats
  static std::size_t rounded(std::size_t size) { return (size + kLine - 1) / kLine * kLine; }

  std::vector<float> memory_;
  float* next_;
};

// For each sample and head, with scratch of these sizes for each thread: body(sample, head, scratch parts...).
template <class T, class Body>
void for_heads(const Attention<T>& p, std::initializer_list<std::size_t> sizes, const Body& body) {
  parallel_for(std::size_t(p.batch * p.heads), std::size_t(p.queries * p.keys * p.d),
               [&](std::size_t begin, std::size_t end) {
                 Workspace scratch(sizes);
                 std::vector<float*> parts;
                 for (const std::size_t size : sizes) parts.push_back(scratch.take(size));
                 for (auto i = std::int64_t(begin); i < std::int64_t(end); ++i)
                   body(i / p.heads, i % p.heads, parts.data());
               });
}

// Floats of a block of T that is widened or rounded: none where T is float.
template <class T>
constexpr std::size_t room_for(std::int64_t rows, std::int64_t d) {
  return std::is_same_v<T, float> ? 0 : std::size_t(rows * d);
}

// Rows from number `start` on as floats: where they are, or widened.
inline Part<float> floats_of(const Part<float>& part, std::int64_t start, std::int64_t, std::int64_t, float*) {
  return {part.row(start), part.step, 0};
}
inline Part<float> floats_of(const Part<Bfloat16>& part, std::int64_t start, std::int64_t rows, std::int64_t d, float* buffer) {
  widen_rows(part.row(start), part.step, buffer, d, rows, d);
  return {buffer, d, 0};
}

// Where to compute rows from number `start` on, which round() then puts there.
inline Part<float> target_of(const Part<float>& part, std::int64_t start, std::int64_t, float*) {
  return {part.row(start), part.step, 0};
}
inline Part<float> target_of(const Part<Bfloat16>&, std::int64_t, std::int64_t d, float* buffer) { return {buffer, d, 0}; }
inline void round(const Part<float>&, const Part<float>&, std::int64_t, std::int64_t, std::int64_t) {}
inline void round(const Part<float>& from, const Part<Bfloat16>& to, std::int64_t start, std::int64_t rows, std::int64_t d) {
  narrow_rows(from.data, from.step, to.row(start), to.step, rows, d);
}

// Whether all are row-major ones of T.
template <class T>
bool are_arrays_of(const std::vector<View>& arrays) {
  return std::all_of(arrays.begin(), arrays.end(), [](const View& view) {
    return std::is_same_v<T, float> ? view.is_floats() : view.is_bfloat16s();
  });
}

}  // namespace singa_lite
