// SPDX-License-Identifier: Apache-2.0
// Products of two narrow matrices: see backend/cpu/low_rank.py, whose orders of sums these are, bit by bit. It is compiled
// without fused multiply-add, which not every processor has.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/clones.h"
#include "kernels/registry.h"
#include "kernels/threads.h"

namespace singa_lite {
namespace low_rank_loops {

constexpr std::size_t kLanes = 16;

CLONES double dot(const float* a, const float* b, std::size_t n) {
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += double(a[i + lane]) * double(b[i + lane]);
  for (std::size_t lane = 0; i + lane < n; ++lane) lanes[lane] += double(a[i + lane]) * double(b[i + lane]);
  double sum = lanes[0];
  for (std::size_t lane = 1; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

// row -= the sum of factors times the rows of earlier
CLONES void subtract(float* row, const float* earlier, const double* factors, std::size_t count, std::size_t n) {
  constexpr std::size_t kPart = 256;
  double total[kPart];
  for (std::size_t begin = 0; begin < n; begin += kPart) {
    const std::size_t size = n - begin < kPart ? n - begin : kPart;
    for (std::size_t i = 0; i < size; ++i) total[i] = 0;
    for (std::size_t k = 0; k < count; ++k)
      for (std::size_t i = 0; i < size; ++i) total[i] += factors[k] * double(earlier[k * n + begin + i]);
    for (std::size_t i = 0; i < size; ++i) row[begin + i] = float(double(row[begin + i]) - total[i]);
  }
}

CLONES void divide(const float* from, double divisor, float* to, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) to[i] = float(double(from[i]) / divisor);
}

// to (columns,) = the sum over k of p[k * rows] * q[k * columns + j]
ALWAYS_INLINE void sum_in(const float* p, const float* q, std::size_t rank, std::size_t rows, std::size_t columns, float* to) {
  std::size_t k = 1;
  if (rank == 1)
    for (std::size_t j = 0; j < columns; ++j) to[j] = p[0] * q[j];
  else {
    const float p0 = p[0], p1 = p[rows];
    for (std::size_t j = 0; j < columns; ++j) to[j] = p0 * q[j] + p1 * q[columns + j];
    k = 2;
  }
  for (; k + 2 <= rank; k += 2) {
    const float p0 = p[k * rows], p1 = p[(k + 1) * rows];
    const float *q0 = q + k * columns, *q1 = q0 + columns;
    for (std::size_t j = 0; j < columns; ++j) to[j] = to[j] + p0 * q0[j] + p1 * q1[j];
  }
  for (; k < rank; ++k)
    for (std::size_t j = 0; j < columns; ++j) to[j] += p[k * rows] * q[k * columns + j];
}

struct Product {
  const float *p, *q;
  std::size_t rank, rows, columns;
};

CLONES void sum(const Product& of, float* to, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) sum_in(of.p + i, of.q, of.rank, of.rows, of.columns, to + i * of.columns);
}

CLONES void rest(const Product& of, const float* m, float* to, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end; ++i) {
    float* row = to + i * of.columns;
    const float* from = m + i * of.columns;
    sum_in(of.p + i, of.q, of.rank, of.rows, of.columns, row);
    for (std::size_t j = 0; j < of.columns; ++j) {
      const float value = from[j] - row[j];
      row[j] = std::fabs(value) <= FLT_MAX ? value : 0;
    }
  }
}

}  // namespace low_rank_loops

