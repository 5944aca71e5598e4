// SPDX-License-Identifier: Apache-2.0
// 2-D pooling of planes: max with the number of the winner in its window, and average.
#pragma once

#include <cstddef>
#include <cstdint>

namespace singa_lite {

// planes = N * C images of height x width; windows as in backend/base.py, padding smaller than the window.
struct Pool {
  std::int64_t planes, height, width, out_height, out_width;
  std::int64_t kernel[2], stride[2], padding[2];
  bool count_include_pad;
};

// Index: std::uint8_t or std::int32_t.
template <class Index>
void max_pool(const Pool& pool, const float* x, float* y, Index* indices);
template <class Index>
void max_pool_backward(const Pool& pool, const float* dy, const Index* indices, float* dx);
void avg_pool(const Pool& pool, const float* x, float* y);
void avg_pool_backward(const Pool& pool, const float* dy, float* dx);

}  // namespace singa_lite
