// SPDX-License-Identifier: Apache-2.0
#include "kernels/matmul.h"

#include <algorithm>
#include <type_traits>

#include "kernels/elementwise.h"
#include "kernels/onednn.h"
#include "kernels/row_product.h"
#include "kernels/threads.h"
#include "kernels/widen.h"

namespace singa_lite {

#ifdef SINGA_LITE_ONEDNN
namespace {

constexpr std::int64_t kKind = 1;  // in the keys of calls; conv.h has 2 to 4, a reorder 5

struct Types {
  bool has_bfloat16 = false, gives_bfloat16 = false;  // a and b; y
  bool has_bias = false, relu = false;
};

OnednnCall make(const Matmul& p, const Types& types) {
  const Dims a_strides = p.transpose_a ? Dims{p.m * p.k, 1, p.m} : Dims{p.m * p.k, p.k, 1};
  const Dims b_strides = p.transpose_b ? Dims{p.k * p.n, 1, p.k} : Dims{p.k * p.n, p.n, 1};
  const DataType from = array_type(types.has_bfloat16), to = array_type(types.gives_bfloat16);
  const dnnl::memory::desc a({p.batch, p.m, p.k}, from, a_strides), b({p.batch, p.k, p.n}, from, b_strides),
      y({p.batch, p.m, p.n}, to, Dims{p.m * p.n, p.n, 1}), row({1, 1, p.n}, DataType::f32, Dims{p.n, p.n, 1});
  auto flat = [&](const dnnl::memory::desc& md, std::int64_t rows, std::int64_t columns) {
    return p.batch == 1 ? md.reshape({rows, columns}) : md;
  };
  const auto a_md = flat(a, p.m, p.k), b_md = flat(b, p.k, p.n), y_md = flat(y, p.m, p.n);
  const auto bias_md = types.has_bias ? flat(row, 1, p.n) : dnnl::memory::desc();
  dnnl::primitive_attr attributes = call_attributes();
  if (types.relu) attributes.set_post_ops(relu_post_ops());
  const dnnl::matmul::primitive_desc pd(onednn_engine(), a_md, b_md, bias_md, y_md, attributes);
  std::vector<OnednnCall::Slot> slots{{DNNL_ARG_SRC, a_md, a_md, false},
                                {DNNL_ARG_WEIGHTS, b_md, b_md, false},
                                {DNNL_ARG_DST, y_md, y_md, true}};
  if (types.relu) slots.push_back(prelu_weight_slot(y_md.get_dims().size()));
  if (types.has_bias) slots.push_back({DNNL_ARG_BIAS, bias_md, bias_md, false});
  return OnednnCall(dnnl::matmul(pd), pd, std::move(slots));
}

bool run(const Matmul& p, const Types& t, const void* a, const void* b, const float* bias, void* y) {
  const auto call = cached_call({kKind, p.batch, p.m, p.n, p.k, p.transpose_a, p.transpose_b, t.has_bfloat16,
                                 t.gives_bfloat16, t.has_bias, t.relu},
                                [&] { return make(p, t); });
  if (!call) return false;
  if (t.relu) call->run({a, b, y, &kPreluWeight, bias});
  else call->run({a, b, y, bias});
  return true;
}

}  // namespace

bool matmul(const Matmul& p, const float* a, const float* b, float* y) {
  if (p.batch == 1) {  // sgemm: no primitive to look up
    const SignalsBlocked blocked;
    note_parallel_region(num_threads());  // and its threads are ours to report, see Note [fork]
    return dnnl_sgemm(p.transpose_a ? 'T' : 'N', p.transpose_b ? 'T' : 'N', p.m, p.n, p.k, 1.0f, a,
                      p.transpose_a ? p.m : p.k, b, p.transpose_b ? p.k : p.n, 0.0f, y, p.n) == dnnl_success;
  }
  return run(p, {}, a, b, nullptr, y);
}

namespace {

constexpr std::int64_t kDepth = 512;  // rows of both operands that are widened at a time, so that they stay in a cache

// y = a^T b of bfloat16 numbers, which are widened.
bool transposed_product(const Matmul& p, const Bfloat16* a, const Bfloat16* b, float* y) {
  const std::int64_t most = std::min(kDepth, p.k);
  const Scratch<Bfloat16> wide_a(std::size_t(most * p.m)), wide_b(std::size_t(most * p.n));
  note_parallel_region(num_threads());
  const SignalsBlocked blocked;
  for (std::int64_t start = 0; start < p.k; start += most) {
    const std::int64_t depth = std::min(most, p.k - start);
    from_bfloat16(a + start * p.m, wide_a.data(), std::size_t(depth * p.m));
    from_bfloat16(b + start * p.n, wide_b.data(), std::size_t(depth * p.n));
    if (dnnl_sgemm('T', 'N', p.m, p.n, depth, 1.0f, wide_a.data(), p.m, wide_b.data(), p.n, start ? 1.0f : 0.0f, y,
                   p.n) != dnnl_success)
      return false;
  }
  return true;
}

bool widened_product(const Matmul& p, const Bfloat16* a, const Bfloat16* b, float* y) {
  if (p.batch == 1 && p.transpose_a && !p.transpose_b) return transposed_product(p, a, b, y);
  const auto in_a = std::size_t(p.batch * p.m * p.k), in_b = std::size_t(p.batch * p.k * p.n);
  const Scratch<Bfloat16> wide_a(in_a), wide_b(in_b);
  from_bfloat16(a, wide_a.data(), in_a);
  from_bfloat16(b, wide_b.data(), in_b);
  return matmul(p, wide_a.data(), wide_b.data(), y);
}

// The product of bfloat16 numbers, or of the same ones widened, see Note [bfloat16 products] in onednn.h.
template <class Y>
bool product_of(const Matmul& p, const Bfloat16* a, const Bfloat16* b, const float* bias, bool relu, Y* y) {
  constexpr bool kRounds = std::is_same_v<Y, Bfloat16>;
  if (multiplies_bfloat16()) return run(p, {true, kRounds, bias != nullptr, relu}, a, b, bias, y);
  const auto finish = [&](std::int64_t first, std::int64_t count, float* sums) {
    if (bias || relu) add_row(bias, relu, sums, std::size_t(count), std::size_t(p.n));
    if constexpr (kRounds) to_bfloat16(sums, y + first * p.n, std::size_t(count * p.n));
  };
  const auto rows = p.batch * p.m;
  if (p.batch == 1 && !p.transpose_a) {
    const RowProduct product{p.m, p.n, p.k, p.transpose_b, {const_cast<Bfloat16*>(a), true}, {const_cast<Bfloat16*>(b), true}};
    if constexpr (kRounds) multiply_rows(product, nullptr, finish);
    else multiply_rows(product, y, finish);
    return true;
  }
  const Scratch<Y> wide_y(std::size_t(rows * p.n));
  if (!widened_product(p, a, b, target_of(y, wide_y))) return false;
  finish(0, rows, target_of(y, wide_y));
  return true;
}

}  // namespace

bool matmul(const Matmul& p, const Bfloat16* a, const Bfloat16* b, const float* bias, bool relu, float* y) {
  return product_of(p, a, b, bias, relu, y);
}

bool matmul(const Matmul& p, const Bfloat16* a, const Bfloat16* b, const float* bias, bool relu, Bfloat16* y) {
  return product_of(p, a, b, bias, relu, y);
}

bool multiplies_bfloat16() { return computed_type(true) == DataType::bf16; }

#else

bool matmul(const Matmul&, const float*, const float*, float*) { return false; }
bool matmul(const Matmul&, const Bfloat16*, const Bfloat16*, const float*, bool, float*) { return false; }
bool matmul(const Matmul&, const Bfloat16*, const Bfloat16*, const float*, bool, Bfloat16*) { return false; }
bool multiplies_bfloat16() { return false; }

#endif

}  // namespace singa_lite
