// SPDX-License-Identifier: Apache-2.0
// Products of recorded steps whose result goes through more before it leaves the cache: some rows are multiplied, then
// finished, then the next ones. a is (m, k), b (k, n), or (n, k) with transpose_b; bias (n,); others have y's size.
//
// matmul_gelu: (a, b, bias) -> (y = gelu(u), derivative = that of gelu at u), u = a b + bias.
// matmul_mul: (a, b, factor) -> a b times factor; transpose_b.
// matmul_add: (a, b, bias, residual) -> a b + bias + residual.
// matmul_add_norm: (a, b, bias, residual, scale, shift) -> (the same, its layer norm, mean, inverse_std); eps.
#include <algorithm>

#include "kernels/clones.h"
#include "kernels/layer_norm.h"
#include "kernels/onednn.h"
#include "kernels/registry.h"
#include "kernels/threads.h"
#include "kernels/vector_math.h"

#ifdef SINGA_LITE_ONEDNN
namespace singa_lite {
namespace product_loops {

CLONES void gelu(const float* bias, float* y, float* derivative, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) {
    const float x = y[i] + bias[i], probability = vector_math::normal_cdf(x);
    y[i] = x * probability;
    derivative[i] = probability + x * vector_math::normal_pdf(x);
  }
}

CLONES void mul(const float* factor, float* y, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) y[i] *= factor[i];
}

CLONES void add(const float* bias, const float* residual, float* y, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) y[i] = (y[i] + bias[i]) + residual[i];
}

}  // namespace product_loops

namespace {

constexpr std::int64_t kRows = 128;  // multiplied at a time: their result stays in the second cache, and fewer are slower

struct Product {
  std::int64_t m = 0, n = 0, k = 0;
  bool transpose_b = false;
  const float *a = nullptr, *b = nullptr;
  float* y = nullptr;
};

// The product of a call, whose arrays all are float32 and whose inputs behind the first two have n elements up to number
// `rows`, and m n from there on.
bool read_product(const Call& call, bool transpose_b, Product* p) {
  const View &a = call.inputs[0], &b = call.inputs[1];
  if (a.ndim() != 2 || b.ndim() != 2 || a.size() == 0 || b.size() == 0) return false;
  p->m = a.shape[0];
  p->k = a.shape[1];
  p->n = b.shape[transpose_b ? 0 : 1];
  p->transpose_b = transpose_b;
  p->a = a.floats();
  p->b = b.floats();
  p->y = call.outputs[0].floats();
  return b.shape[transpose_b ? 1 : 0] == p->k && call.outputs[0].size() == std::size_t(p->m * p->n);
}

bool have_size(const std::vector<View>& arrays, std::initializer_list<std::size_t> numbers, std::int64_t size) {
  return std::all_of(numbers.begin(), numbers.end(),
                     [&](std::size_t number) { return arrays[number].size() == std::size_t(size); });
}

// y = a b by some rows at a time, finish(number of a row) for each of them.
template <class Finish>
void multiply_rows(const Product& p, const Finish& finish) {
  const std::int64_t most = std::max<std::int64_t>(8, (p.m + num_threads() - 1) / num_threads());
  const std::int64_t step = std::min(kRows, most), blocks = (p.m + step - 1) / step;
  note_parallel_region(num_threads());
  parallel_for(std::size_t(blocks), std::size_t(step * p.n * p.k), [&](std::size_t begin, std::size_t end) {
    for (auto block = std::int64_t(begin); block < std::int64_t(end); ++block) {
      const std::int64_t start = block * step, stop = std::min(start + step, p.m);
      dnnl_sgemm('N', p.transpose_b ? 'T' : 'N', stop - start, p.n, p.k, 1.0f, p.a + start * p.k, p.k, p.b,
                 p.transpose_b ? p.k : p.n, 0.0f, p.y + start * p.n, p.n);
      for (std::int64_t row = start; row < stop; ++row) finish(row);
    }
  });
}

const Registration matmul_gelu("matmul_gelu", [](const Call& call) -> Step {
  Product p;
  if (!call.are_floats(3, 2) || !call.has_numbers({}) || !read_product(call, false, &p)) return {};
  if (!have_size(call.inputs, {2}, p.n) || !have_size(call.outputs, {1}, p.m * p.n)) return {};
  return [p, bias = call.inputs[2].floats(), derivative = call.outputs[1].floats()] {
    multiply_rows(p, [&](std::int64_t row) {
      product_loops::gelu(bias, p.y + row * p.n, derivative + row * p.n, std::size_t(p.n));
    });
    return true;
  };
});

const Registration matmul_mul("matmul_mul", [](const Call& call) -> Step {
  Product p;
  if (!call.are_floats(3, 1) || !call.has_numbers({"transpose_b"})) return {};
  if (!read_product(call, call.number("transpose_b") != 0, &p) || !have_size(call.inputs, {2}, p.m * p.n)) return {};
  return [p, factor = call.inputs[2].floats()] {
    multiply_rows(p, [&](std::int64_t row) {
      product_loops::mul(factor + row * p.n, p.y + row * p.n, std::size_t(p.n));
    });
    return true;
  };
});

const Registration matmul_add("matmul_add", [](const Call& call) -> Step {
  Product p;
  if (!call.are_floats(4, 1) || !call.has_numbers({}) || !read_product(call, false, &p)) return {};
  if (!have_size(call.inputs, {2}, p.n) || !have_size(call.inputs, {3}, p.m * p.n)) return {};
  return [p, bias = call.inputs[2].floats(), residual = call.inputs[3].floats()] {
    multiply_rows(p, [&](std::int64_t row) {
      product_loops::add(bias, residual + row * p.n, p.y + row * p.n, std::size_t(p.n));
    });
    return true;
  };
});

const Registration matmul_add_norm("matmul_add_norm", [](const Call& call) -> Step {
  Product p;
  if (!call.are_floats(6, 4) || !call.has_numbers({"eps"}) || !read_product(call, false, &p)) return {};
  if (!have_size(call.inputs, {2, 4, 5}, p.n) || !have_size(call.inputs, {3}, p.m * p.n)) return {};
  if (!have_size(call.outputs, {1}, p.m * p.n) || !have_size(call.outputs, {2, 3}, p.m)) return {};
  return [p, eps = call.number("eps"), bias = call.inputs[2].floats(), residual = call.inputs[3].floats(),
          scale = call.inputs[4].floats(), shift = call.inputs[5].floats(), normal = call.outputs[1].floats(),
          mean = call.outputs[2].floats(), inverse_std = call.outputs[3].floats()] {
    multiply_rows(p, [&](std::int64_t row) {
      float* y = p.y + row * p.n;
      product_loops::add(bias, residual + row * p.n, y, std::size_t(p.n));
      layer_norm_loops::forward(y, scale, shift, normal + row * p.n, std::size_t(p.n), eps, mean + row,
                                inverse_std + row);
    });
    return true;
  };
});

}  // namespace
}  // namespace singa_lite
#endif
