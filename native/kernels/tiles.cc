// SPDX-License-Identifier: Apache-2.0
#include "kernels/tiles.h"

#include <algorithm>
#include <cstring>

#include "kernels/clones.h"

#if defined(__x86_64__) && !defined(SINGA_LITE_SANITIZE)
#define LEVEL_4 __attribute__((target("avx512f")))
#define LEVEL_3 __attribute__((target("avx2,fma")))
#else
#define LEVEL_4
#define LEVEL_3
#endif

namespace singa_lite {
namespace {

constexpr std::int64_t kDepth = 256;  // rows of a panel that stay in the first cache: 32 KiB
constexpr int kTileRows = 8;

using Floats4 = float __attribute__((vector_size(16)));
using Floats8 = float __attribute__((vector_size(32)));
using Floats16 = float __attribute__((vector_size(64)));

template <class Vector>
ALWAYS_INLINE Vector load(const float* from) {
  Vector value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

// c (rows, vectors) = a b: the sums are registers. b has rows of kPanel floats.
template <class Vector, int rows, int vectors>
ALWAYS_INLINE void tile(const Matrix& a, const float* b, std::int64_t k, bool adds, float* c, std::int64_t c_step) {
  constexpr int kLanes = int(sizeof(Vector) / sizeof(float));
  Vector sums[rows][vectors] = {};
  const float* column = a.data;
  const std::int64_t row_step = a.row, step = a.column;
  for (std::int64_t l = 0; l < k; ++l, column += step, b += kPanel) {
    Vector right[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) right[v] = load<Vector>(b + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const float left = column[r * row_step];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sums[r][v] += left * right[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      float* to = c + r * c_step + v * kLanes;
      const Vector value = adds ? load<Vector>(to) + sums[r][v] : sums[r][v];
      __builtin_memcpy(to, &value, sizeof value);
    }
}

// A tile of kPanel columns, in parts of `vectors` vectors.
template <class Vector, int rows, int vectors>
ALWAYS_INLINE void panel_tile(const Matrix& a, const float* b, std::int64_t k, bool adds, float* c,
                              std::int64_t c_step) {
  constexpr int kWidth = vectors * int(sizeof(Vector) / sizeof(float));
  for (int j = 0; j < kPanel; j += kWidth) tile<Vector, rows, vectors>(a, b + j, k, adds, c + j, c_step);
}

using Tile = void (*)(const Matrix& a, const float* b, std::int64_t k, bool adds, float* c, std::int64_t c_step);

// Rows of tiles of each level: as many sums as it has registers for.
template <int rows>
LEVEL_4 void tile_4(const Matrix& a, const float* b, std::int64_t k, bool adds, float* c, std::int64_t c_step) {
  panel_tile<Floats16, rows, 2>(a, b, k, adds, c, c_step);
}
template <int rows>
LEVEL_3 void tile_3(const Matrix& a, const float* b, std::int64_t k, bool adds, float* c, std::int64_t c_step) {
  constexpr int kHalf = rows > 4 ? 4 : rows;  // 8 sums of 16 registers
  for (int r = 0; r < rows; r += kHalf)
    panel_tile<Floats8, kHalf, 2>(a.from(r, 0), b, k, adds, c + r * c_step, c_step);
}
template <int rows>
void tile_1(const Matrix& a, const float* b, std::int64_t k, bool adds, float* c, std::int64_t c_step) {
  constexpr int kHalf = rows > 4 ? 4 : rows;
  for (int r = 0; r < rows; r += kHalf)
    panel_tile<Floats4, kHalf, 2>(a.from(r, 0), b, k, adds, c + r * c_step, c_step);
}

struct Level {
  Tile tile_of_8, tile_of_4, tile_of_2, tile_of_1;
};

const Level& level_of(int number) {
  static const Level fourth{tile_4<8>, tile_4<4>, tile_4<2>, tile_4<1>}, third{tile_3<8>, tile_3<4>, tile_3<2>, tile_3<1>},
      first{tile_1<8>, tile_1<4>, tile_1<2>, tile_1<1>};
  return number == 4 ? fourth : number == 3 ? third : first;
}

// One tile of c, of which `columns` of kPanel are wanted.
void run_tile(Tile code, int rows, const Matrix& a, const float* b, std::int64_t k, bool adds, float* c,
              std::int64_t c_step, std::int64_t columns) {
  if (columns == kPanel) return code(a, b, k, adds, c, c_step);
  float whole[kTileRows * kPanel];
  code(a, b, k, false, whole, kPanel);
  for (int r = 0; r < rows; ++r)
    for (std::int64_t j = 0; j < columns; ++j)
      c[r * c_step + j] = adds ? c[r * c_step + j] + whole[r * kPanel + j] : whole[r * kPanel + j];
}

// One panel whose columns are rows of k floats in `from`, `step` apart: by squares of 4 x 4.
void pack_transposed(const float* from, std::int64_t step, std::int64_t k, std::int64_t columns, float* panel) {
#if defined(__clang__) || __GNUC__ >= 12
  const std::int64_t whole_k = k / 4 * 4, whole_columns = columns / 4 * 4;
  for (std::int64_t j = 0; j < whole_columns; j += 4)
    for (std::int64_t l = 0; l < whole_k; l += 4) {
      const float* square = from + j * step + l;
      const auto a = load<Floats4>(square), b = load<Floats4>(square + step), c = load<Floats4>(square + 2 * step),
                 d = load<Floats4>(square + 3 * step);
      const Floats4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7),
                    cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      const Floats4 rows[4] = {
          __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5), __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7),
          __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5), __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
      for (int r = 0; r < 4; ++r) std::memcpy(panel + (l + r) * kPanel + j, &rows[r], sizeof rows[r]);
    }
#else  // without __builtin_shufflevector
  constexpr std::int64_t whole_k = 0, whole_columns = 0;
#endif
  for (std::int64_t j = 0; j < columns; ++j)
    for (std::int64_t l = j < whole_columns ? whole_k : 0; l < k; ++l) panel[l * kPanel + j] = from[j * step + l];
}

}  // namespace

void pack_panels(const Matrix& b, std::int64_t k, std::int64_t n, float* panels) {
  for (std::int64_t start = 0; start < n; start += kPanel, panels += k * kPanel) {
    const std::int64_t columns = std::min(kPanel, n - start);
    const float* from = b.data + start * b.column;
    if (columns < kPanel) std::memset(panels, 0, std::size_t(k * kPanel) * sizeof(float));
    if (b.row == 1) {
      pack_transposed(from, b.column, k, columns, panels);
    } else if (b.column == 1 && columns == kPanel) {
      for (std::int64_t l = 0; l < k; ++l) std::memcpy(panels + l * kPanel, from + l * b.row, kPanel * sizeof(float));
    } else {
      for (std::int64_t l = 0; l < k; ++l)
        for (std::int64_t j = 0; j < columns; ++j) panels[l * kPanel + j] = from[l * b.row + j * b.column];
    }
  }
}

void multiply_panels(const Matrix& a, const Panels& b, std::int64_t m, std::int64_t n, std::int64_t k, bool adds,
                     float* c, std::int64_t c_step, int level) {
  const Level& code = level_of(level);
  for (std::int64_t j = 0; j < n; j += kPanel) {
    const std::int64_t columns = std::min(kPanel, n - j);
    for (std::int64_t start = 0; start < k; start += kDepth) {
      const std::int64_t depth = std::min(kDepth, k - start);
      const float* from = b.data + b.k * j + start * kPanel;
      const bool is_added = adds || start > 0;
      std::int64_t i = 0;
      const auto rows = [&](Tile tile, int count) {
        for (; m - i >= count; i += count)
          run_tile(tile, count, a.from(i, start), from, depth, is_added, c + i * c_step + j, c_step, columns);
      };
      rows(code.tile_of_8, 8);
      rows(code.tile_of_4, 4);
      rows(code.tile_of_2, 2);
      rows(code.tile_of_1, 1);
    }
  }
}

int processor_level() {
#if defined(__x86_64__) && !defined(SINGA_LITE_SANITIZE)
  static const int level = __builtin_cpu_supports("avx512f") ? 4
                           : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 3 : 1;
  return level;
#else
  return 1;
#endif
}

void multiply_panels(const Matrix& a, const Panels& b, std::int64_t m, std::int64_t n, std::int64_t k, bool adds,
                     float* c, std::int64_t c_step) {
  multiply_panels(a, b, m, n, k, adds, c, c_step, processor_level());
}

}  // namespace singa_lite
