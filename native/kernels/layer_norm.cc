// SPDX-License-Identifier: Apache-2.0
// layer_norm and its gradient on rows of float32 or bfloat16: x (rows, columns), a mean and a standard deviation for each row.
#include <algorithm>
#include <cmath>

#include "kernels/layer_norm.h"

#include "kernels/clones.h"
#include "kernels/registry.h"
#include "kernels/threads.h"
#include "kernels/widen.h"

namespace singa_lite {
namespace {

constexpr std::size_t kRun = 256;    // values added up in float, in vectors of at least four lanes
constexpr std::size_t kPiece = 64;   // rows whose gradients of scale and bias are added up in float

}  // namespace

namespace layer_norm_loops {

// Two sums over a row: in float within a run, in double over the runs.
template <class Body>
ALWAYS_INLINE void add_up(std::size_t columns, double* first, double* second, const Body& body) {
  *first = *second = 0;
  for (std::size_t start = 0; start < columns; start += kRun) {
    const std::size_t end = std::min(start + kRun, columns);
    float a = 0, b = 0;
#pragma omp simd reduction(+ : a, b)
    for (std::size_t i = start; i < end; ++i) body(i, &a, &b);
    *first += a;
    *second += b;
  }
}

CLONES void forward(const float* x, const float* scale, const float* bias, float* y, std::size_t columns, double eps,
                    float* mean, float* inverse_std) {
  double sum, squares, rest;
  add_up(columns, &sum, &rest, [&](std::size_t i, float* a, float*) INLINE_LAMBDA { *a += x[i]; });
  const float centre = float(sum / double(columns));
  add_up(columns, &squares, &rest, [&](std::size_t i, float* a, float* b) INLINE_LAMBDA {
    const float distance = x[i] - centre;
    *a += distance * distance;
    *b += distance;
  });
  const double offset = rest / double(columns);  // what rounding the centre has left
  const float factor = float(1 / std::sqrt(squares / double(columns) - offset * offset + eps));
  for (std::size_t i = 0; i < columns; ++i) y[i] = (x[i] - centre) * factor * scale[i] + bias[i];
  *mean = centre;
  *inverse_std = factor;
}

// dx = factor * (g - mean(g) - normal * mean(g * normal)) with g = dy * scale and normal = (x - centre) * factor, plus
// addend if there is one; adds to dscale and dbias.
CLONES void backward(const float* dy, const float* x, const float* scale, const float* addend, float* dx, std::size_t columns, float centre,
                     float factor, float* dscale, float* dbias) {
  double sum, product;
  add_up(columns, &sum, &product, [&](std::size_t i, float* a, float* b) INLINE_LAMBDA {
    const float g = dy[i] * scale[i];
    *a += g;
    *b += g * ((x[i] - centre) * factor);
  });
  const float of_g = float(sum / double(columns)), of_product = float(product / double(columns));
#pragma GCC ivdep
  for (std::size_t i = 0; i < columns; ++i) {
    const float normal = (x[i] - centre) * factor, value = factor * (dy[i] * scale[i] - of_g - normal * of_product);
    dx[i] = addend ? value + addend[i] : value;
    dscale[i] += dy[i] * normal;
    dbias[i] += dy[i];
  }
}

CLONES void add(const float* from, double* totals, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) totals[i] += double(from[i]);
}

}  // namespace layer_norm_loops

