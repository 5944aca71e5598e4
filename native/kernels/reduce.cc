// SPDX-License-Identifier: Apache-2.0
#include "kernels/reduce.h"

#include <algorithm>
#include <type_traits>

#include "kernels/clones.h"
#include "kernels/threads.h"

namespace singa_lite {
namespace {

constexpr std::size_t kRun = 64;                  // values added up in float
constexpr std::size_t kColumns = 2048;            // of a block: its sums stay in the first cache
constexpr std::size_t kNarrow = 128;              // fewer columns are summed several rows at a time
constexpr std::size_t kPieceElements = 64 << 10;  // of one task; longer sums are joined from pieces

// In which values of a type are added up within a run.
template <class From>
using Run = std::conditional_t<std::is_same_v<From, Bfloat16>, float, From>;

}  // namespace

namespace reduce_loops {

// totals[c] += sum over r of x[r][c], columns <= kColumns
template <class From>
ALWAYS_INLINE void add_rows_of(const From* x, double* totals, std::size_t rows, std::size_t stride,
                               std::size_t columns) {
  Run<From> run[kColumns];
  for (std::size_t start = 0; start < rows; start += kRun) {
    const std::size_t end = std::min(start + kRun, rows);
    for (std::size_t c = 0; c < columns; ++c) run[c] = x[start * stride + c];
    for (std::size_t r = start + 1; r < end; ++r)
#pragma GCC ivdep
      for (std::size_t c = 0; c < columns; ++c) run[c] += x[r * stride + c];
    for (std::size_t c = 0; c < columns; ++c) totals[c] += run[c];
  }
}

CLONES void add_rows(const float* x, double* totals, std::size_t rows, std::size_t stride, std::size_t columns) {
  add_rows_of(x, totals, rows, stride, columns);
}
CLONES void add_rows(const Bfloat16* x, double* totals, std::size_t rows, std::size_t stride, std::size_t columns) {
  add_rows_of(x, totals, rows, stride, columns);
}
CLONES void add_rows(const double* x, double* totals, std::size_t rows, std::size_t stride, std::size_t columns) {
  add_rows_of(x, totals, rows, stride, columns);
}

// In vectors of at least four lanes, so a lane adds no more than 64 values in float.
template <class From>
ALWAYS_INLINE double row_of(const From* x, std::size_t count) {
  constexpr std::size_t kChunk = 4 * kRun;
  double total = 0;
  for (std::size_t start = 0; start < count; start += kChunk) {
    const std::size_t end = std::min(start + kChunk, count);
    Run<From> run = 0;
#pragma omp simd reduction(+ : run)
    for (std::size_t i = start; i < end; ++i) run += x[i];
    total += run;
  }
  return total;
}

// out[r] = sum of row r, divided by divisor
template <class From, class To>
ALWAYS_INLINE void rows_of(const From* x, To* out, std::size_t rows, std::size_t count, double divisor) {
  for (std::size_t r = 0; r < rows; ++r) out[r] = To(row_of(x + r * count, count) / divisor);
}

CLONES void sum_rows(const float* x, float* out, std::size_t rows, std::size_t count, double divisor) {
  rows_of(x, out, rows, count, divisor);
}
CLONES void sum_rows(const float* x, double* out, std::size_t rows, std::size_t count, double divisor) {
  rows_of(x, out, rows, count, divisor);
}
CLONES void sum_rows(const Bfloat16* x, float* out, std::size_t rows, std::size_t count, double divisor) {
  rows_of(x, out, rows, count, divisor);
}
CLONES void sum_rows(const Bfloat16* x, double* out, std::size_t rows, std::size_t count, double divisor) {
  rows_of(x, out, rows, count, divisor);
}
CLONES void sum_rows(const double* x, float* out, std::size_t rows, std::size_t count, double divisor) {
  rows_of(x, out, rows, count, divisor);
}
CLONES void sum_rows(const double* x, double* out, std::size_t rows, std::size_t count, double divisor) {
  rows_of(x, out, rows, count, divisor);
}

// out[c] = sum over r of x[r][c], divided by divisor, for few rows
CLONES void sum_few(const float* x, float* out, std::size_t rows, std::size_t stride, std::size_t columns,
                    float divisor) {
#pragma GCC ivdep
  for (std::size_t c = 0; c < columns; ++c) out[c] = x[c];
  for (std::size_t r = 1; r < rows; ++r)
#pragma GCC ivdep
    for (std::size_t c = 0; c < columns; ++c) out[c] += x[r * stride + c];
  if (divisor != 1)
    for (std::size_t c = 0; c < columns; ++c) out[c] /= divisor;
}

}  // namespace reduce_loops

namespace {

// totals[c] += sum over r of x[r][c] for any number of columns up to kColumns, all of a row.
template <class From>
void add_narrow_rows(const From* x, double* totals, std::size_t rows, std::size_t columns) {
  const std::size_t fold = kColumns / columns, folded = rows / fold, width = fold * columns;
  double wide[kColumns] = {};
  reduce_loops::add_rows(x, wide, folded, width, width);
  for (std::size_t i = 0; i < width; ++i) totals[i % columns] += wide[i];
  reduce_loops::add_rows(x + folded * width, totals, rows - folded * fold, columns, columns);
}

// totals[c] of columns [begin, begin + columns) of x (rows, width)
template <class From>
void sum_block(const From* x, double* totals, std::size_t rows, std::size_t width, std::size_t columns) {
  std::fill(totals, totals + columns, 0.0);
  if (width < kNarrow) add_narrow_rows(x, totals, rows, width);
  else reduce_loops::add_rows(x, totals, rows, width, columns);
}

// out (outer, inner) = sum over the middle axis of x (outer, count, inner), divided by divisor
template <class From, class To>
void sum_middle(const From* x, To* out, std::size_t outer, std::size_t count, std::size_t inner, double divisor) {
  const std::size_t blocks = (inner + kColumns - 1) / kColumns, width = std::min(inner, kColumns);
  const std::size_t piece = std::max(kRun, kPieceElements / width), pieces = (count + piece - 1) / piece;
  std::vector<double> parts(pieces > 1 ? outer * pieces * inner : 0);
  parallel_for(outer * pieces * blocks, std::min(piece, count) * width, [&](std::size_t begin, std::size_t end) {
    if (inner == 1 && pieces == 1) return reduce_loops::sum_rows(x + begin * count, out + begin, end - begin, count, divisor);
    double totals[kColumns];
    for (std::size_t task = begin; task < end; ++task) {
      const std::size_t block = task % blocks, part = task / blocks % pieces, i = task / blocks / pieces;
      const std::size_t first = block * kColumns, columns = std::min(kColumns, inner - first);
      const std::size_t row = part * piece, rows = std::min(piece, count - row);
      const From* from = x + (i * count + row) * inner + first;
      double* to = pieces > 1 ? &parts[(i * pieces + part) * inner + first] : totals;
      To* result = out + i * inner + first;
      if constexpr (std::is_same_v<From, float> && std::is_same_v<To, float>)
        if (count <= kRun) {
          reduce_loops::sum_few(from, result, rows, inner, columns, float(divisor));
          continue;
        }
      if (inner == 1) reduce_loops::sum_rows(from, to, 1, rows, 1.0);
      else sum_block(from, to, rows, inner, columns);
      if (pieces == 1)
        for (std::size_t c = 0; c < columns; ++c) result[c] = To(totals[c] / divisor);
    }
  });
  if (pieces > 1) sum_middle(parts.data(), out, outer, pieces, inner, divisor);
}

template <class From>
void sum_of(const From* x, float* out, const SummedAxes& axes, double divisor) {
  // the last group of axes is summed first, into double if there are more
  std::vector<std::size_t> sizes = axes.sizes;
  std::size_t last = axes.first, outer = 1, inner = 1;
  while (last + 2 < sizes.size()) last += 2;
  for (std::size_t axis = 0; axis < last; ++axis) outer *= sizes[axis];
  for (std::size_t axis = last + 1; axis < sizes.size(); ++axis) inner *= sizes[axis];
  if (last == axes.first) return sum_middle(x, out, outer, sizes[last], inner, divisor);
  std::vector<double> sums(outer * inner), next;
  sum_middle(x, sums.data(), outer, sizes[last], inner, 1.0);
  while (last > axes.first) {
    last -= 2;
    const std::size_t count = sizes[last];
    inner *= sizes[last + 1];
    outer /= count * sizes[last + 1];
    if (last == axes.first) return sum_middle(sums.data(), out, outer, count, inner, divisor);
    next.resize(outer * inner);
    sum_middle(sums.data(), next.data(), outer, count, inner, 1.0);
    sums.swap(next);
  }
}

}  // namespace

void sum(const float* x, float* out, const SummedAxes& axes, double divisor) { sum_of(x, out, axes, divisor); }
void sum(const Bfloat16* x, float* out, const SummedAxes& axes, double divisor) { sum_of(x, out, axes, divisor); }

}  // namespace singa_lite
