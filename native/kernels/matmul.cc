// SPDX-License-Identifier: Apache-2.0
#include "kernels/matmul.h"

#include "kernels/onednn.h"
#include "kernels/threads.h"

namespace singa_lite {

#ifdef SINGA_LITE_ONEDNN
namespace {

constexpr std::int64_t kKind = 1;  // in the keys of calls; conv.h has 2 to 4, a reorder 5

OnednnCall make(const Matmul& p) {
  const auto type = dnnl::memory::data_type::f32;
  const Dims a_strides = p.transpose_a ? Dims{p.m * p.k, 1, p.m} : Dims{p.m * p.k, p.k, 1};
  const Dims b_strides = p.transpose_b ? Dims{p.k * p.n, 1, p.k} : Dims{p.k * p.n, p.n, 1};
  const dnnl::memory::desc a({p.batch, p.m, p.k}, type, a_strides), b({p.batch, p.k, p.n}, type, b_strides),
      y({p.batch, p.m, p.n}, type, Dims{p.m * p.n, p.n, 1});
  auto flat = [&](const dnnl::memory::desc& md, std::int64_t rows, std::int64_t columns) {
    return p.batch == 1 ? md.reshape({rows, columns}) : md;
  };
  const auto a_md = flat(a, p.m, p.k), b_md = flat(b, p.k, p.n), y_md = flat(y, p.m, p.n);
  const dnnl::matmul::primitive_desc pd(onednn_engine(), a_md, b_md, y_md);
  return OnednnCall(dnnl::matmul(pd), {{DNNL_ARG_SRC, a_md, a_md, false},
                                 {DNNL_ARG_WEIGHTS, b_md, b_md, false},
                                 {DNNL_ARG_DST, y_md, y_md, true}});
}

}  // namespace

bool matmul(const Matmul& p, const float* a, const float* b, float* y) {
  if (p.batch == 1) {  // sgemm: no primitive to look up
    note_parallel_region(num_threads());  // and its threads are ours to report, see Note [fork]
    return dnnl_sgemm(p.transpose_a ? 'T' : 'N', p.transpose_b ? 'T' : 'N', p.m, p.n, p.k, 1.0f, a,
                      p.transpose_a ? p.m : p.k, b, p.transpose_b ? p.k : p.n, 0.0f, y, p.n) == dnnl_success;
  }
  const auto call =
      cached_call({kKind, p.batch, p.m, p.n, p.k, p.transpose_a, p.transpose_b}, [&] { return make(p); });
  if (!call) return false;
  call->run({a, b, y});
  return true;
}

#else

bool matmul(const Matmul&, const float*, const float*, float*) { return false; }

#endif

}  // namespace singa_lite
