// SPDX-License-Identifier: Apache-2.0
// The memory format of an image: the order of its channels in memory.
//
// Note [memory formats]: an array (batch, channels, spatial) with blocks of b channels has its elements in the order
// (batch, channels / b, spatial, b): b = 1 is row-major NCHW, b = channels is channels-last, 8 or 16 is what convolutions
// on vectors of that width want. b divides the number of channels, so an array has the same size in every format.
#pragma once

#include <cstdint>

namespace singa_lite {

struct Image {
  std::int64_t batch, channels, height, width;
  bool is_bfloat16 = false;  // its elements; float if not
};

// y = x, from one block size to another; false if this build cannot.
bool reorder(const Image& image, const void* x, std::int64_t x_block, void* y, std::int64_t y_block);

}  // namespace singa_lite
