// SPDX-License-Identifier: Apache-2.0
#include "kernels/winograd_tiles.h"

#include "kernels/clones.h"

namespace singa_lite {
namespace {

constexpr std::int64_t kLanes = kWinogradLanes, kTaps = 9;
using Lanes = float __attribute__((vector_size(32)));
using Bits = std::uint32_t __attribute__((vector_size(32)));
using Halves = std::uint16_t __attribute__((vector_size(16)));

ALWAYS_INLINE Lanes load(const float* from) {
  Lanes value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

ALWAYS_INLINE Lanes load(const Bfloat16* from) {
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof halves);
  return Lanes(__builtin_convertvector(halves, Bits) << 16);
}

ALWAYS_INLINE void store(Lanes value, float* to) { __builtin_memcpy(to, &value, sizeof value); }

ALWAYS_INLINE void store(Lanes value, Bfloat16* to) {
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = Bfloat16(value[lane]);
}

// kLanes channels of one image: pixels `step` elements apart.
template <class T>
struct Plane {
  T* data;
  std::int64_t height, width, step;

  ALWAYS_INLINE T* at(std::int64_t row, std::int64_t column) const { return data + (row * width + column) * step; }
  ALWAYS_INLINE bool has(std::int64_t row, std::int64_t column) const {
    return row >= 0 && row < height && column >= 0 && column < width;
  }
};

template <class T>
ALWAYS_INLINE Plane<T> plane_of(const TiledImages& images, T* data, std::int64_t image, std::int64_t channel) {
  const std::int64_t pixels = images.height * images.width, inside = channel % images.block;
  return {data + (image * images.channels + channel - inside) * pixels + inside, images.height, images.width, images.block};
}

// Call body(number, image, row, column) for tiles begin .. end; the tile begins at that pixel.
template <class Body>
ALWAYS_INLINE void for_tiles(const TiledImages& images, std::int64_t begin, std::int64_t end, const Body& body) {
  const auto& [channels, height, width, block, rows, columns, first_row, first_column] = images;
  for (std::int64_t tile = begin; tile < end; ++tile)
    body(tile - begin, tile / (rows * columns), tile / columns % rows * 2 + first_row, tile % columns * 2 + first_column);
}

template <int size, class T>
ALWAYS_INLINE void load_square(const Plane<const T>& plane, std::int64_t row, std::int64_t column,
                               Lanes (&square)[size][size]) {
  const bool is_inside = row >= 0 && column >= 0 && row + size <= plane.height && column + size <= plane.width;
  for (int i = 0; i < size; ++i)
    for (int j = 0; j < size; ++j)
      square[i][j] = is_inside || plane.has(row + i, column + j) ? load(plane.at(row + i, column + j)) : Lanes{};
}

// B' of a column of 4.
struct ByB {
  static constexpr int kFrom = 4, kTo = 4;
  static ALWAYS_INLINE void column(const Lanes* x, std::int64_t step, Lanes* y) {
    y[0] = x[0] - x[2 * step];
    y[1] = x[step] + x[2 * step];
    y[2] = x[2 * step] - x[step];
    y[3] = x[step] - x[3 * step];
  }
};

// A of a column of 2.
struct ByA {
  static constexpr int kFrom = 2, kTo = 4;
  static ALWAYS_INLINE void column(const Lanes* x, std::int64_t step, Lanes* y) {
    y[0] = x[0];
    y[1] = x[0] + x[step];
    y[2] = x[0] - x[step];
    y[3] = -x[step];
  }
};

// A' of a column of 4.
struct ByTransposedA {
  static constexpr int kFrom = 4, kTo = 2;
  static ALWAYS_INLINE void column(const Lanes* x, std::int64_t step, Lanes* y) {
    y[0] = x[0] + x[step] + x[2 * step];
    y[1] = x[step] - x[2 * step] - x[3 * step];
  }
};

// G of a column of 3.
struct ByG {
  static constexpr int kFrom = 3, kTo = 4;
  static ALWAYS_INLINE void column(const Lanes* x, std::int64_t step, Lanes* y) {
    const Lanes ends = 0.5f * (x[0] + x[2 * step]), middle = 0.5f * x[step];
    y[0] = x[0];
    y[1] = ends + middle;
    y[2] = ends - middle;
    y[3] = x[2 * step];
  }
};

// G' of a column of 4.
struct ByTransposedG {
  static constexpr int kFrom = 4, kTo = 3;
  static ALWAYS_INLINE void column(const Lanes* x, std::int64_t step, Lanes* y) {
    const Lanes sum = 0.5f * (x[step] + x[2 * step]);
    y[0] = x[0] + sum;
    y[1] = 0.5f * (x[step] - x[2 * step]);
    y[2] = sum + x[3 * step];
  }
};

// M x M' of a square x.
template <class M>
ALWAYS_INLINE void transform(const Lanes (&x)[M::kFrom][M::kFrom], Lanes (&y)[M::kTo][M::kTo]) {
  Lanes columns[M::kFrom][M::kTo];  // transposed
#pragma GCC unroll 4
  for (int j = 0; j < M::kFrom; ++j) M::column(&x[0][j], M::kFrom, columns[j]);
#pragma GCC unroll 4
  for (int i = 0; i < M::kTo; ++i) M::column(&columns[0][i], M::kTo, y[i]);
}

ALWAYS_INLINE void store_tile(const Lanes (&square)[4][4], float* to, std::int64_t matrix_step) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) store(square[i][j], to + (4 * i + j) * matrix_step);
}

