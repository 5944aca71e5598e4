// SPDX-License-Identifier: Apache-2.0
#include "kernels/norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/bfloat16.h"
#include "kernels/clones.h"
#include "kernels/threads.h"

namespace singa_lite {
namespace {

// A part of one sample: rows of `lanes` floats that are contiguous, each row `stride` behind the one before.
// Either every lane is a channel of its own, from `channel` on, or all are of that one channel.
struct Tile {
  std::size_t offset, rows, stride, lanes, channel;
  bool is_one_channel;

  std::size_t channel_of(std::size_t lane) const { return is_one_channel ? channel : channel + lane; }
};

constexpr std::size_t kLanes = 16;
constexpr std::size_t kRun = 128;  // rows added up in float; the sums of runs are added in double

// One number for each lane of a tile.
template <class T>
using PerLane = T[kLanes];

// (x - mean) * factor + shift: forward and backward must round alike, as the sign shows where a ReLU was applied.
ALWAYS_INLINE float normal(float x, float mean, float factor, float shift) { return (x - mean) * factor + shift; }

// Call body(row, lane) for a whole tile; L lanes are one vector. GCC would unroll 8 of them before it makes vectors of loops,
// and be left with 8 scalars: without "unroll 1" a gradient through a ReLU takes 17 times as long with AVX2.
template <std::size_t L, class Body>
ALWAYS_INLINE void for_each(std::size_t first, std::size_t last, const Body& body) {
  for (std::size_t row = first; row < last; ++row) {
#pragma GCC ivdep
#pragma GCC unroll 1
    for (std::size_t lane = 0; lane < L; ++lane) body(row, lane);
  }
}

// Add up two numbers of every element, lane by lane: in float within a run of rows, in double over the runs.
template <std::size_t L, class Body>
ALWAYS_INLINE void add_up(const Tile& t, double* first, double* second, const Body& body) {
  for (std::size_t start = 0; start < t.rows; start += kRun) {
    float a[L] = {}, b[L] = {};
    for_each<L>(start, std::min(start + kRun, t.rows), [&](std::size_t row, std::size_t lane) INLINE_LAMBDA {
      body(row * t.stride + lane, lane, &a[lane], &b[lane]);
    });
    for (std::size_t lane = 0; lane < L; ++lane) {
      first[lane] += a[lane];
      second[lane] += b[lane];
    }
  }
}

// sums of x - centre and of its square
template <std::size_t L, class T>
ALWAYS_INLINE void moments_of(const Tile& t, const T* x, const float* centre, double* sums, double* squares) {
  add_up<L>(t, sums, squares, [&](std::size_t at, std::size_t lane, float* sum, float* square) INLINE_LAMBDA {
    const float distance = x[at] - centre[lane];
    *sum += distance;
    *square += distance * distance;
  });
}

struct Apply {
  PerLane<float> mean, factor, shift;
  bool relu;
};

template <std::size_t L, bool has_residual, class T>
ALWAYS_INLINE void apply_to(const Tile& t, const Apply& a, const T* x, const T* residual, T* y) {
  const float low = a.relu ? 0 : -INFINITY;
  for_each<L>(0, t.rows, [&](std::size_t row, std::size_t lane) INLINE_LAMBDA {
    const std::size_t at = row * t.stride + lane;
    float value = normal(x[at], a.mean[lane], a.factor[lane], a.shift[lane]);
    if (has_residual) value += residual[at];
    y[at] = T(value < low ? low : value);  // NaN is passed on
  });
}

// dy, or with relu 0 where the forward pass gave 0
template <bool relu>
ALWAYS_INLINE float grad_of(float dy, float x, const Apply& a, std::size_t lane) {
  return !relu || normal(x, a.mean[lane], a.factor[lane], a.shift[lane]) > 0 ? dy : 0.0f;
}

// sums of dy and of dy (x - mean)
template <std::size_t L, bool relu, class T>
ALWAYS_INLINE void grad_sums_of(const Tile& t, const Apply& a, const T* dy, const T* x, double* of_dy, double* of_dyx) {
  add_up<L>(t, of_dy, of_dyx, [&](std::size_t at, std::size_t lane, float* sum, float* product) INLINE_LAMBDA {
    const float grad = grad_of<relu>(dy[at], x[at], a, lane);
    *sum += grad;
    *product += grad * (x[at] - a.mean[lane]);
  });
}

// dx = factor * (dy - of_dy - (x - mean) * of_dyx)
template <std::size_t L, bool relu, class T>
ALWAYS_INLINE void spread_to(const Tile& t, const Apply& a, const float* of_dy, const float* of_dyx, const T* dy,
                             const T* x, T* dx) {
  for_each<L>(0, t.rows, [&](std::size_t row, std::size_t lane) INLINE_LAMBDA {
    const std::size_t at = row * t.stride + lane;
    const float grad = grad_of<relu>(dy[at], x[at], a, lane);
    dx[at] = T(a.factor[lane] * (grad - of_dy[lane] - (x[at] - a.mean[lane]) * of_dyx[lane]));
  });
}

}  // namespace

namespace norm_loops {

// The loops for one T: a cloned function cannot be a template.
#define NORM_LOOPS(T)                                                                                                  \
  CLONES void moments(const Tile& t, const T* x, const float* centre, double* sums, double* squares) {                 \
    if (t.lanes == 16) moments_of<16>(t, x, centre, sums, squares);                                                    \
    else if (t.lanes == 8) moments_of<8>(t, x, centre, sums, squares);                                                 \
    else moments_of<1>(t, x, centre, sums, squares);                                                                   \
  }                                                                                                                    \
  CLONES void apply(const Tile& t, const Apply& a, const T* x, const T* residual, T* y) {                              \
    if (t.lanes == 16) residual ? apply_to<16, true>(t, a, x, residual, y) : apply_to<16, false>(t, a, x, residual, y); \
    else if (t.lanes == 8) residual ? apply_to<8, true>(t, a, x, residual, y) : apply_to<8, false>(t, a, x, residual, y); \
    else residual ? apply_to<1, true>(t, a, x, residual, y) : apply_to<1, false>(t, a, x, residual, y);                \
  }                                                                                                                    \
  CLONES void grad_sums(const Tile& t, const Apply& a, const T* dy, const T* x, double* of_dy, double* of_dyx) {       \
    if (t.lanes == 16) a.relu ? grad_sums_of<16, true>(t, a, dy, x, of_dy, of_dyx) : grad_sums_of<16, false>(t, a, dy, x, of_dy, of_dyx); \
    else if (t.lanes == 8) a.relu ? grad_sums_of<8, true>(t, a, dy, x, of_dy, of_dyx) : grad_sums_of<8, false>(t, a, dy, x, of_dy, of_dyx); \
    else a.relu ? grad_sums_of<1, true>(t, a, dy, x, of_dy, of_dyx) : grad_sums_of<1, false>(t, a, dy, x, of_dy, of_dyx); \
  }                                                                                                                    \
  CLONES void spread(const Tile& t, const Apply& a, const float* of_dy, const float* of_dyx, const T* dy, const T* x,  \
                     T* dx) {                                                                                          \
    if (t.lanes == 16) a.relu ? spread_to<16, true>(t, a, of_dy, of_dyx, dy, x, dx) : spread_to<16, false>(t, a, of_dy, of_dyx, dy, x, dx); \
    else if (t.lanes == 8) a.relu ? spread_to<8, true>(t, a, of_dy, of_dyx, dy, x, dx) : spread_to<8, false>(t, a, of_dy, of_dyx, dy, x, dx); \
    else a.relu ? spread_to<1, true>(t, a, of_dy, of_dyx, dy, x, dx) : spread_to<1, false>(t, a, of_dy, of_dyx, dy, x, dx); \
  }
NORM_LOOPS(float)
NORM_LOOPS(Bfloat16)
#undef NORM_LOOPS

}  // namespace norm_loops

namespace {

// Call body(tile) for every tile of one sample.
template <class Body>
void for_tiles(const Norm& n, std::size_t sample, const Body& body) {
  for (std::size_t first = 0; first < n.channels; first += n.block) {
    const std::size_t offset = (sample * n.channels + first) * n.inner;
    if (n.block == 1) {
      const std::size_t rows = n.inner / kLanes, done = rows * kLanes;
      if (rows) body(Tile{offset, rows, kLanes, kLanes, first, true});
      if (done < n.inner) body(Tile{offset + done, n.inner - done, 1, 1, first, true});
      continue;
    }
    for (std::size_t lane = 0; lane < n.block;) {
      const std::size_t left = n.block - lane, lanes = left >= 16 ? 16 : left >= 8 ? 8 : 1;
      body(Tile{offset + lane, n.inner, n.block, lanes, first + lane, false});
      lane += lanes;
    }
  }
}

template <class Body>
void for_samples(const Norm& n, std::size_t batch, const Body& body) {
  parallel_for(batch, n.channels * n.inner, [&](std::size_t begin, std::size_t end) {
    for (std::size_t sample = begin; sample < end; ++sample) body(sample);
  });
}

void pick(const Tile& t, const float* of_channels, PerLane<float>& to) {
  for (std::size_t lane = 0; lane < t.lanes; ++lane) to[lane] = of_channels[t.channel_of(lane)];
}

Apply parameters(const Tile& t, const float* mean, const float* factor, const float* shift, bool relu) {
  Apply a;
  pick(t, mean, a.mean);
  pick(t, factor, a.factor);
  if (shift) pick(t, shift, a.shift);
  else std::fill(a.shift, a.shift + kLanes, 0.0f);
  a.relu = relu;
  return a;
}

// Two sums over the first `batch` samples for each channel. They are added up sample by sample, so that the number of
// threads does not show in the result. body(tile, first, second) adds those of a tile, lane by lane.
struct Sums {
  std::vector<double> first, second;

