// SPDX-License-Identifier: Apache-2.0
#include "kernels/matmul.h"

#include <algorithm>
#include <type_traits>

#include "kernels/elementwise.h"
#include "kernels/onednn.h"
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
  dnnl::post_ops after;
  if (types.relu) after.append_eltwise(dnnl::algorithm::eltwise_relu, 0, 0);
  dnnl::primitive_attr attributes;
  attributes.set_post_ops(after);
  const dnnl::matmul::primitive_desc pd(onednn_engine(), a_md, b_md, bias_md, y_md, attributes);
  std::vector<OnednnCall::Slot> slots{{DNNL_ARG_SRC, a_md, a_md, false},
                                {DNNL_ARG_WEIGHTS, b_md, b_md, false},
                                {DNNL_ARG_DST, y_md, y_md, true}};
  if (types.has_bias) slots.push_back({DNNL_ARG_BIAS, bias_md, bias_md, false});
  return OnednnCall(dnnl::matmul(pd), std::move(slots));
}

bool run(const Matmul& p, const Types& t, const void* a, const void* b, const float* bias, void* y) {
  const auto call = cached_call({kKind, p.batch, p.m, p.n, p.k, p.transpose_a, p.transpose_b, t.has_bfloat16,
                                 t.gives_bfloat16, t.has_bias, t.relu},
                                [&] { return make(p, t); });
  if (!call) return false;
  call->run({a, b, y, bias});
  return true;
}

}  // namespace

bool matmul(const Matmul& p, const float* a, const float* b, float* y) {
  if (p.batch == 1) {  // sgemm: no primitive to look up
    note_parallel_region(num_threads());  // and its threads are ours to report, see Note [fork]
    return dnnl_sgemm(p.transpose_a ? 'T' : 'N', p.transpose_b ? 'T' : 'N', p.m, p.n, p.k, 1.0f, a,
                      p.transpose_a ? p.m : p.k, b, p.transpose_b ? p.k : p.n, 0.0f, y, p.n) == dnnl_success;
  }
  return run(p, {}, a, b, nullptr, y);
}

namespace {

constexpr std::int64_t kRowsAtOnce = 512;

// The product of bfloat16 numbers, or of the same ones widened, see Note [bfloat16 products] in onednn.h.
template <class Y>
bool product_of(const Matmul& p, const Bfloat16* a, const Bfloat16* b, const float* bias, bool relu, Y* y) {
  constexpr bool kRounds = std::is_same_v<Y, Bfloat16>;
  if (multiplies_bfloat16()) return run(p, {true, kRounds, bias != nullptr, relu}, a, b, bias, y);
  Matmul part = p;  // some rows of y at a time, so that what is widened stays in a cache
  const bool is_cut = p.batch == 1 && !p.transpose_a;
  const std::int64_t most = is_cut ? std::min(p.m, kRowsAtOnce) : p.m;
  const auto in_b = std::size_t(p.batch * p.k * p.n), columns = std::size_t(p.n);
  const Scratch<Bfloat16> wide_a(std::size_t(p.batch * most * p.k)), wide_b(in_b);
  const Scratch<Y> wide_y(std::size_t(p.batch * most) * columns);
  from_bfloat16(b, wide_b.data(), in_b);
  for (std::int64_t start = 0; start < p.m; start += most) {
    part.m = std::min(most, p.m - start);
    const auto rows = std::size_t(p.batch * part.m);
    Y* const part_y = y + start * p.n;
    float* const to = target_of(part_y, wide_y);
    from_bfloat16(a + start * p.k, wide_a.data(), rows * std::size_t(p.k));
    if (!matmul(part, wide_a.data(), wide_b.data(), to)) return false;
    if (bias || relu) add_row(bias, relu, to, rows, columns);
    if constexpr (kRounds) to_bfloat16(to, part_y, rows * columns);
  }
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
