// SPDX-License-Identifier: Apache-2.0
#include "kernels/loss.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/clones.h"
#include "kernels/softmax.h"
#include "kernels/threads.h"

namespace singa_lite {
namespace loss_loops {

CLONES void scale(float* y, float factor, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) y[i] *= factor;
}

}  // namespace loss_loops

template <class Id>
float softmax_cross_entropy(const float* x, const Id* labels, float* probabilities, std::size_t rows,
                            std::size_t columns) {
  std::vector<double> losses(rows);
  parallel_for(rows, kPowerCost * columns, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      const float* logits = x + row * columns;
      float* y = probabilities + row * columns;
      float largest;
      const float total = softmax_row(logits, y, columns, &largest);
      losses[row] = std::log(double(total)) - (double(logits[labels[row]]) - double(largest));
    }
  });
  double loss = 0;  // in the order of the rows, so that the threads change nothing
  for (double part : losses) loss += part;
  return float(loss / double(rows));
}

template <class Id>
void softmax_cross_entropy_backward(float dy, const float* probabilities, const Id* labels, float* dx,
                                    std::size_t rows, std::size_t columns) {
  const float factor = dy / float(rows);
  parallel_for(rows, columns, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      float* grads = dx + row * columns;
      std::memcpy(grads, probabilities + row * columns, columns * sizeof(float));
      grads[labels[row]] -= 1;
      loss_loops::scale(grads, factor, columns);
    }
  });
}

template float softmax_cross_entropy(const float*, const std::int32_t*, float*, std::size_t, std::size_t);
template float softmax_cross_entropy(const float*, const std::int64_t*, float*, std::size_t, std::size_t);
template void softmax_cross_entropy_backward(float, const float*, const std::int32_t*, float*, std::size_t,
                                             std::size_t);
template void softmax_cross_entropy_backward(float, const float*, const std::int64_t*, float*, std::size_t,
                                             std::size_t);

}  // namespace singa_lite
