// SPDX-License-Identifier: Apache-2.0
#include "kernels/softmax.h"

#include <algorithm>
#include <optional>
#include <type_traits>

#include "kernels/clones.h"
#include "kernels/registry.h"
#include "kernels/threads.h"
#include "kernels/vector_math.h"
#include "kernels/widen.h"

namespace singa_lite {
namespace softmax_loops {

// A long sum is one of parts: float within a part, double over the parts.
constexpr std::size_t kPart = 8192, kRowsOfPart = 512;

CLONES float row(const float* x, float* y, std::size_t count, float* largest) {
  float most = x[0];
#pragma omp simd reduction(max : most)
  for (std::size_t i = 0; i < count; ++i) most = x[i] > most ? x[i] : most;
  double total = 0;
  for (std::size_t begin = 0; begin < count; begin += kPart) {
    const std::size_t end = std::min(begin + kPart, count);
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (std::size_t i = begin; i < end; ++i) {
      y[i] = vector_math::exp(x[i] - most);
      part += y[i];
    }
    total += part;
  }
  const float factor = float(1 / total);
  for (std::size_t i = 0; i < count; ++i) y[i] *= factor;
  *largest = most;
  return float(total);
}

// dx = y (dy - sum of dy y)
CLONES void row_backward(const float* dy, const float* y, float* dx, std::size_t count) {
  double total = 0;
  for (std::size_t begin = 0; begin < count; begin += kPart) {
    const std::size_t end = std::min(begin + kPart, count);
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (std::size_t i = begin; i < end; ++i) part += dy[i] * y[i];
    total += part;
  }
  const auto sum = float(total);
  for (std::size_t i = 0; i < count; ++i) dx[i] = y[i] * (dy[i] - sum);
}

constexpr std::size_t kMostColumns = 256;  // side by side: what is kept of each stays in the first cache
constexpr std::size_t kLeastColumns = 16, kMostElements = 65536;  // of columns as long as these: what is widened stays small

// The softmax of each of `columns` columns; their elements are `step` apart.
CLONES void columns(const float* x, float* y, std::size_t count, std::size_t columns, std::size_t step) {
  float most[kMostColumns];
  double total[kMostColumns] = {};
  for (std::size_t i = 0; i < columns; ++i) most[i] = x[i];
  for (std::size_t row = 1; row < count; ++row)
    for (std::size_t i = 0; i < columns; ++i) most[i] = x[row * step + i] > most[i] ? x[row * step + i] : most[i];
  for (std::size_t begin = 0; begin < count; begin += kRowsOfPart) {
    float part[kMostColumns] = {};
    for (std::size_t row = begin; row < std::min(begin + kRowsOfPart, count); ++row)
#pragma GCC ivdep
      for (std::size_t i = 0; i < columns; ++i) {
        const float power = vector_math::exp(x[row * step + i] - most[i]);
        y[row * step + i] = power;
        part[i] += power;
      }
    for (std::size_t i = 0; i < columns; ++i) total[i] += part[i];
  }
  float factor[kMostColumns];
  for (std::size_t i = 0; i < columns; ++i) factor[i] = float(1 / total[i]);
  for (std::size_t row = 0; row < count; ++row)
#pragma GCC ivdep
    for (std::size_t i = 0; i < columns; ++i) y[row * step + i] *= factor[i];
}

CLONES void columns_backward(const float* dy, const float* y, float* dx, std::size_t count, std::size_t columns,
                             std::size_t step) {
  double total[kMostColumns] = {};
  for (std::size_t begin = 0; begin < count; begin += kRowsOfPart) {
    float part[kMostColumns] = {};
    for (std::size_t row = begin; row < std::min(begin + kRowsOfPart, count); ++row)
      for (std::size_t i = 0; i < columns; ++i) part[i] += dy[row * step + i] * y[row * step + i];
    for (std::size_t i = 0; i < columns; ++i) total[i] += part[i];
  }
  float sum[kMostColumns];
  for (std::size_t i = 0; i < columns; ++i) sum[i] = float(total[i]);
  for (std::size_t row = 0; row < count; ++row)
#pragma GCC ivdep
    for (std::size_t i = 0; i < columns; ++i) dx[row * step + i] = y[row * step + i] * (dy[row * step + i] - sum[i]);
}

}  // namespace softmax_loops

float softmax_row(const float* x, float* y, std::size_t count, float* largest) {
  return softmax_loops::row(x, y, count, largest);
}

namespace {

// Where the softmaxes of an array are: `before` times `after` of `count` elements each, which are `after` apart.
struct Axes {
  std::size_t before, count, after;
};

// The axes of a call whose arrays have one shape and are not empty, or nothing.
std::optional<Axes> axes_of(const Call& call) {
  const Shape& shape = call.outputs[0].shape;
  if (!call.has_numbers({"axis"}) || call.outputs[0].size() == 0) return {};
  for (const View& input : call.inputs)
    if (input.shape != shape) return {};
  const auto ndim = std::int64_t(shape.size()), given = std::int64_t(call.number("axis"));
  const std::int64_t axis = given < 0 ? given + ndim : given;
  if (axis < 0 || axis >= ndim) return {};
  Axes axes{1, std::size_t(shape[std::size_t(axis)]), 1};
  for (std::int64_t i = 0; i < ndim; ++i)
    (i < axis ? axes.before : axes.after) *= i == axis ? 1 : std::size_t(shape[std::size_t(i)]);
  return axes;
}

// Columns of `count` elements as floats, and where to compute such: see the functions of widen.h for one row.
const float* columns_of(const float* x, const Axes&, std::size_t, const Scratch<float>&) { return x; }
const float* columns_of(const Bfloat16* x, const Axes& axes, std::size_t columns, const Scratch<Bfloat16>& scratch) {
  const auto step = std::int64_t(columns);
  widen_rows(x, std::int64_t(axes.after), scratch.data(), step, std::int64_t(axes.count), step);
  return scratch.data();
}
void store_columns(float*, const Axes&, std::size_t, const Scratch<float>&) {}
void store_columns(Bfloat16* y, const Axes& axes, std::size_t columns, const Scratch<Bfloat16>& scratch) {
  const auto step = std::int64_t(columns);
  narrow_rows(scratch.data(), step, y, std::int64_t(axes.after), std::int64_t(axes.count), step);
}

template <class T>
struct Arrays {
  const T *first, *second;  // the second may be null
  T* out;
};

// Call row(first, second, out, count) for every softmax along the last axis.
template <class T, class Row>
void for_rows(const Axes& axes, const Arrays<T>& arrays, std::size_t cost, const Row& row) {
  parallel_for(axes.before, cost * axes.count, [&](std::size_t begin, std::size_t end) {
    const Scratch<T> of_first(axes.count), of_second(arrays.second ? axes.count : 0), of_out(axes.count);
    for (std::size_t at = begin * axes.count; at < end * axes.count; at += axes.count) {
      const float* const first = floats_of(arrays.first + at, axes.count, of_first);
      const float* const second = arrays.second ? floats_of(arrays.second + at, axes.count, of_second) : nullptr;
      row(first, second, target_of(arrays.out + at, of_out), axes.count);
      store(arrays.out + at, axes.count, of_out);
    }
  });
}

// Call columns(first, second, out, count, columns, step) for all softmaxes along another axis.
template <class T, class Body>
void for_columns(const Axes& axes, const Arrays<T>& arrays, std::size_t cost, const Body& body) {
  using namespace softmax_loops;
  const std::size_t most = std::clamp(kMostElements / axes.count, kLeastColumns, kMostColumns);
  const std::size_t pieces = (axes.after + most - 1) / most;
  parallel_for(axes.before * pieces, cost * axes.count * most, [&](std::size_t begin, std::size_t end) {
    const std::size_t room = axes.count * most;
    const Scratch<T> of_first(room), of_second(arrays.second ? room : 0), of_out(room);
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t start = i % pieces * most, columns = std::min(most, axes.after - start);
      const std::size_t at = i / pieces * axes.count * axes.after + start;
      const std::size_t step = std::is_same_v<T, float> ? axes.after : columns;
      const float* const first = columns_of(arrays.first + at, axes, columns, of_first);
      const float* const second = arrays.second ? columns_of(arrays.second + at, axes, columns, of_second) : nullptr;
      body(first, second, target_of(arrays.out + at, of_out), axes.count, columns, step);
      store_columns(arrays.out + at, axes, columns, of_out);
    }
  });
}

template <class T>
Step forward(const Axes& axes, const Call& call) {
  const Arrays<T> arrays{static_cast<const T*>(call.inputs[0].data), nullptr, static_cast<T*>(call.outputs[0].data)};
  return [axes, arrays] {
    if (axes.after == 1)
      for_rows(axes, arrays, kPowerCost, [](const float* x, const float*, float* y, std::size_t count) {
        float largest;
        softmax_loops::row(x, y, count, &largest);
      });
    else
      for_columns(axes, arrays, kPowerCost,
                  [](const float* x, const float*, float* y, std::size_t count, std::size_t columns, std::size_t step) {
                    softmax_loops::columns(x, y, count, columns, step);
                  });
    return true;
  };
}

template <class T>
Step backward(const Axes& axes, const Call& call) {
  const Arrays<T> arrays{static_cast<const T*>(call.inputs[0].data), static_cast<const T*>(call.inputs[1].data),
                         static_cast<T*>(call.outputs[0].data)};
  return [axes, arrays] {
    if (axes.after == 1)
      for_rows(axes, arrays, 2, softmax_loops::row_backward);
    else
      for_columns(axes, arrays, 2, softmax_loops::columns_backward);
    return true;
  };
}

const Registration register_softmax("softmax", [](const Call& call) -> Step {
  const auto axes = call.are_operands(1, 1) ? axes_of(call) : std::nullopt;
  if (!axes) return {};
  if (call.are_floats(1, 1)) return forward<float>(*axes, call);
  return call.has_arrays("E", "E") ? forward<Bfloat16>(*axes, call) : Step();
});

const Registration register_softmax_backward("softmax_backward", [](const Call& call) -> Step {
  const auto axes = call.are_operands(2, 1) ? axes_of(call) : std::nullopt;
  if (!axes) return {};
  if (call.are_floats(2, 1)) return backward<float>(*axes, call);
  return call.has_arrays("EE", "E") ? backward<Bfloat16>(*axes, call) : Step();
});

}  // namespace
}  // namespace singa_lite
