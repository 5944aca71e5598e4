// SPDX-License-Identifier: Apache-2.0
#include "kernels/loss.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/clones.h"
#include "kernels/threads.h"

namespace singa_lite {
namespace loss_loops {

// e^x for x <= 0 (NaN stays NaN), relative error below 2e-7: x = n ln 2 + r, a polynomial in r, times 2^n.
// Source of the coefficients: Cephes, expf.
ALWAYS_INLINE float exp_below_0(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float n = std::nearbyint(clamped * 1.44269504f);
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float safe = n == n ? n : 0.0f;  // NaN has no integer
  const std::int32_t bits = (std::int32_t(safe) + 127) << 23;
  float power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? 0.0f : p * power;
}

// y = e^(x - max(x)); returns its sum.
CLONES float shifted_powers(const float* x, float* y, std::size_t count, float* largest) {
  float most = x[0];
#pragma omp simd reduction(max : most)
  for (std::size_t i = 0; i < count; ++i) most = x[i] > most ? x[i] : most;
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (std::size_t i = 0; i < count; ++i) {
    y[i] = exp_below_0(x[i] - most);
    total += y[i];
  }
  *largest = most;
  return total;
}

CLONES void scale(float* y, float factor, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) y[i] *= factor;
}

}  // namespace loss_loops

namespace {

constexpr std::size_t kPowerCost = 8;  // of one exponential, in elements moved

}  // namespace

void softmax(const float* x, float* y, std::size_t rows, std::size_t columns) {
  parallel_for(rows, kPowerCost * columns, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      float largest;
      const float total = loss_loops::shifted_powers(x + row * columns, y + row * columns, columns, &largest);
      loss_loops::scale(y + row * columns, 1 / total, columns);
    }
  });
}

template <class Id>
float softmax_cross_entropy(const float* x, const Id* labels, float* probabilities, std::size_t rows,
                            std::size_t columns) {
  std::vector<double> losses(rows);
  parallel_for(rows, kPowerCost * columns, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      const float* logits = x + row * columns;
      float* y = probabilities + row * columns;
      float largest;
      const float total = loss_loops::shifted_powers(logits, y, columns, &largest);
      loss_loops::scale(y, 1 / total, columns);
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
      float* slopes = dx + row * columns;
      std::memcpy(slopes, probabilities + row * columns, columns * sizeof(float));
      slopes[labels[row]] -= 1;
      loss_loops::scale(slopes, factor, columns);
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
