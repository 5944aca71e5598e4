// SPDX-License-Identifier: Apache-2.0
#include "kernels/widen.h"

#include "kernels/clones.h"

namespace singa_lite {
namespace widen_loops {

CLONES void widen(const Bfloat16* from, std::int64_t from_step, float* to, std::int64_t to_step, std::int64_t rows,
                  std::int64_t count) {
  for (std::int64_t row = 0; row < rows; ++row, from += from_step, to += to_step)
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) to[i] = from[i];
}

CLONES void narrow(const float* from, std::int64_t from_step, Bfloat16* to, std::int64_t to_step, std::int64_t rows,
                   std::int64_t count) {
  for (std::int64_t row = 0; row < rows; ++row, from += from_step, to += to_step)
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) to[i].bits = Bfloat16::rounded(from[i]);
}

}  // namespace widen_loops

void widen(const Bfloat16* from, float* to, std::size_t count) { widen_rows(from, 0, to, 0, 1, std::int64_t(count)); }
void narrow(const float* from, Bfloat16* to, std::size_t count) { narrow_rows(from, 0, to, 0, 1, std::int64_t(count)); }

void widen_rows(const Bfloat16* from, std::int64_t from_step, float* to, std::int64_t to_step, std::int64_t rows,
                std::int64_t count) {
  widen_loops::widen(from, from_step, to, to_step, rows, count);
}

void narrow_rows(const float* from, std::int64_t from_step, Bfloat16* to, std::int64_t to_step, std::int64_t rows,
                 std::int64_t count) {
  widen_loops::narrow(from, from_step, to, to_step, rows, count);
}

}  // namespace singa_lite
