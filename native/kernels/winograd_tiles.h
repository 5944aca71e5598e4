// SPDX-License-Identifier: Apache-2.0
// The transforms of Winograd's minimal filtering F(2 x 2, 3 x 3).
//
// Note [Winograd]: a tile of 2 x 2 results of a filter g of 3 x 3 on the 4 x 4 pixels d is A' ((G g G') * (B' d B)) A, where *
// multiplies the 16 elements of the two transformed squares: 16 products a channel instead of 36. B and A hold 0, 1 and -1, G
// also halves. Sums over channels are taken between the transforms, so for each element they are a product of matrices.
// With dy of 2 x 2, the gradient of g is G' ((A dy A') * (B' d B)) G, summed over tiles.
// A. Lavin, S. Gray, Fast Algorithms for Convolutional Neural Networks, 2015, section 4.1.
// A result's error is of the size of a rounding of its tile's largest pixel times the weights, also where that pixel has no part
// in the result. An infinite pixel makes all results of its tiles infinite or NaN, and pixels above 8e37 may do so.
//
// Each transform reads or writes 16 matrices, one for each element, that are matrix_step floats apart.
#pragma once

#include <cstdint>

#include "common/bfloat16.h"

namespace singa_lite {

constexpr std::int64_t kWinogradElements = 16;
constexpr std::int64_t kWinogradLanes = 8;  // channels that are transformed together

// Images (batch, channels, height, width) in blocks, see Note [memory formats] in layout.h, and the tiles they are cut into:
// rows x columns an image, 2 pixels apart, of which the first begins at (first_row, first_column). Pixels outside are 0.
// channels and block are multiples of kWinogradLanes.
struct TiledImages {
  std::int64_t channels, height, width, block;
  std::int64_t rows = 0, columns = 0;
  std::int64_t first_row = 0, first_column = 0;
};

// Tiles begin .. end of x, transformed by B: to (elements, tiles, channels), whose matrices are matrix_step apart.
void transform_images(const TiledImages& images, const float* x, std::int64_t begin, std::int64_t end, float* to,
                      std::int64_t matrix_step);
void transform_images(const TiledImages& images, const Bfloat16* x, std::int64_t begin, std::int64_t end, float* to,
                      std::int64_t matrix_step);

// The same of gradients dy by A.
void transform_gradients(const TiledImages& images, const float* dy, std::int64_t begin, std::int64_t end, float* to,
                         std::int64_t matrix_step);
void transform_gradients(const TiledImages& images, const Bfloat16* dy, std::int64_t begin, std::int64_t end, float* to,
                         std::int64_t matrix_step);

// Tiles begin .. end of y = those made by A' of the sums (elements, tiles, channels), plus bias (channels,), which may be null,
// then max(y, 0) with relu.
void finish_images(const TiledImages& images, const float* sums, std::int64_t matrix_step, const float* bias, bool relu,
                   std::int64_t begin, std::int64_t end, float* y);
void finish_images(const TiledImages& images, const float* sums, std::int64_t matrix_step, const float* bias, bool relu,
                   std::int64_t begin, std::int64_t end, Bfloat16* y);

// Filters begin .. end of weights w (filters, 3, 3), multiples of kWinogradLanes, transformed by G: to (elements, filters).
// is_rotated: rotated by 180 degrees before.
void transform_weights(const float* w, bool is_rotated, std::int64_t begin, std::int64_t end, float* to, std::int64_t matrix_step);
void transform_weights(const Bfloat16* w, bool is_rotated, std::int64_t begin, std::int64_t end, float* to,
                       std::int64_t matrix_step);

// Filters begin .. end of dw (filters, 3, 3), made by G' of the sums (elements, filters).
void finish_weights(const float* sums, std::int64_t matrix_step, std::int64_t begin, std::int64_t end, float* dw);

}  // namespace singa_lite