  template <class Body>
  Sums(const Norm& n, std::size_t batch, const Body& body) : first(n.channels), second(n.channels) {
    std::vector<double> parts(2 * batch * n.channels);
    for_samples(n, batch, [&](std::size_t sample) {
      double* a = parts.data() + 2 * sample * n.channels;
      double* b = a + n.channels;
      for_tiles(n, sample, [&](const Tile& t) {
        double here[2][kLanes] = {};
        body(t, here[0], here[1]);
        for (std::size_t lane = 0; lane < t.lanes; ++lane) {
          a[t.channel_of(lane)] += here[0][lane];
          b[t.channel_of(lane)] += here[1][lane];
        }
      });
    });
    for (std::size_t sample = 0; sample < batch; ++sample)
      for (std::size_t c = 0; c < n.channels; ++c) {
        first[c] += parts[2 * sample * n.channels + c];
        second[c] += parts[(2 * sample + 1) * n.channels + c];
      }
  }
};

template <class T>
Sums moments_about(const Norm& n, std::size_t batch, const T* x, const std::vector<float>& centre) {
  return Sums(n, batch, [&](const Tile& t, double* sums, double* squares) {
    PerLane<float> of_lanes;
    pick(t, centre.data(), of_lanes);
    norm_loops::moments(t, x + t.offset, of_lanes, sums, squares);
  });
}

}  // namespace

template <class T>
void batchnorm_train(const Norm& n, const T* x, const float* scale, const float* bias, const T* residual, bool relu,
                     T* y, float* mean, float* inverse_std, float* running_mean, float* running_var, double momentum,
                     double eps) {
  // One pass over x: squares are taken about the mean of the first sample, which is near enough to lose no digits.
  std::vector<float> centre(n.channels), factor(n.channels);
  const Sums first(n, std::min<std::size_t>(n.batch, 1), [&](const Tile& t, double* sums, double* squares) {
    const PerLane<float> zero = {};
    norm_loops::moments(t, x + t.offset, zero, sums, squares);
  });
  for (std::size_t c = 0; c < n.channels; ++c) centre[c] = float(first.first[c] / double(n.inner));
  const Sums sums = moments_about(n, n.batch, x, centre);
  const double count = double(n.batch * n.inner);
  for (std::size_t c = 0; c < n.channels; ++c) {
    const double offset = sums.first[c] / count, exact = sums.second[c] / count - offset * offset;
    const double var = exact < 0 ? 0 : exact;  // NaN stays NaN
    mean[c] = float(centre[c] + offset);
    inverse_std[c] = float(1 / std::sqrt(var + eps));
    factor[c] = inverse_std[c] * scale[c];
    const double unbiased = var * (count / std::max(1.0, count - 1));
    running_mean[c] = float((1 - momentum) * running_mean[c] + momentum * (centre[c] + offset));
    running_var[c] = float((1 - momentum) * running_var[c] + momentum * unbiased);
  }
  for_samples(n, n.batch, [&](std::size_t sample) {
    for_tiles(n, sample, [&](const Tile& t) {
      const Apply a = parameters(t, mean, factor.data(), bias, relu);
      norm_loops::apply(t, a, x + t.offset, residual ? residual + t.offset : nullptr, y + t.offset);
    });
  });
}

template <class T>
void batchnorm_infer(const Norm& n, const T* x, const float* scale, const float* bias, const float* mean,
                     const float* var, T* y, double eps) {
  std::vector<float> factor(n.channels);
  for (std::size_t c = 0; c < n.channels; ++c) factor[c] = float(scale[c] / std::sqrt(var[c] + eps));
  for_samples(n, n.batch, [&](std::size_t sample) {
    for_tiles(n, sample, [&](const Tile& t) {
      const Apply a = parameters(t, mean, factor.data(), bias, false);
      norm_loops::apply(t, a, x + t.offset, static_cast<const T*>(nullptr), y + t.offset);
    });
  });
}

template <class T>
void batchnorm_backward(const Norm& n, const T* dy, const T* x, const float* scale, const float* bias,
                        const float* mean, const float* inverse_std, T* dx, float* dscale, float* dbias) {
  std::vector<float> factor(n.channels), of_dy(n.channels), of_dyx(n.channels);
  for (std::size_t c = 0; c < n.channels; ++c) factor[c] = inverse_std[c] * scale[c];
  const Sums sums(n, n.batch, [&](const Tile& t, double* a, double* b) {
    norm_loops::grad_sums(t, parameters(t, mean, factor.data(), bias, bias), dy + t.offset, x + t.offset, a, b);
  });
  const double count = double(n.batch * n.inner);
  for (std::size_t c = 0; c < n.channels; ++c) {
    const double inverse = inverse_std[c];
    dbias[c] = float(sums.first[c]);
    dscale[c] = float(sums.second[c] * inverse);
    // dx = scale * inverse_std * (dy - mean(dy) - normal * mean(dy * normal))
    of_dy[c] = float(sums.first[c] / count);
    of_dyx[c] = float(sums.second[c] * inverse * inverse / count);
  }
  for_samples(n, n.batch, [&](std::size_t sample) {
    for_tiles(n, sample, [&](const Tile& t) {
      PerLane<float> a, b;
      pick(t, of_dy.data(), a);
      pick(t, of_dyx.data(), b);
      norm_loops::spread(t, parameters(t, mean, factor.data(), bias, bias), a, b, dy + t.offset, x + t.offset,
                         dx + t.offset);
    });
  });
}

#define NORM(T)                                                                                                        \
  template void batchnorm_train(const Norm&, const T*, const float*, const float*, const T*, bool, T*, float*, float*, \
                                float*, float*, double, double);                                                       \
  template void batchnorm_infer(const Norm&, const T*, const float*, const float*, const float*, const float*, T*,     \
                                double);                                                                               \
  template void batchnorm_backward(const Norm&, const T*, const T*, const float*, const float*, const float*,          \
                                   const float*, T*, float*, float*);
NORM(float)
NORM(Bfloat16)
#undef NORM

}  // namespace singa_lite
