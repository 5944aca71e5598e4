// SPDX-License-Identifier: Apache-2.0
#include "kernels/pool.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/clones.h"
#include "kernels/threads.h"

namespace singa_lite {
namespace pool_loops {

// 2x2 windows side by side, the common case: vectors of windows instead of one at a time.
template <class Index>
ALWAYS_INLINE void max_2x2_row(const float* top, const float* bottom, float* y, Index* indices, std::int64_t count) {
#pragma GCC ivdep
  for (std::int64_t j = 0; j < count; ++j) {
    const float a = top[2 * j], b = top[2 * j + 1], c = bottom[2 * j], d = bottom[2 * j + 1];
    int number = 0;
    float best = a;
    number = b > best ? 1 : number;  // strictly: the first of equals wins
    best = (b > best) | (b != b) ? b : best;
    number = c > best ? 2 : number;
    best = (c > best) | (c != c) ? c : best;
    number = d > best ? 3 : number;
    best = (d > best) | (d != d) ? d : best;
    y[j] = best;
    indices[j] = Index(number);
  }
}
CLONES void max_2x2(const float* top, const float* bottom, float* y, std::uint8_t* indices, std::int64_t count) {
  max_2x2_row(top, bottom, y, indices, count);
}
CLONES void max_2x2(const float* top, const float* bottom, float* y, std::int32_t* indices, std::int64_t count) {
  max_2x2_row(top, bottom, y, indices, count);
}

template <class Index>
ALWAYS_INLINE void max_2x2_backward_row(const float* dy, const Index* indices, float* top, float* bottom,
                                        std::int64_t count) {
#pragma GCC ivdep
  for (std::int64_t j = 0; j < count; ++j) {
    const int number = int(indices[j]);
    const float slope = dy[j];
    top[2 * j] = number == 0 ? slope : 0.0f;
    top[2 * j + 1] = number == 1 ? slope : 0.0f;
    bottom[2 * j] = number == 2 ? slope : 0.0f;
    bottom[2 * j + 1] = number == 3 ? slope : 0.0f;
  }
}
CLONES void max_2x2_backward(const float* dy, const std::uint8_t* indices, float* top, float* bottom,
                             std::int64_t count) {
  max_2x2_backward_row(dy, indices, top, bottom, count);
}
CLONES void max_2x2_backward(const float* dy, const std::int32_t* indices, float* top, float* bottom,
                             std::int64_t count) {
  max_2x2_backward_row(dy, indices, top, bottom, count);
}

}  // namespace pool_loops

namespace {

bool is_2x2(const Pool& p) {
  return p.kernel[0] == 2 && p.kernel[1] == 2 && p.stride[0] == 2 && p.stride[1] == 2 && p.padding[0] == 0 &&
         p.padding[1] == 0;
}

// The part of a window that lies inside the image: [begin, end), and how much of it is cut off in front.
struct Span {
  std::int64_t begin, end, cut;
};

ALWAYS_INLINE Span span(const Pool& p, int axis, std::int64_t place, std::int64_t size) {
  const std::int64_t start = place * p.stride[axis] - p.padding[axis];
  const std::int64_t begin = std::max<std::int64_t>(start, 0);
  return {begin, std::min(start + p.kernel[axis], size), begin - start};
}

template <class Index>
void max_plane(const Pool& p, const float* x, float* y, Index* indices) {
  for (std::int64_t i = 0; i < p.out_height; ++i) {
    const Span rows = span(p, 0, i, p.height);
    for (std::int64_t j = 0; j < p.out_width; ++j) {
      const Span columns = span(p, 1, j, p.width);
      float best = -INFINITY;
      std::int64_t winner = 0;
      for (std::int64_t r = rows.begin; r < rows.end; ++r) {
        const std::int64_t number = (r - rows.begin + rows.cut) * p.kernel[1] + columns.cut - columns.begin;
        for (std::int64_t c = columns.begin; c < columns.end; ++c) {
          const float value = x[r * p.width + c];
          if (value > best) winner = number + c;  // strictly: the first of equals wins
          if (value > best || value != value) best = value;
        }
      }
      *y++ = best;
      *indices++ = Index(winner);
    }
  }
}

template <class Index>
void max_plane_backward(const Pool& p, const float* dy, const Index* indices, float* dx) {
  std::memset(dx, 0, sizeof(float) * std::size_t(p.height * p.width));
  for (std::int64_t i = 0; i < p.out_height; ++i)
    for (std::int64_t j = 0; j < p.out_width; ++j) {
      const std::int64_t number = std::int64_t(*indices++);
      const std::int64_t r = i * p.stride[0] - p.padding[0] + number / p.kernel[1];
      const std::int64_t c = j * p.stride[1] - p.padding[1] + number % p.kernel[1];
      // a window of -inf alone may name a cell of the padding
      if (r >= 0 && r < p.height && c >= 0 && c < p.width) dx[r * p.width + c] += *dy;
      ++dy;
    }
}

ALWAYS_INLINE float share(const Pool& p, const Span& rows, const Span& columns) {
  const std::int64_t count =
      p.count_include_pad ? p.kernel[0] * p.kernel[1] : (rows.end - rows.begin) * (columns.end - columns.begin);
  return 1.0f / float(count);
}

void avg_plane(const Pool& p, const float* x, float* y) {
  for (std::int64_t i = 0; i < p.out_height; ++i) {
    const Span rows = span(p, 0, i, p.height);
    for (std::int64_t j = 0; j < p.out_width; ++j) {
      const Span columns = span(p, 1, j, p.width);
      float total = 0;
      for (std::int64_t r = rows.begin; r < rows.end; ++r)
        for (std::int64_t c = columns.begin; c < columns.end; ++c) total += x[r * p.width + c];
      *y++ = total * share(p, rows, columns);
    }
  }
}

void avg_plane_backward(const Pool& p, const float* dy, float* dx) {
  std::memset(dx, 0, sizeof(float) * std::size_t(p.height * p.width));
  for (std::int64_t i = 0; i < p.out_height; ++i) {
    const Span rows = span(p, 0, i, p.height);
    for (std::int64_t j = 0; j < p.out_width; ++j) {
      const Span columns = span(p, 1, j, p.width);
      const float slope = *dy++ * share(p, rows, columns);
      for (std::int64_t r = rows.begin; r < rows.end; ++r)
        for (std::int64_t c = columns.begin; c < columns.end; ++c) dx[r * p.width + c] += slope;
    }
  }
}

// Call body(plane) for every plane, split among the threads.
template <class Body>
void for_planes(const Pool& p, const Body& body) {
  const std::size_t cost = std::size_t(p.height * p.width + p.out_height * p.out_width * p.kernel[0] * p.kernel[1]);
  parallel_for(std::size_t(p.planes), cost, [&](std::size_t begin, std::size_t end) {
    for (std::size_t plane = begin; plane < end; ++plane) body(std::int64_t(plane));
  });
}

}  // namespace

template <class Index>
void max_pool(const Pool& p, const float* x, float* y, Index* indices) {
  const std::int64_t in = p.height * p.width, out = p.out_height * p.out_width;
  for_planes(p, [&](std::int64_t plane) {
    if (!is_2x2(p)) return max_plane(p, x + plane * in, y + plane * out, indices + plane * out);
    for (std::int64_t i = 0; i < p.out_height; ++i) {
      const float* top = x + plane * in + 2 * i * p.width;
      const std::int64_t at = plane * out + i * p.out_width;
      pool_loops::max_2x2(top, top + p.width, y + at, indices + at, p.out_width);
    }
  });
}

template <class Index>
void max_pool_backward(const Pool& p, const float* dy, const Index* indices, float* dx) {
  const std::int64_t in = p.height * p.width, out = p.out_height * p.out_width;
  for_planes(p, [&](std::int64_t plane) {
    if (!is_2x2(p)) return max_plane_backward(p, dy + plane * out, indices + plane * out, dx + plane * in);
    const bool covers = 2 * p.out_height == p.height && 2 * p.out_width == p.width;
    if (!covers) std::memset(dx + plane * in, 0, sizeof(float) * std::size_t(in));
    for (std::int64_t i = 0; i < p.out_height; ++i) {
      float* top = dx + plane * in + 2 * i * p.width;
      const std::int64_t at = plane * out + i * p.out_width;
      pool_loops::max_2x2_backward(dy + at, indices + at, top, top + p.width, p.out_width);
    }
  });
}

void avg_pool(const Pool& p, const float* x, float* y) {
  const std::int64_t in = p.height * p.width, out = p.out_height * p.out_width;
  for_planes(p, [&](std::int64_t plane) { avg_plane(p, x + plane * in, y + plane * out); });
}

void avg_pool_backward(const Pool& p, const float* dy, float* dx) {
  const std::int64_t in = p.height * p.width, out = p.out_height * p.out_width;
  for_planes(p, [&](std::int64_t plane) { avg_plane_backward(p, dy + plane * out, dx + plane * in); });
}

template void max_pool(const Pool&, const float*, float*, std::uint8_t*);
template void max_pool(const Pool&, const float*, float*, std::int32_t*);
template void max_pool_backward(const Pool&, const float*, const std::uint8_t*, float*);
template void max_pool_backward(const Pool&, const float*, const std::int32_t*, float*);

}  // namespace singa_lite
