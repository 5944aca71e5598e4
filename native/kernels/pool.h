// SPDX-License-Identifier: Apache-2.0
// 2-D pooling of planes: max with the number of the winner in its window, and average.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/clones.h"

namespace singa_lite {

// planes images of height x width, each of `block` channels side by side: N * C of one, or N * C / block, see Note [memory formats]
// in layout.h. Windows as in backend/base.py, padding smaller than the window.
struct Pool {
  std::int64_t planes, height, width, out_height, out_width;
  std::int64_t kernel[2], stride[2], padding[2];
  bool count_include_pad;
  std::int64_t block = 1;
};

// The part of a window inside the image: [begin, end), and how many elements are before it.
struct Span {
  std::int64_t begin, end, before;
};

inline Span span(const Pool& p, int axis, std::int64_t number, std::int64_t size) {
  const std::int64_t start = number * p.stride[axis] - p.padding[axis];
  const std::int64_t begin = std::max<std::int64_t>(start, 0);
  return {begin, std::min(start + p.kernel[axis], size), begin - start};
}

// By what the average of a window multiplies its sum.
ALWAYS_INLINE float share(const Pool& p, const Span& rows, const Span& columns) {
  const std::int64_t inside = (rows.end - rows.begin) * (columns.end - columns.begin);
  return 1.0f / float(p.count_include_pad ? p.kernel[0] * p.kernel[1] : inside);
}

// T: float or Bfloat16, of which sums are of float; Index: std::uint8_t or std::int32_t.
template <class T, class Index>
void max_pool(const Pool& pool, const T* x, T* y, Index* indices);
template <class T, class Index>
void max_pool_backward(const Pool& pool, const T* dy, const Index* indices, T* dx);
template <class T>
void avg_pool(const Pool& pool, const T* x, T* y);
template <class T>
void avg_pool_backward(const Pool& pool, const T* dy, T* dx);

// One plane with a block of more than one channel (pool_blocked.cc).
void max_plane_blocked(const Pool& pool, const float* x, float* y, std::uint8_t* indices);
void max_plane_blocked(const Pool& pool, const float* x, float* y, std::int32_t* indices);
void max_plane_backward_blocked(const Pool& pool, const float* dy, const std::uint8_t* indices, float* dx);
void max_plane_backward_blocked(const Pool& pool, const float* dy, const std::int32_t* indices, float* dx);
void avg_plane_blocked(const Pool& pool, const float* x, float* y);
void avg_plane_backward_blocked(const Pool& pool, const float* dy, float* dx);

}  // namespace singa_lite