namespace {

// Rows and columns of a call; false if the arrays do not fit.
bool read_sizes(const View& x, const View& scale, const View& mean, std::size_t* rows, std::size_t* columns) {
  if (scale.shape.size() > x.shape.size() || x.size() == 0) return false;
  const auto axes = std::ptrdiff_t(x.shape.size() - scale.shape.size());
  *columns = scale.size();
  *rows = x.size() / *columns;
  return std::equal(scale.shape.begin(), scale.shape.end(), x.shape.begin() + axes) && mean.size() == *rows;
}

// float or Bfloat16: X of x, Y of y, T of x and of the gradients of x and y; all else is float.
template <class T>
T* data_of(const View& view) {
  return static_cast<T*>(view.data);
}

template <class X, class Y>
Step forward_step(const Call& call) {
  std::size_t rows, columns;
  if (!call.has_numbers({"eps"})) return {};
  const View &x = call.inputs[0], &scale = call.inputs[1], &bias = call.inputs[2], &y = call.outputs[0];
  if (!read_sizes(x, scale, call.outputs[1], &rows, &columns)) return {};
  if (bias.shape != scale.shape || y.shape != x.shape || call.outputs[2].size() != rows) return {};
  return [rows, columns, eps = call.number("eps"), x = data_of<const X>(x), scale = scale.floats(),
          bias = bias.floats(), y = data_of<Y>(y), mean = call.outputs[1].floats(),
          inverse_std = call.outputs[2].floats()] {
    parallel_for(rows, 3 * columns, [&](std::size_t begin, std::size_t end) {
      const Scratch<X> of_x(columns);
      const Scratch<Y> of_y(columns);
      for (std::size_t row = begin; row < end; ++row) {
        const float* from = floats_of(x + row * columns, columns, of_x);
        layer_norm_loops::forward(from, scale, bias, target_of(y + row * columns, of_y), columns, eps, mean + row,
                                  inverse_std + row);
        store(y + row * columns, columns, of_y);
      }
    });
    return true;
  };
}

// The gradient; the input behind inverse_std, if there is one, is added to dx.
template <class T>
Step backward_step(const Call& call) {
  std::size_t rows, columns;
  if (!call.has_numbers({})) return {};
  const View &dy = call.inputs[0], &x = call.inputs[1], &scale = call.inputs[2];
  if (!read_sizes(x, scale, call.inputs[3], &rows, &columns) || call.inputs[4].size() != rows) return {};
  if (dy.shape != x.shape || call.outputs[0].shape != x.shape) return {};
  if (call.outputs[1].shape != scale.shape || call.outputs[2].shape != scale.shape) return {};
  const bool has_addend = call.inputs.size() == 6;
  if (has_addend && call.inputs[5].size() != x.size()) return {};
  const T* const addend = has_addend ? data_of<const T>(call.inputs[5]) : nullptr;
  return [rows, columns, addend, dy = data_of<const T>(dy), x = data_of<const T>(x), scale = scale.floats(),
          mean = call.inputs[3].floats(), inverse_std = call.inputs[4].floats(), dx = data_of<T>(call.outputs[0]),
          dscale = call.outputs[1].floats(), dbias = call.outputs[2].floats()] {
    const std::size_t pieces = (rows + kPiece - 1) / kPiece;
    std::vector<float> parts(2 * pieces * columns);  // dscale and dbias of each piece
    parallel_for(pieces, 4 * kPiece * columns, [&](std::size_t begin, std::size_t end) {
      const Scratch<T> of_dy(columns), of_x(columns), of_addend(columns), of_dx(columns);
      for (std::size_t piece = begin; piece < end; ++piece)
        for (std::size_t row = piece * kPiece; row < std::min(rows, (piece + 1) * kPiece); ++row) {
          float* part = parts.data() + 2 * piece * columns;
          const std::size_t at = row * columns;
          layer_norm_loops::backward(floats_of(dy + at, columns, of_dy), floats_of(x + at, columns, of_x), scale,
                                     addend ? floats_of(addend + at, columns, of_addend) : nullptr,
                                     target_of(dx + at, of_dx), columns, mean[row], inverse_std[row], part,
                                     part + columns);
          store(dx + at, columns, of_dx);
        }
    });
    std::vector<double> totals(2 * columns);
    for (std::size_t piece = 0; piece < pieces; ++piece)  // in their order, so that the threads change nothing
      layer_norm_loops::add(parts.data() + 2 * piece * columns, totals.data(), 2 * columns);
    for (std::size_t i = 0; i < columns; ++i) {
      dscale[i] = float(totals[i]);
      dbias[i] = float(totals[columns + i]);
    }
    return true;
  };
}

const Registration layer_norm("layer_norm", [](const Call& call) -> Step {
  if (call.are_floats(3, 3)) return forward_step<float, float>(call);
  if (call.has_arrays("fff", "Eff")) return forward_step<float, Bfloat16>(call);
  return call.has_arrays("Eff", "Eff") ? forward_step<Bfloat16, Bfloat16>(call) : Step();
});

const Registration layer_norm_backward("layer_norm_backward", [](const Call& call) -> Step {
  if (call.are_floats(5, 3)) return backward_step<float>(call);
  return call.has_arrays("EEfff", "Eff") ? backward_step<Bfloat16>(call) : Step();
});

// of recorded steps: (dy, x, scale, mean, inverse_std, addend) -> (dx + addend, dscale, dbias)
const Registration layer_norm_backward_add("layer_norm_backward_add", [](const Call& call) -> Step {
  if (call.are_floats(6, 3)) return backward_step<float>(call);
  return call.has_arrays("EEfffE", "Eff") ? backward_step<Bfloat16>(call) : Step();
});

}  // namespace
}  // namespace singa_lite
