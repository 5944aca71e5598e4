// SPDX-License-Identifier: Apache-2.0
// The cross entropy of softmax over rows with class ids.
#pragma once

#include <cstddef>

namespace singa_lite {

// Mean over the rows of -log softmax(x)[label], and the softmax itself. Labels must be in 0 .. columns - 1.
template <class Id>
float softmax_cross_entropy(const float* x, const Id* labels, float* probabilities, std::size_t rows,
                            std::size_t columns);
template <class Id>
void softmax_cross_entropy_backward(float dy, const float* probabilities, const Id* labels, float* dx,
                                    std::size_t rows, std::size_t columns);

}  // namespace singa_lite
