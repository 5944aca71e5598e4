// SPDX-License-Identifier: Apache-2.0
// Pooling of one plane whose cells hold several channels: every lane of a vector is a channel.
#include <cmath>
#include <cstring>

#include "kernels/clones.h"
#include "kernels/pool.h"

namespace singa_lite {
namespace {

template <int L>
struct Lanes {
  typedef float Floats __attribute__((vector_size(L * sizeof(float))));
  typedef std::int32_t Ints __attribute__((vector_size(L * sizeof(float))));
};

template <int L>
ALWAYS_INLINE typename Lanes<L>::Floats load(const float* from) {
  typename Lanes<L>::Floats vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// a where mask is set, else b. GCC compiles `mask ? a : b` lane by lane in a function for several processors.
template <class Ints>
ALWAYS_INLINE Ints pick(Ints mask, Ints a, Ints b) {
  return (mask & a) | (~mask & b);
}

// Call body(number, cell) for the cells of a window, row by row; cell counts cells of the image.
template <class Body>
ALWAYS_INLINE void for_cells(const Pool& p, const Span& rows, const Span& columns, const Body& body) {
  for (std::int64_t r = rows.begin; r < rows.end; ++r)
    for (std::int64_t c = columns.begin; c < columns.end; ++c)
      body((r - rows.begin + rows.before) * p.kernel[1] + c - columns.begin + columns.before, r * p.width + c);
}

// Call body(number, rows, columns) for every window.
template <class Body>
ALWAYS_INLINE void for_windows(const Pool& p, const Body& body) {
  for (std::int64_t i = 0; i < p.out_height; ++i)
    for (std::int64_t j = 0; j < p.out_width; ++j)
      body(i * p.out_width + j, span(p, 0, i, p.height), span(p, 1, j, p.width));
}

template <int L, class Index>
ALWAYS_INLINE void max_lanes(const Pool& p, const Span& rows, const Span& columns, const float* x, float* y,
                             Index* indices) {
  using Ints = typename Lanes<L>::Ints;
  using Floats = typename Lanes<L>::Floats;
  Floats best = Floats{} - INFINITY;
  Ints winner{};
  for_cells(p, rows, columns, [&](std::int64_t number, std::int64_t cell) INLINE_LAMBDA {
    const auto value = load<L>(x + cell * p.block);
    const Ints is_larger = value > best;  // strictly: the first of equals wins
    winner = pick(is_larger, Ints{} + std::int32_t(number), winner);
    best = (Floats)pick(is_larger | (value != value), (Ints)value, (Ints)best);  // NaN is passed on
  });
  std::memcpy(y, &best, sizeof best);
  typedef Index Numbers __attribute__((vector_size(L * sizeof(Index))));
  const Numbers numbers = __builtin_convertvector(winner, Numbers);
  std::memcpy(indices, &numbers, sizeof numbers);
}

template <int L, class Index>
ALWAYS_INLINE void max_lanes_backward(const Pool& p, const Span& rows, const Span& columns, const float* dy,
                                      const Index* indices, float* dx) {
  using Ints = typename Lanes<L>::Ints;
  const auto grad = load<L>(dy);
  typedef Index Numbers __attribute__((vector_size(L * sizeof(Index))));
  Numbers numbers;
  std::memcpy(&numbers, indices, sizeof numbers);
  const Ints winner = __builtin_convertvector(numbers, Ints);
  for_cells(p, rows, columns, [&](std::int64_t number, std::int64_t cell) INLINE_LAMBDA {
    const auto before = load<L>(dx + cell * p.block);
    const Ints is_winner = winner == Ints{} + std::int32_t(number);
    const auto after = before + (typename Lanes<L>::Floats)(is_winner & (Ints)grad);
    std::memcpy(dx + cell * p.block, &after, sizeof after);
  });
}

}  // namespace

namespace pool_loops {

// From lane to lane of one cell: vectors of 4 channels, which every processor has, then 1.
#define FOR_LANES(call)                                                 \
  std::int64_t lane = 0;                                                \
  for (; lane + 4 <= p.block; lane += 4) call(4);                       \
  for (; lane < p.block; ++lane) call(1);

template <class Index>
ALWAYS_INLINE void max_windows(const Pool& p, const float* x, float* y, Index* indices) {
  for_windows(p, [&](std::int64_t number, const Span& rows, const Span& columns) INLINE_LAMBDA {
    const std::int64_t at = number * p.block;
#define MAX_LANES(L) max_lanes<L>(p, rows, columns, x + lane, y + at + lane, indices + at + lane)
    FOR_LANES(MAX_LANES)
#undef MAX_LANES
  });
}

template <class Index>
ALWAYS_INLINE void max_windows_backward(const Pool& p, const float* dy, const Index* indices, float* dx) {
  std::memset(dx, 0, sizeof(float) * std::size_t(p.height * p.width * p.block));
  for_windows(p, [&](std::int64_t number, const Span& rows, const Span& columns) INLINE_LAMBDA {
    const std::int64_t at = number * p.block;
#define MAX_LANES(L) max_lanes_backward<L>(p, rows, columns, dy + at + lane, indices + at + lane, dx + lane)
    FOR_LANES(MAX_LANES)
#undef MAX_LANES
  });
}

}  // namespace pool_loops

// GCC clones no templates.
#define FOR_INDICES_OF(Index)                                                                                  \
  CLONES void max_plane_blocked(const Pool& p, const float* x, float* y, Index* indices) {                     \
    pool_loops::max_windows(p, x, y, indices);                                                                 \
  }                                                                                                            \
  CLONES void max_plane_backward_blocked(const Pool& p, const float* dy, const Index* indices, float* dx) {    \
    pool_loops::max_windows_backward(p, dy, indices, dx);                                                      \
  }

FOR_INDICES_OF(std::uint8_t)
FOR_INDICES_OF(std::int32_t)
#undef FOR_INDICES_OF

CLONES void avg_plane_blocked(const Pool& p, const float* x, float* y) {
  for_windows(p, [&](std::int64_t number, const Span& rows, const Span& columns) INLINE_LAMBDA {
    float* to = y + number * p.block;
    std::memset(to, 0, sizeof(float) * std::size_t(p.block));
    for_cells(p, rows, columns, [&](std::int64_t, std::int64_t cell) INLINE_LAMBDA {
      for (std::int64_t lane = 0; lane < p.block; ++lane) to[lane] += x[cell * p.block + lane];
    });
    const float factor = share(p, rows, columns);
    for (std::int64_t lane = 0; lane < p.block; ++lane) to[lane] *= factor;
  });
}

CLONES void avg_plane_backward_blocked(const Pool& p, const float* dy, float* dx) {
  std::memset(dx, 0, sizeof(float) * std::size_t(p.height * p.width * p.block));
  for_windows(p, [&](std::int64_t number, const Span& rows, const Span& columns) INLINE_LAMBDA {
    const float factor = share(p, rows, columns);
    const float* from = dy + number * p.block;
    for_cells(p, rows, columns, [&](std::int64_t, std::int64_t cell) INLINE_LAMBDA {
      for (std::int64_t lane = 0; lane < p.block; ++lane) dx[cell * p.block + lane] += from[lane] * factor;
    });
  });
}

}  // namespace singa_lite
