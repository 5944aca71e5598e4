// SPDX-License-Identifier: Apache-2.0
// Products of recorded steps whose result goes through more before it leaves the cache: some rows are multiplied, then
// finished, then the next ones. a is (m, k), b (k, n), or (n, k) with transpose_b; bias (n,); others have y's size.
//
// Bias, scale, shift, mean and inverse_std are float32. The others are, too, or a and b are bfloat16 and each of the others
// either: sums and what follows are of float32, and a result is rounded once.
//
// matmul_gelu: (a, b, bias) -> (y = gelu(u), derivative = that of gelu at u), u = a b + bias.
// matmul_mul: (a, b, factor) -> a b times factor; transpose_b.
// matmul_add: (a, b, bias, residual) -> a b + bias + residual.
// matmul_add_norm: (a, b, bias, residual, scale, shift) -> (the same, its layer norm, mean, inverse_std); eps.
#include <algorithm>

#include "kernels/clones.h"
#include "kernels/layer_norm.h"
#include "kernels/registry.h"
#include "kernels/row_product.h"
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

struct Product : RowProduct {
  Operand y;
};

// The product of a call, whose inputs behind the first two have n elements up to number `rows`, and m n from there on.
bool read_product(const Call& call, bool transpose_b, Product* p) {
  const View &a = call.inputs[0], &b = call.inputs[1];
  if (a.type != b.type || a.ndim() != 2 || b.ndim() != 2 || a.size() == 0 || b.size() == 0) return false;
  if (!a.is_bfloat16s() && !call.are_floats(call.inputs.size(), call.outputs.size())) return false;
  p->m = a.shape[0];
  p->k = a.shape[1];
  p->n = b.shape[transpose_b ? 0 : 1];
  p->transpose_b = transpose_b;
  p->a = a.operand();
  p->b = b.operand();
  p->y = call.outputs[0].operand();
  return b.shape[transpose_b ? 1 : 0] == p->k && call.outputs[0].size() == std::size_t(p->m * p->n);
}

bool have_size(const std::vector<View>& arrays, std::initializer_list<std::size_t> numbers, std::int64_t size) {
  return std::all_of(numbers.begin(), numbers.end(),
                     [&](std::size_t number) { return arrays[number].size() == std::size_t(size); });
}

bool are_floats(const std::vector<View>& arrays, std::initializer_list<std::size_t> numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [&](std::size_t number) { return arrays[number].is_floats(); });
}

// y = what finish(offset of a row, its sums, a buffer for a row) makes of each row of the product in place.
template <class Finish>
void multiply_into(const Product& p, const Finish& finish) {
  const auto columns = std::size_t(p.n);
  multiply_rows(p, p.y.is_bfloat16 ? nullptr : static_cast<float*>(p.y.data),
                [&](std::int64_t first, std::int64_t count, float* sums) {
                  const Scratch<Bfloat16> buffer(p.a.is_bfloat16 ? columns : 0);
                  for (std::int64_t row = first; row < first + count; ++row, sums += p.n) {
                    const auto offset = std::size_t(row * p.n);
                    finish(offset, sums, buffer.data());
                    p.y.write(offset, columns, sums);
                  }
                });
}

const Registration matmul_gelu("matmul_gelu", [](const Call& call) -> Step {
  Product p;
  if (!call.are_operands(3, 2) || !call.has_numbers({}) || !read_product(call, false, &p)) return {};
  if (!are_floats(call.inputs, {2}) || !have_size(call.inputs, {2}, p.n)) return {};
  if (!have_size(call.outputs, {1}, p.m * p.n)) return {};
  return [p, bias = call.inputs[2].floats(), derivative = call.outputs[1].operand()] {
    multiply_into(p, [&](std::size_t offset, float* sums, float* buffer) {
      float* const derivatives = derivative.target(offset, buffer);
      product_loops::gelu(bias, sums, derivatives, std::size_t(p.n));
      derivative.write(offset, std::size_t(p.n), derivatives);
    });
    return true;
  };
});

const Registration matmul_mul("matmul_mul", [](const Call& call) -> Step {
  Product p;
  if (!call.are_operands(3, 1) || !call.has_numbers({"transpose_b"})) return {};
  if (!read_product(call, call.number("transpose_b") != 0, &p) || !have_size(call.inputs, {2}, p.m * p.n)) return {};
  return [p, factor = call.inputs[2].operand()] {
    multiply_into(p, [&](std::size_t offset, float* sums, float* buffer) {
      product_loops::mul(factor.read(offset, std::size_t(p.n), buffer), sums, std::size_t(p.n));
    });
    return true;
  };
});

const Registration matmul_add("matmul_add", [](const Call& call) -> Step {
  Product p;
  if (!call.are_operands(4, 1) || !call.has_numbers({}) || !read_product(call, false, &p)) return {};
  if (!are_floats(call.inputs, {2}) || !have_size(call.inputs, {2}, p.n)) return {};
  if (!have_size(call.inputs, {3}, p.m * p.n)) return {};
  return [p, bias = call.inputs[2].floats(), residual = call.inputs[3].operand()] {
    multiply_into(p, [&](std::size_t offset, float* sums, float* buffer) {
      product_loops::add(bias, residual.read(offset, std::size_t(p.n), buffer), sums, std::size_t(p.n));
    });
    return true;
  };
});

const Registration matmul_add_norm("matmul_add_norm", [](const Call& call) -> Step {
  Product p;
  if (!call.are_operands(6, 4) || !call.has_numbers({"eps"}) || !read_product(call, false, &p)) return {};
  if (!are_floats(call.inputs, {2, 4, 5}) || !are_floats(call.outputs, {2, 3})) return {};
  if (!have_size(call.inputs, {2, 4, 5}, p.n) || !have_size(call.inputs, {3}, p.m * p.n)) return {};
  if (!have_size(call.outputs, {1}, p.m * p.n) || !have_size(call.outputs, {2, 3}, p.m)) return {};
  return [p, eps = call.number("eps"), bias = call.inputs[2].floats(), residual = call.inputs[3].operand(),
          scale = call.inputs[4].floats(), shift = call.inputs[5].floats(), normal = call.outputs[1].operand(),
          mean = call.outputs[2].floats(), inverse_std = call.outputs[3].floats()] {
    const auto columns = std::size_t(p.n);
    multiply_into(p, [&](std::size_t offset, float* sums, float* buffer) {
      product_loops::add(bias, residual.read(offset, columns, buffer), sums, columns);
      if (p.y.is_bfloat16) {  // its gradient is computed from the rounded sums, whose mean and variance are needed then
        p.y.write(offset, columns, sums);
        p.y.read(offset, columns, sums);
      }
      float* const to = normal.target(offset, buffer);
      layer_norm_loops::forward(sums, scale, shift, to, columns, eps, mean + offset / columns,
                                inverse_std + offset / columns);
      normal.write(offset, columns, to);
    });
    return true;
  };
});

}  // namespace
}  // namespace singa_lite
#endif
