// SPDX-License-Identifier: Apache-2.0
// Kernels of float on arrays of bfloat16: a piece that stays in a cache is widened into scratch, computed there, and the
// result rounded once. For arrays of float the same calls do nothing, so a kernel is written once for both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/bfloat16.h"
#include "kernels/memory.h"

namespace singa_lite {

// to[i] = from[i], by the calling thread alone.
void widen(const Bfloat16* from, float* to, std::size_t count);
void narrow(const float* from, Bfloat16* to, std::size_t count);

// The same for rows of `count`, which are so many elements apart.
void widen_rows(const Bfloat16* from, std::int64_t from_step, float* to, std::int64_t to_step, std::int64_t rows,
                std::int64_t count);
void narrow_rows(const float* from, std::int64_t from_step, Bfloat16* to, std::int64_t to_step, std::int64_t rows,
                 std::int64_t count);

// A row-major array of float or of bfloat16, known when the program runs. Its elements are read and written as floats: where
// they are, or by way of a buffer.
struct Operand {
  void* data = nullptr;
  bool is_bfloat16 = false;

  // `count` elements from `offset` on.
  const float* read(std::size_t offset, std::size_t count, float* buffer) const {
    if (!is_bfloat16) return static_cast<const float*>(data) + offset;
    widen(static_cast<const Bfloat16*>(data) + offset, buffer, count);
    return buffer;
  }
  // Where to compute the elements from `offset` on, which write() then rounds.
  float* target(std::size_t offset, float* buffer) const {
    return is_bfloat16 ? buffer : static_cast<float*>(data) + offset;
  }
  void write(std::size_t offset, std::size_t count, const float* buffer) const {
    if (is_bfloat16) narrow(buffer, static_cast<Bfloat16*>(data) + offset, count);
  }
};

// Room for the floats of a piece of T, from the pool; none where T is float.
template <class T>
class Scratch {
 public:
  explicit Scratch(std::size_t count)
      : block_(std::is_same_v<std::remove_const_t<T>, float> ? 0 : count * sizeof(float)) {}
  float* data() const { return static_cast<float*>(block_.data()); }

 private:
  PoolBlock block_;
};

// The elements at x as floats: x itself, or scratch that they are widened into.
inline const float* floats_of(const float* x, std::size_t, const Scratch<float>&) { return x; }
inline const float* floats_of(const Bfloat16* x, std::size_t count, const Scratch<Bfloat16>& scratch) {
  widen(x, scratch.data(), count);
  return scratch.data();
}

// Where to compute what goes to y: y itself, or scratch, which store() rounds into y.
inline float* target_of(float* y, const Scratch<float>&) { return y; }
inline float* target_of(Bfloat16*, const Scratch<Bfloat16>& scratch) { return scratch.data(); }
inline void store(float*, std::size_t, const Scratch<float>&) {}
inline void store(Bfloat16* y, std::size_t count, const Scratch<Bfloat16>& scratch) { narrow(scratch.data(), y, count); }

}  // namespace singa_lite
