// SPDX-License-Identifier: Apache-2.0
#include "kernels/pool.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/clones.h"
#include "kernels/threads.h"
#include "kernels/widen.h"

namespace singa_lite {
namespace pool_loops {

template <class Stride>
ALWAYS_INLINE void keep_larger_every(const float* x, Stride stride, std::int32_t number, float* best,
                                     std::int32_t* winners, std::int64_t count) {
#pragma GCC ivdep
  for (std::int64_t j = 0; j < count; ++j) {
    const float value = x[j * stride];
    const bool is_larger = value > best[j];  // strictly: the first of equals wins
    winners[j] = is_larger ? number : winners[j];
    best[j] = is_larger | (value != value) ? value : best[j];  // NaN is passed on
  }
}

// Of `count` windows side by side: best = the larger of it and a cell, and the number of the cell where that has won.
CLONES void keep_larger(const float* x, std::int64_t stride, std::int32_t number, float* best, std::int32_t* winners,
                        std::int64_t count) {
  if (stride == 1) return keep_larger_every(x, std::integral_constant<int, 1>(), number, best, winners, count);
  if (stride == 2) return keep_larger_every(x, std::integral_constant<int, 2>(), number, best, winners, count);
  keep_larger_every(x, stride, number, best, winners, count);
}

}  // namespace pool_loops

namespace {

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// 2x2 windows side by side, the common case, four at a time: rows are too short for the vectors a compiler would choose.
typedef float Float4 __attribute__((vector_size(16)));
typedef std::int32_t Int4 __attribute__((vector_size(16)));

ALWAYS_INLINE Float4 load(const float* from) {
  Float4 four;
  std::memcpy(&four, from, sizeof four);
  return four;
}

ALWAYS_INLINE void keep_larger(Float4 value, std::int32_t number, Float4* best, Int4* winner) {
  const Int4 is_larger = value > *best;  // strictly: the first of equals wins
  *winner = is_larger ? Int4{number, number, number, number} : *winner;
  *best = (is_larger | (value != value)) ? value : *best;  // NaN is passed on
}

template <class Index>
void max_2x2(const float* top, const float* bottom, float* y, Index* indices, std::int64_t count) {
  std::int64_t j = 0;
  for (; j + 4 <= count; j += 4) {
    const Float4 a = load(top + 2 * j), b = load(top + 2 * j + 4), c = load(bottom + 2 * j), d = load(bottom + 2 * j + 4);
    Float4 best = __builtin_shufflevector(a, b, 0, 2, 4, 6);
    Int4 winner{};
    keep_larger(__builtin_shufflevector(a, b, 1, 3, 5, 7), 1, &best, &winner);
    keep_larger(__builtin_shufflevector(c, d, 0, 2, 4, 6), 2, &best, &winner);
    keep_larger(__builtin_shufflevector(c, d, 1, 3, 5, 7), 3, &best, &winner);
    std::memcpy(y + j, &best, sizeof best);
    for (int i = 0; i < 4; ++i) indices[j + i] = Index(winner[i]);
  }
  for (; j < count; ++j) {
    const float cells[4] = {top[2 * j], top[2 * j + 1], bottom[2 * j], bottom[2 * j + 1]};
    int winner = 0;
    float best = cells[0];
    for (int number = 1; number < 4; ++number) {
      winner = cells[number] > best ? number : winner;
      best = cells[number] > best || cells[number] != cells[number] ? cells[number] : best;
    }
    y[j] = best;
    indices[j] = Index(winner);
  }
}

template <class Index>
void max_2x2_backward(const float* dy, const Index* indices, float* top, float* bottom, std::int64_t count) {
  std::int64_t j = 0;
  for (; j + 4 <= count; j += 4) {
    const Float4 grads = load(dy + j), zero{};
    const Int4 winner{std::int32_t(indices[j]), std::int32_t(indices[j + 1]), std::int32_t(indices[j + 2]),
                      std::int32_t(indices[j + 3])};
    Float4 cells[4];
    for (int number = 0; number < 4; ++number)
      cells[number] = winner == Int4{number, number, number, number} ? grads : zero;
    const Float4 rows[4] = {__builtin_shufflevector(cells[0], cells[1], 0, 4, 1, 5),
                            __builtin_shufflevector(cells[0], cells[1], 2, 6, 3, 7),
                            __builtin_shufflevector(cells[2], cells[3], 0, 4, 1, 5),
                            __builtin_shufflevector(cells[2], cells[3], 2, 6, 3, 7)};
    std::memcpy(top + 2 * j, rows, sizeof rows / 2);
    std::memcpy(bottom + 2 * j, rows + 2, sizeof rows / 2);
  }
  for (; j < count; ++j) {  // written out: of a loop over the four, GCC 12 loses a store with -fsanitize=undefined
    const int winner = int(indices[j]);
    top[2 * j] = winner == 0 ? dy[j] : 0.0f;
    top[2 * j + 1] = winner == 1 ? dy[j] : 0.0f;
    bottom[2 * j] = winner == 2 ? dy[j] : 0.0f;
    bottom[2 * j + 1] = winner == 3 ? dy[j] : 0.0f;
  }
}

bool is_2x2(const Pool& p) {
  return p.kernel[0] == 2 && p.kernel[1] == 2 && p.stride[0] == 2 && p.stride[1] == 2 && p.padding[0] == 0 &&
         p.padding[1] == 0;
}

constexpr std::int64_t kMostColumns = 256;  // windows side by side whose winners are held at a time

template <class Index>
void max_plane(const Pool& p, const float* x, float* y, Index* indices) {
  for (std::int64_t i = 0; i < p.out_height; ++i) {
    const Span rows = span(p, 0, i, p.height);
    for (std::int64_t first = 0; first < p.out_width; first += kMostColumns) {
      const std::int64_t count = std::min(kMostColumns, p.out_width - first);
      float best[kMostColumns];
      std::int32_t winners[kMostColumns] = {};
      std::fill_n(best, count, -INFINITY);
      // the columns of these windows that are inside the image for one of them
      const std::int64_t first_column = std::max<std::int64_t>(p.padding[1] - (first + count - 1) * p.stride[1], 0);
      const std::int64_t end_column = std::min(p.width + p.padding[1] - first * p.stride[1], p.kernel[1]);
      for (std::int64_t r = rows.begin; r < rows.end; ++r)
        for (std::int64_t c = first_column; c < end_column; ++c) {
          // the windows whose cell in column c is inside the image
          const std::int64_t before = p.padding[1] - c - first * p.stride[1];
          const std::int64_t begin = std::min(divide_up(std::max<std::int64_t>(before, 0), p.stride[1]), count);
          const std::int64_t end = std::clamp(divide_up(std::max<std::int64_t>(p.width + before, 0), p.stride[1]), begin, count);
          const auto number = std::int32_t((r - rows.begin + rows.before) * p.kernel[1] + c);
          pool_loops::keep_larger(x + r * p.width - before + begin * p.stride[1], p.stride[1], number, best + begin,
                                  winners + begin, end - begin);
        }
      std::copy_n(best, count, y);
      std::copy_n(winners, count, indices);
      y += count, indices += count;
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
      const float grad = *dy++ * share(p, rows, columns);
      for (std::int64_t r = rows.begin; r < rows.end; ++r)
        for (std::int64_t c = columns.begin; c < columns.end; ++c) dx[r * p.width + c] += grad;
    }
  }
}

template <class Index>
void max_any_plane(const Pool& p, const float* x, float* y, Index* indices) {
  if (p.block > 1) return max_plane_blocked(p, x, y, indices);
  if (!is_2x2(p)) return max_plane(p, x, y, indices);
  for (std::int64_t i = 0; i < p.out_height; ++i) {
    const float* top = x + 2 * i * p.width;
    const std::int64_t at = i * p.out_width;
    max_2x2(top, top + p.width, y + at, indices + at, p.out_width);
  }
}

template <class Index>
void max_any_plane_backward(const Pool& p, const float* dy, const Index* indices, float* dx) {
  if (p.block > 1) return max_plane_backward_blocked(p, dy, indices, dx);
  if (!is_2x2(p)) return max_plane_backward(p, dy, indices, dx);
  const bool covers = 2 * p.out_height == p.height && 2 * p.out_width == p.width;
  if (!covers) std::memset(dx, 0, sizeof(float) * std::size_t(p.height * p.width));
  for (std::int64_t i = 0; i < p.out_height; ++i) {
    float* top = dx + 2 * i * p.width;
    const std::int64_t at = i * p.out_width;
    max_2x2_backward(dy + at, indices + at, top, top + p.width, p.out_width);
  }
}

// Call body(from, to, plane) with the floats of every plane, split among the threads: `in` elements of x give `out` of y.
template <class T, class Body>
void for_planes(const Pool& p, const T* x, std::int64_t in, T* y, std::int64_t out, const Body& body) {
  const std::int64_t cells = p.height * p.width + p.out_height * p.out_width * p.kernel[0] * p.kernel[1];
  const std::size_t cost = std::size_t(cells * p.block);
  parallel_for(std::size_t(p.planes), cost, [&](std::size_t begin, std::size_t end) {
    const Scratch<T> of_x{std::size_t(in)}, of_y{std::size_t(out)};
    for (auto plane = std::int64_t(begin); plane < std::int64_t(end); ++plane) {
      body(floats_of(x + plane * in, std::size_t(in), of_x), target_of(y + plane * out, of_y), plane);
      store(y + plane * out, std::size_t(out), of_y);
    }
  });
}

std::int64_t size_in(const Pool& p) { return p.height * p.width * p.block; }
std::int64_t size_out(const Pool& p) { return p.out_height * p.out_width * p.block; }

}  // namespace

template <class T, class Index>
void max_pool(const Pool& p, const T* x, T* y, Index* indices) {
  const std::int64_t out = size_out(p);
  for_planes(p, x, size_in(p), y, out, [&](const float* from, float* to, std::int64_t plane) {
    max_any_plane(p, from, to, indices + plane * out);
  });
}

template <class T, class Index>
void max_pool_backward(const Pool& p, const T* dy, const Index* indices, T* dx) {
  const std::int64_t out = size_out(p);
  for_planes(p, dy, out, dx, size_in(p), [&](const float* from, float* to, std::int64_t plane) {
    max_any_plane_backward(p, from, indices + plane * out, to);
  });
}

template <class T>
void avg_pool(const Pool& p, const T* x, T* y) {
  for_planes(p, x, size_in(p), y, size_out(p), [&](const float* from, float* to, std::int64_t) {
    return (p.block > 1 ? avg_plane_blocked : avg_plane)(p, from, to);
  });
}

template <class T>
void avg_pool_backward(const Pool& p, const T* dy, T* dx) {
  for_planes(p, dy, size_out(p), dx, size_in(p), [&](const float* from, float* to, std::int64_t) {
    return (p.block > 1 ? avg_plane_backward_blocked : avg_plane_backward)(p, from, to);
  });
}

#define POOLS(T)                                                                   \
  template void max_pool(const Pool&, const T*, T*, std::uint8_t*);                \
  template void max_pool(const Pool&, const T*, T*, std::int32_t*);                \
  template void max_pool_backward(const Pool&, const T*, const std::uint8_t*, T*); \
  template void max_pool_backward(const Pool&, const T*, const std::int32_t*, T*); \
  template void avg_pool(const Pool&, const T*, T*);                               \
  template void avg_pool_backward(const Pool&, const T*, T*);
POOLS(float)
POOLS(Bfloat16)
#undef POOLS

}  // namespace singa_lite
