// SPDX-License-Identifier: Apache-2.0
#include "kernels/row_product.h"

#include <algorithm>

#include "kernels/clones.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"
#include "kernels/onednn.h"
#include "kernels/threads.h"

#ifdef SINGA_LITE_ONEDNN
namespace singa_lite {
namespace row_product_loops {

constexpr std::int64_t kColumns = 16;  // a cache line of the result

// Rows begin .. end of b (n, k) become columns of to (k, n).
CLONES void transpose(const Bfloat16* b, std::int64_t begin, std::int64_t end, std::int64_t n, std::int64_t k, float* to) {
  for (std::int64_t row = begin; row < end; row += kColumns)
    for (std::int64_t l = 0; l < k; ++l)
      for (std::int64_t i = row; i < std::min(row + kColumns, end); ++i) to[l * n + i] = b[i * k + l];
}

}  // namespace row_product_loops

namespace {

constexpr std::int64_t kRows = 128;  // multiplied at a time: their result stays in the second cache, and fewer are slower
constexpr std::int64_t kRowsOfAll = 1024;  // the same where all threads multiply together

// By oneDNN's product of bfloat16 numbers, which one thread may run at a time; false if it has no code for it.
bool multiply_together(const RowProduct& p, float* y, const FinishRows& finish) {
  const std::int64_t step = std::min(kRowsOfAll, p.m);
  const Scratch<Bfloat16> scratch(y ? 0 : std::size_t(step * p.n));
  for (std::int64_t start = 0; start < p.m; start += step) {
    const std::int64_t rows = std::min(step, p.m - start);
    float* const sums = y ? y + start * p.n : scratch.data();
    if (!matmul({1, rows, p.n, p.k, false, p.transpose_b}, static_cast<const Bfloat16*>(p.a.data) + start * p.k,
                static_cast<const Bfloat16*>(p.b.data), nullptr, false, sums))
      return false;
    parallel_for(std::size_t(rows), 4 * std::size_t(p.n), [&](std::size_t begin, std::size_t end) {
      finish(start + std::int64_t(begin), std::int64_t(end - begin), sums + std::int64_t(begin) * p.n);
    });
  }
  return true;
}

// b as floats in `to`, as it is or, with turns, (k, n) made of (n, k).
void widen_b(const RowProduct& p, bool turns, float* to) {
  const auto* const b = static_cast<const Bfloat16*>(p.b.data);
  if (!turns) return from_bfloat16(b, to, std::size_t(p.k * p.n));
  parallel_for(std::size_t(p.n), std::size_t(p.k), [&](std::size_t begin, std::size_t end) {
    row_product_loops::transpose(b, std::int64_t(begin), std::int64_t(end), p.n, p.k, to);
  });
}

}  // namespace

void multiply_rows(const RowProduct& p, float* y, const FinishRows& finish) {
  const bool widens = p.a.is_bfloat16;
  if (widens && multiplies_bfloat16() && multiply_together(p, y, finish)) return;
  // few rows are one block, which sgemm splits among threads by columns: else each thread would pack all of b
  const std::int64_t most = p.m <= kRows ? p.m : std::max<std::int64_t>(8, (p.m + num_threads() - 1) / num_threads());
  const std::int64_t step = std::min(kRows, most), blocks = (p.m + step - 1) / step;
  const bool turns = widens && p.transpose_b && p.m > kRows;  // once; else every block does, as those of float
  const Scratch<Bfloat16> wide_b(widens ? std::size_t(p.k * p.n) : 0);
  if (widens) widen_b(p, turns, wide_b.data());
  const float* const b = widens ? wide_b.data() : static_cast<const float*>(p.b.data);
  const bool transpose_b = p.transpose_b && !turns;
  note_parallel_region(num_threads());
  const SignalsBlocked blocked;
  parallel_for(std::size_t(blocks), std::size_t(step * p.n * p.k), [&](std::size_t begin, std::size_t end) {
    const Scratch<Bfloat16> wide_a(widens ? std::size_t(step * p.k) : 0), scratch(y ? 0 : std::size_t(step * p.n));
    for (auto block = std::int64_t(begin); block < std::int64_t(end); ++block) {
      const std::int64_t start = block * step, rows = std::min(step, p.m - start);
      const float* const a = p.a.read(std::size_t(start * p.k), std::size_t(rows * p.k), wide_a.data());
      float* const sums = y ? y + start * p.n : scratch.data();
      dnnl_sgemm('N', transpose_b ? 'T' : 'N', rows, p.n, p.k, 1.0f, a, p.k, b, transpose_b ? p.k : p.n, 0.0f, sums, p.n);
      finish(start, rows, sums);
    }
  });
}

}  // namespace singa_lite
#endif
