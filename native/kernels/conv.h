// SPDX-License-Identifier: Apache-2.0
// 2-D convolution and its gradients on NCHW arrays, or on blocked ones, see Note [memory formats] in layout.h.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

namespace singa_lite {

// x (batch, channels, height, width), w (outputs, channels / groups, kernel) -> y (batch, outputs, out_height, out_width)
struct Conv {
  std::int64_t batch, channels, height, width, outputs, out_height, out_width;
  std::int64_t kernel[2], stride[2], padding[2], dilation[2], groups;
  std::int64_t x_block = 1, y_block = 1;  // of x and y and of their gradients
  bool relu = false;                      // forward: y = max(y, 0)
  bool is_bfloat16 = false;               // x, y and their gradients, and w too unless it has_float_weights; else all are float
  bool has_float_weights = false;         // w is of float and rounded to the others' numbers first
};

// Take Winograd's products on this processor for every convolution with enough channels and tiles, whatever was measured, or
// for none; before the first convolution.
void use_winograd(bool is_wanted);

enum class ConvKind : std::int64_t { kForward = 2, kBackwardData = 3, kBackwardWeight = 4 };

// The blocks of x and y, or of their gradients, with which no array needs to be reordered; nothing if this build has no
// code for the convolution.
std::optional<std::pair<std::int64_t, std::int64_t>> conv_formats(const Conv& conv, ConvKind kind, bool has_bias);

// Each returns false, and does nothing, if this build has no code for such a convolution. Sums, b, dw and db are of float;
// b and db may be null.
bool conv_forward(Conv conv, const void* x, const void* w, const float* b, void* y);
bool conv_backward_data(Conv conv, const void* dy, const void* w, void* dx);
bool conv_backward_weight(const Conv& conv, const void* dy, const void* x, float* dw, float* db);

}  // namespace singa_lite