ALWAYS_INLINE void load_tile(const float* from, std::int64_t matrix_step, Lanes (&square)[4][4]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) square[i][j] = load(from + (4 * i + j) * matrix_step);
}

// The squares of pixels that are tiles begin .. end, transformed by M.
template <class M, class T>
ALWAYS_INLINE void transform_tiles(const TiledImages& images, const T* x, std::int64_t begin, std::int64_t end, float* to,
                                   std::int64_t matrix_step) {
  for_tiles(images, begin, end, [&](std::int64_t number, std::int64_t image, std::int64_t row, std::int64_t column) INLINE_LAMBDA {
    for (std::int64_t channel = 0; channel < images.channels; channel += kLanes) {
      Lanes pixels[M::kFrom][M::kFrom], transformed[4][4];
      load_square(plane_of(images, x, image, channel), row, column, pixels);
      transform<M>(pixels, transformed);
      store_tile(transformed, to + number * images.channels + channel, matrix_step);
    }
  });
}

template <class T>
ALWAYS_INLINE void finish_images_of(const TiledImages& images, const float* sums, std::int64_t matrix_step, const float* bias,
                                    bool relu, std::int64_t begin, std::int64_t end, T* y) {
  for_tiles(images, begin, end, [&](std::int64_t number, std::int64_t image, std::int64_t row, std::int64_t column) INLINE_LAMBDA {
    for (std::int64_t channel = 0; channel < images.channels; channel += kLanes) {
      const Plane<T> plane = plane_of(images, y, image, channel);
      const Lanes added = bias ? load(bias + channel) : Lanes{};
      Lanes elements[4][4], pixels[2][2];
      load_tile(sums + number * images.channels + channel, matrix_step, elements);
      transform<ByTransposedA>(elements, pixels);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
          Lanes value = pixels[i][j] + added;
          if (relu) value = value < 0 ? Lanes{} : value;  // NaN stays
          if (plane.has(row + i, column + j)) store(value, plane.at(row + i, column + j));
        }
    }
  });
}

template <class T>
ALWAYS_INLINE void transform_weights_of(const T* w, bool is_rotated, std::int64_t begin, std::int64_t end, float* to,
                                        std::int64_t matrix_step) {
  for (std::int64_t filter = begin; filter < end; filter += kLanes) {
    float taps[kTaps][kLanes];
    for (int lane = 0; lane < kLanes; ++lane)
      for (int tap = 0; tap < kTaps; ++tap) taps[tap][lane] = w[(filter + lane) * kTaps + tap];
    Lanes filters[3][3], transformed[4][4];
    for (int tap = 0; tap < kTaps; ++tap) filters[tap / 3][tap % 3] = load(taps[is_rotated ? kTaps - 1 - tap : tap]);
    transform<ByG>(filters, transformed);
    store_tile(transformed, to + filter, matrix_step);
  }
}

}  // namespace

// GCC clones no templates.
#define FOR_ELEMENTS_OF(T)                                                                                                 \
  CLONES void transform_images(const TiledImages& images, const T* x, std::int64_t begin, std::int64_t end, float* to,     \
                               std::int64_t matrix_step) {                                                                 \
    transform_tiles<ByB>(images, x, begin, end, to, matrix_step);                                                          \
  }                                                                                                                        \
  CLONES void transform_gradients(const TiledImages& images, const T* dy, std::int64_t begin, std::int64_t end, float* to, \
                                  std::int64_t matrix_step) {                                                              \
    transform_tiles<ByA>(images, dy, begin, end, to, matrix_step);                                                         \
  }                                                                                                                        \
  CLONES void finish_images(const TiledImages& images, const float* sums, std::int64_t matrix_step, const float* bias,     \
                            bool relu, std::int64_t begin, std::int64_t end, T* y) {                                       \
    finish_images_of(images, sums, matrix_step, bias, relu, begin, end, y);                                                \
  }                                                                                                                        \
  CLONES void transform_weights(const T* w, bool is_rotated, std::int64_t begin, std::int64_t end, float* to,              \
                                std::int64_t matrix_step) {                                                                \
    transform_weights_of(w, is_rotated, begin, end, to, matrix_step);                                                      \
  }

FOR_ELEMENTS_OF(float)
FOR_ELEMENTS_OF(Bfloat16)

CLONES void finish_weights(const float* sums, std::int64_t matrix_step, std::int64_t begin, std::int64_t end, float* dw) {
  for (std::int64_t filter = begin; filter < end; filter += kLanes) {
    Lanes elements[4][4], filters[3][3];
    load_tile(sums + filter, matrix_step, elements);
    transform<ByTransposedG>(elements, filters);
    float taps[kTaps][kLanes];
    for (int tap = 0; tap < kTaps; ++tap) store(filters[tap / 3][tap % 3], taps[tap]);
    for (int lane = 0; lane < kLanes; ++lane)
      for (int tap = 0; tap < kTaps; ++tap) dw[(filter + lane) * kTaps + tap] = taps[tap][lane];
  }
}

}  // namespace singa_lite
