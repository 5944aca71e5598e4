// SPDX-License-Identifier: Apache-2.0
#include "kernels/norm.h"

#include <algorithm>
#include <cmath>

#include "kernels/clones.h"
#include "kernels/threads.h"

namespace singa_lite {
namespace norm_loops {

// Sums of one plane are float, at most kRun elements at a time; sums of planes are double.
constexpr std::size_t kRun = 1024;

CLONES double sum(const float* x, std::size_t count) {
  double total = 0;
  for (std::size_t start = 0; start < count; start += kRun) {
    const std::size_t end = std::min(start + kRun, count);
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (std::size_t i = start; i < end; ++i) part += x[i];
    total += part;
  }
  return total;
}

// sum of (x - mean)^2
CLONES double sum_squares(const float* x, float mean, std::size_t count) {
  double total = 0;
  for (std::size_t start = 0; start < count; start += kRun) {
    const std::size_t end = std::min(start + kRun, count);
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (std::size_t i = start; i < end; ++i) part += (x[i] - mean) * (x[i] - mean);
    total += part;
  }
  return total;
}

// sums of dy and of dy (x - mean)
CLONES void sum_slopes(const float* dy, const float* x, float mean, std::size_t count, double* of_dy, double* of_dyx) {
  for (std::size_t start = 0; start < count; start += kRun) {
    const std::size_t end = std::min(start + kRun, count);
    float a = 0, b = 0;
#pragma omp simd reduction(+ : a, b)
    for (std::size_t i = start; i < end; ++i) {
      a += dy[i];
      b += dy[i] * (x[i] - mean);
    }
    *of_dy += a;
    *of_dyx += b;
  }
}

CLONES void scale_shift(const float* x, float* y, float mean, float factor, float shift, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) y[i] = (x[i] - mean) * factor + shift;
}

CLONES void spread(const float* dy, const float* x, float* dx, float mean, float factor, float a, float b,
                   std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) dx[i] = factor * (dy[i] - a - (x[i] - mean) * b);
}

}  // namespace norm_loops

namespace {

// Call body(channel) for every channel, split among the threads.
template <class Body>
void for_channels(const Norm& n, const Body& body) {
  parallel_for(n.channels, n.batch * n.inner, [&](std::size_t begin, std::size_t end) {
    for (std::size_t channel = begin; channel < end; ++channel) body(channel);
  });
}

// Call body(offset) for the plane of every sample of one channel.
template <class Body>
ALWAYS_INLINE void for_planes(const Norm& n, std::size_t channel, const Body& body) {
  for (std::size_t sample = 0; sample < n.batch; ++sample) body((sample * n.channels + channel) * n.inner);
}

}  // namespace

void batchnorm_train(const Norm& n, const float* x, const float* scale, const float* bias, float* y, float* mean,
                     float* inverse_std, float* running_mean, float* running_var, double momentum, double eps) {
  const double count = double(n.batch * n.inner);
  for_channels(n, [&](std::size_t c) {
    double total = 0, squares = 0;
    for_planes(n, c, [&](std::size_t at) { total += norm_loops::sum(x + at, n.inner); });
    const float centre = float(total / count);
    for_planes(n, c, [&](std::size_t at) { squares += norm_loops::sum_squares(x + at, centre, n.inner); });
    const double offset = total / count - centre;  // the rounding of the mean
    const double exact = squares / count - offset * offset, var = exact < 0 ? 0 : exact;  // NaN stays NaN
    const double inverse = 1 / std::sqrt(var + eps);
    mean[c] = centre;
    inverse_std[c] = float(inverse);
    for_planes(n, c, [&](std::size_t at) {
      norm_loops::scale_shift(x + at, y + at, centre, float(inverse * scale[c]), bias[c], n.inner);
    });
    const double unbiased = var * (count / std::max(1.0, count - 1));
    running_mean[c] = float((1 - momentum) * running_mean[c] + momentum * (total / count));
    running_var[c] = float((1 - momentum) * running_var[c] + momentum * unbiased);
  });
}

void batchnorm_infer(const Norm& n, const float* x, const float* scale, const float* bias, const float* mean,
                     const float* var, float* y, double eps) {
  for_channels(n, [&](std::size_t c) {
    const float factor = float(scale[c] / std::sqrt(var[c] + eps));
    for_planes(n, c, [&](std::size_t at) { norm_loops::scale_shift(x + at, y + at, mean[c], factor, bias[c], n.inner); });
  });
}

void batchnorm_backward(const Norm& n, const float* dy, const float* x, const float* scale, const float* mean,
                        const float* inverse_std, float* dx, float* dscale, float* dbias) {
  const double count = double(n.batch * n.inner);
  for_channels(n, [&](std::size_t c) {
    double of_dy = 0, of_dyx = 0;
    for_planes(n, c,
               [&](std::size_t at) { norm_loops::sum_slopes(dy + at, x + at, mean[c], n.inner, &of_dy, &of_dyx); });
    const double inverse = inverse_std[c];
    dbias[c] = float(of_dy);
    dscale[c] = float(of_dyx * inverse);
    // dx = scale * inverse_std * (dy - mean(dy) - normal * mean(dy * normal))
    const float a = float(of_dy / count), b = float(of_dyx * inverse * inverse / count);
    for_planes(n, c, [&](std::size_t at) {
      norm_loops::spread(dy + at, x + at, dx + at, mean[c], float(scale[c] * inverse), a, b, n.inner);
    });
  });
}

}  // namespace singa_lite
