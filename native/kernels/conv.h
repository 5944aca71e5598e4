// SPDX-License-Identifier: Apache-2.0
// 2-D convolution and its gradients on plain NCHW arrays.
#pragma once

#include <cstdint>

namespace singa_lite {

// x (batch, channels, height, width), w (outputs, channels / groups, kernel) -> y (batch, outputs, out_height, out_width)
struct Conv {
  std::int64_t batch, channels, height, width, outputs, out_height, out_width;
  std::int64_t kernel[2], stride[2], padding[2], dilation[2], groups;
};

// Each returns false, and does nothing, if this build has no code for such a convolution. b and db may be null.
bool conv_forward(const Conv& conv, const float* x, const float* w, const float* b, float* y);
bool conv_backward_data(const Conv& conv, const float* dy, const float* w, float* dx);
bool conv_backward_weight(const Conv& conv, const float* dy, const float* x, float* dw, float* db);

}  // namespace singa_lite
