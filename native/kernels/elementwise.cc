// SPDX-License-Identifier: Apache-2.0
#include "kernels/elementwise.h"

#include <cmath>
#include <vector>

#include "common/half.h"
#include "kernels/clones.h"
#include "kernels/threads.h"

namespace singa_lite {
namespace elementwise_loops {

CLONES void relu(const float* x, float* y, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) y[i] = x[i] < 0 ? 0.0f : x[i];
}

CLONES void relu_backward(const float* dy, const float* y, float* dx, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) dx[i] = dy[i] * (y[i] > 0 ? 1.0f : 0.0f);
}

// out may be a: element i is read before it is written, so the vectors may be formed.
CLONES void add(const float* a, const float* b, float* out, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
}
CLONES void sub(const float* a, const float* b, float* out, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) out[i] = a[i] - b[i];
}
CLONES void mul(const float* a, const float* b, float* out, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) out[i] = a[i] * b[i];
}
CLONES void div(const float* a, const float* b, float* out, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) out[i] = a[i] / b[i];
}

CLONES void add_scalar(const float* a, float b, float* out, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) out[i] = a[i] + b;
}
CLONES void sub_scalar(const float* a, float b, float* out, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) out[i] = a[i] - b;
}
CLONES void mul_scalar(const float* a, float b, float* out, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) out[i] = a[i] * b;
}
CLONES void div_scalar(const float* a, float b, float* out, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) out[i] = a[i] / b;
}

CLONES void clip(const float* x, float* y, float low, float high, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) {
    const float above = x[i] < low ? low : x[i];  // NaN stays NaN
    y[i] = above > high ? high : above;
  }
}

// NaN if one is: NaN's bits without the sign are above infinity's, so integers of the same order find both.
CLONES std::uint32_t largest_bits(const std::uint32_t* x, std::size_t count) {
  std::uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t size = x[i] & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  return largest;
}

// A block of columns stays in registers or L1 while the rows pass.
CLONES void sum_rows(const float* x, float* out, std::size_t rows, std::size_t stride, std::size_t columns) {
  for (std::size_t c = 0; c < columns; ++c) out[c] = 0;
  for (std::size_t r = 0; r < rows; ++r)
#pragma GCC ivdep
    for (std::size_t c = 0; c < columns; ++c) out[c] += x[r * stride + c];
}

CLONES float sum(const float* x, std::size_t count) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (std::size_t i = 0; i < count; ++i) total += x[i];
  return total;
}

CLONES void add_row(const float* b, float low, float* y, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) {
    const float value = b ? y[i] + b[i] : y[i];
    y[i] = value < low ? low : value;  // NaN is passed on
  }
}

}  // namespace elementwise_loops

namespace {

using Pairwise = void (*)(const float*, const float*, float*, std::size_t);
using WithScalar = void (*)(const float*, float, float*, std::size_t);

Pairwise pairwise(Arithmetic op) {
  switch (op) {
    case Arithmetic::kAdd: return &elementwise_loops::add;
    case Arithmetic::kSub: return &elementwise_loops::sub;
    case Arithmetic::kMul: return &elementwise_loops::mul;
    default: return &elementwise_loops::div;
  }
}

WithScalar with_scalar(Arithmetic op) {
  switch (op) {
    case Arithmetic::kAdd: return &elementwise_loops::add_scalar;
    case Arithmetic::kSub: return &elementwise_loops::sub_scalar;
    case Arithmetic::kMul: return &elementwise_loops::mul_scalar;
    default: return &elementwise_loops::div_scalar;
  }
}

}  // namespace

void relu(const float* x, float* y, std::size_t count) {
  parallel_for(count, 1, [&](std::size_t begin, std::size_t end) { elementwise_loops::relu(x + begin, y + begin, end - begin); });
}

void relu_backward(const float* dy, const float* y, float* dx, std::size_t count) {
  parallel_for(count, 1, [&](std::size_t begin, std::size_t end) {
    elementwise_loops::relu_backward(dy + begin, y + begin, dx + begin, end - begin);
  });
}

void arithmetic(Arithmetic op, const float* a, const float* b, float* out, std::size_t count, std::size_t period) {
  if (period == 1) {
    const auto loop = with_scalar(op);
    const float scalar = *b;
    return parallel_for(count, 1, [&](std::size_t begin, std::size_t end) {
      loop(a + begin, scalar, out + begin, end - begin);
    });
  }
  const auto loop = pairwise(op);
  if (period == count)
    return parallel_for(count, 1, [&](std::size_t begin, std::size_t end) {
      loop(a + begin, b + begin, out + begin, end - begin);
    });
  parallel_for(count / period, period, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) loop(a + row * period, b, out + row * period, period);
  });
}

void add_row(const float* b, bool relu, float* y, std::size_t rows, std::size_t columns) {
  parallel_for(rows, columns, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row)
      elementwise_loops::add_row(b, relu ? 0.0f : -INFINITY, y + row * columns, columns);
  });
}

void sum_rows(const float* x, float* out, std::size_t rows, std::size_t columns) {
  if (columns == 1) {
    *out = elementwise_loops::sum(x, rows);
    return;
  }
  parallel_for(columns, rows, [&](std::size_t begin, std::size_t end) {
    constexpr std::size_t kBlock = 1024;
    for (std::size_t c = begin; c < end; c += kBlock)
      elementwise_loops::sum_rows(x + c, out + c, rows, columns, std::min(kBlock, end - c));
  });
}

float max_abs(const float* x, std::size_t count) {
  std::vector<std::uint32_t> largest(std::size_t(num_threads()) + 1, 0u);
  const auto* bits = reinterpret_cast<const std::uint32_t*>(x);
  std::size_t parts = largest.size() - 1;
  parallel_for(parts, count / std::max<std::size_t>(parts, 1), [&](std::size_t begin, std::size_t end) {
    for (std::size_t part = begin; part < end; ++part) {
      const std::size_t from = count * part / parts, to = count * (part + 1) / parts;
      largest[part] = elementwise_loops::largest_bits(bits + from, to - from);
    }
  });
  const std::uint32_t all = *std::max_element(largest.begin(), largest.end());
  float value;
  __builtin_memcpy(&value, &all, sizeof value);
  return value;
}

void clip(const float* x, float* y, float low, float high, std::size_t count) {
  parallel_for(count, 1, [&](std::size_t begin, std::size_t end) {
    elementwise_loops::clip(x + begin, y + begin, low, high, end - begin);
  });
}

void to_half(const float* from, std::uint16_t* to, std::size_t count) {
  parallel_for(count, 1, [&](std::size_t begin, std::size_t end) {
    float_to_half(from + begin, to + begin, end - begin);
  });
}

void from_half(const std::uint16_t* from, float* to, std::size_t count) {
  parallel_for(count, 1, [&](std::size_t begin, std::size_t end) {
    half_to_float(from + begin, to + begin, end - begin);
  });
}

}  // namespace singa_lite
