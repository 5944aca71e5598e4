// SPDX-License-Identifier: Apache-2.0
// Convolutions of 3 x 3 with stride 1 and their gradients by Winograd's minimal filtering, see Note [Winograd] in
// winograd_tiles.h.
#pragma once

#include "kernels/conv.h"

namespace singa_lite {

// Whether winograd_... have code for this convolution.
bool has_winograd(const Conv& conv);

// As conv_forward and the others, for a convolution that has_winograd; false if oneDNN has no product of matrices for it.
bool winograd_forward(Conv conv, const void* x, const void* w, const float* b, void* y);
bool winograd_backward_data(Conv conv, const void* dy, const void* w, void* dx);
bool winograd_backward_weight(Conv conv, const void* dy, const void* x, float* dw, float* db);

}  // namespace singa_lite
