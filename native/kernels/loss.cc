// SPDX-License-Identifier: Apache-2.0
#include "kernels/loss.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/clones.h"
#include "kernels/registry.h"
#include "kernels/threads.h"
#include "kernels/vector_math.h"
#include "kernels/widen.h"

namespace singa_lite {
namespace loss_loops {

// y = e^(x - max(x)); returns its sum.
CLONES float shifted_powers(const float* x, float* y, std::size_t count, float* largest) {
  float most = x[0];
#pragma omp simd reduction(max : most)
  for (std::size_t i = 0; i < count; ++i) most = x[i] > most ? x[i] : most;
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (std::size_t i = 0; i < count; ++i) {
    y[i] = vector_math::exp(x[i] - most);
    total += y[i];
  }
  *largest = most;
  return total;
}

CLONES void scale(float* y, float factor, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) y[i] *= factor;
}

// dx = y (dy - sum of dy y)
CLONES void softmax_backward(const float* dy, const float* y, float* dx, std::size_t count) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (std::size_t i = 0; i < count; ++i) total += dy[i] * y[i];
  for (std::size_t i = 0; i < count; ++i) dx[i] = y[i] * (dy[i] - total);
}

}  // namespace loss_loops

namespace {

constexpr std::size_t kPowerCost = 8;  // of one exponential, in elements moved

}  // namespace

template <class T>
void softmax(const T* x, T* y, std::size_t rows, std::size_t columns) {
  parallel_for(rows, kPowerCost * columns, [&](std::size_t begin, std::size_t end) {
    const Scratch<T> of_x(columns), of_y(columns);
    for (std::size_t row = begin; row < end; ++row) {
      float* const powers = target_of(y + row * columns, of_y);
      float largest;
      const float total =
          loss_loops::shifted_powers(floats_of(x + row * columns, columns, of_x), powers, columns, &largest);
      loss_loops::scale(powers, 1 / total, columns);
      store(y + row * columns, columns, of_y);
    }
  });
}

template void softmax(const float*, float*, std::size_t, std::size_t);
template void softmax(const Bfloat16*, Bfloat16*, std::size_t, std::size_t);

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

namespace {

template <class T>
Step backward_step(const Call& call) {
  const View &dy = call.inputs[0], &y = call.inputs[1], &dx = call.outputs[0];
  if (!call.has_numbers({"axis"})) return {};
  const double axis = call.number("axis");
  if (y.ndim() == 0 || y.size() == 0 || dy.shape != y.shape || dx.shape != y.shape || (axis != -1 && axis != y.ndim() - 1)) return {};
  const auto columns = std::size_t(y.shape.back()), rows = y.size() / columns;
  return [rows, columns, dy = static_cast<const T*>(dy.data), y = static_cast<const T*>(y.data),
          dx = static_cast<T*>(dx.data)] {
    parallel_for(rows, 2 * columns, [&](std::size_t begin, std::size_t end) {
      const Scratch<T> of_dy(columns), of_y(columns), of_dx(columns);
      for (std::size_t at = begin * columns; at < end * columns; at += columns) {
        loss_loops::softmax_backward(floats_of(dy + at, columns, of_dy), floats_of(y + at, columns, of_y),
                                     target_of(dx + at, of_dx), columns);
        store(dx + at, columns, of_dx);
      }
    });
    return true;
  };
}

const Registration softmax_backward("softmax_backward", [](const Call& call) -> Step {
  if (call.are_floats(2, 1)) return backward_step<float>(call);
  return call.has_arrays("EE", "E") ? backward_step<Bfloat16>(call) : Step();
});

}  // namespace
}  // namespace singa_lite