namespace {

using namespace low_rank_loops;

bool is_matrix_like(const View& view, std::int64_t rows, std::int64_t columns) {
  return view.is_floats() && view.ndim() == 2 && view.shape[0] == rows && view.shape[1] == columns;
}

const Registration orthonormal_rows("orthonormal_rows", [](const Call& call) -> Step {
  if (!call.are_floats(1, 1) || !call.has_numbers({"dropped"})) return {};
  const View &p = call.inputs[0], &out = call.outputs[0];
  if (p.ndim() != 2 || !is_matrix_like(out, p.shape[0], p.shape[1]) || p.data == out.data) return {};
  return [from = p.floats(), to = out.floats(), rows = std::size_t(p.shape[0]), n = std::size_t(p.shape[1]),
          dropped = call.number("dropped")] {
    std::vector<double> factors(rows);
    for (std::size_t r = 0; r < rows; ++r) {
      float* row = to + r * n;
      for (std::size_t i = 0; i < n; ++i) row[i] = from[r * n + i];
      const double before = dot(row, row, n);
      for (int pass = 0; pass < (r ? 2 : 0); ++pass) {
        for (std::size_t k = 0; k < r; ++k) factors[k] = dot(to + k * n, row, n);
        subtract(row, to, factors.data(), r, n);
      }
      const double after = dot(row, row, n);
      if (after > dropped * before)
        divide(row, std::sqrt(after), row, n);
      else
        for (std::size_t i = 0; i < n; ++i) row[i] *= 0;  // NaN stays
    }
    return true;
  };
});

const Registration unit_rows("unit_rows", [](const Call& call) -> Step {
  if (!call.are_floats(1, 1) || !call.has_numbers({"seed", "counter"})) return {};
  const View &q = call.inputs[0], &out = call.outputs[0];
  if (q.ndim() != 2 || !is_matrix_like(out, q.shape[0], q.shape[1]) || q.data == out.data) return {};
  return [from = q.floats(), to = out.floats(), rows = std::size_t(q.shape[0]), n = std::size_t(q.shape[1])] {
    std::vector<double> squares(rows);
    for (std::size_t r = 0; r < rows; ++r) {
      squares[r] = dot(from + r * n, from + r * n, n);
      if (!(squares[r] > 0 && squares[r] <= DBL_MAX)) return false;  // numpy draws it
    }
    for (std::size_t r = 0; r < rows; ++r) divide(from + r * n, std::sqrt(squares[r]), to + r * n, n);
    return true;
  };
});

// The product whose factors are the last two inputs, if its result is `out`'s; else its rank is 0.
Product product_of(const View& p, const View& q, const View& out) {
  if (!p.is_floats() || !q.is_floats() || p.ndim() != 2 || q.ndim() != 2 || p.shape[0] != q.shape[0]) return {};
  if (!is_matrix_like(out, p.shape[1], q.shape[1])) return {};
  return {p.floats(), q.floats(), std::size_t(p.shape[0]), std::size_t(p.shape[1]), std::size_t(q.shape[1])};
}

const Registration low_rank_sum("low_rank_sum", [](const Call& call) -> Step {
  if (!call.are_floats(2, 1) || !call.has_numbers({})) return {};
  const Product product = product_of(call.inputs[0], call.inputs[1], call.outputs[0]);
  if (product.rank == 0) return {};
  return [product, to = call.outputs[0].floats()] {
    parallel_for(product.rows, product.rank * product.columns,
                 [&](std::size_t begin, std::size_t end) { low_rank_loops::sum(product, to, begin, end); });
    return true;
  };
});

const Registration low_rank_rest("low_rank_rest", [](const Call& call) -> Step {
  if (!call.are_floats(3, 1) || !call.has_numbers({})) return {};
  const View &m = call.inputs[0], &out = call.outputs[0];
  const Product product = product_of(call.inputs[1], call.inputs[2], out);
  if (product.rank == 0 || m.data == out.data) return {};
  if (!is_matrix_like(m, std::int64_t(product.rows), std::int64_t(product.columns))) return {};
  return [product, from = m.floats(), to = out.floats()] {
    parallel_for(product.rows, product.rank * product.columns,
                 [&](std::size_t begin, std::size_t end) { low_rank_loops::rest(product, from, to, begin, end); });
    return true;
  };
});

}  // namespace
}  // namespace singa_lite
