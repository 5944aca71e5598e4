// SPDX-License-Identifier: Apache-2.0
// attention and its gradient: products by oneDNN, straight from and into the packed projections where they are float32. Where
// they are bfloat16, and the probabilities with them, blocks of a head are widened and rounded.
#include <algorithm>
#include <cmath>

#include "kernels/attention.h"
#include "kernels/clones.h"
#include "kernels/onednn.h"
#include "kernels/registry.h"
#include "kernels/threads.h"
#include "kernels/vector_math.h"

#ifdef SINGA_LITE_ONEDNN
namespace singa_lite {
namespace attention_loops {

// The softmax of a row in place, followed by zeros.
CLONES void softmax(float* row, std::size_t seen, std::size_t count) {
  float most = row[0], total = 0;
#pragma omp simd reduction(max : most)
  for (std::size_t i = 0; i < seen; ++i) most = row[i] > most ? row[i] : most;
#pragma omp simd reduction(+ : total)
  for (std::size_t i = 0; i < seen; ++i) {
    row[i] = vector_math::exp(row[i] - most);
    total += row[i];
  }
  const float factor = 1 / total;
  for (std::size_t i = 0; i < seen; ++i) row[i] *= factor;
  for (std::size_t i = seen; i < count; ++i) row[i] = 0;
}

// dy = y (dy - sum of dy y), in place
CLONES void softmax_backward(float* dy, const float* y, std::size_t count) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (std::size_t i = 0; i < count; ++i) total += dy[i] * y[i];
  for (std::size_t i = 0; i < count; ++i) dy[i] = y[i] * (dy[i] - total);
}

}  // namespace attention_loops

namespace {

constexpr std::int64_t kQueries = 64;  // rows of scores that are computed at a time: they stay in the second cache

// c = factor a b + kept c, where a or b may be transposed; inside a parallel region it uses one thread.
void multiply(char transpose_a, char transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, float factor,
              const float* a, std::int64_t a_step, const float* b, std::int64_t b_step, float kept, float* c,
              std::int64_t c_step) {
  dnnl_sgemm(transpose_a, transpose_b, m, n, k, factor, a, a_step, b, b_step, kept, c, c_step);
}

template <class T>
struct KeptAttention {
  static Shape kept_shape(const Attention<T>& p) { return {p.batch, p.heads, p.queries, p.keys}; }

  static void forward(const Attention<T>& p, T* y, T* probabilities) {
    const std::int64_t width = p.heads * p.d;
    const std::size_t of_keys = room_for<T>(p.keys, p.d), of_block = room_for<T>(kQueries, p.d);
    note_parallel_region(num_threads());
    for_heads(p, {of_keys, of_keys, of_block, of_block, room_for<T>(kQueries, p.keys)},
              [&](std::int64_t batch, std::int64_t head, float* const* room) {
      const Part<T> q = p.q.of(batch, head, p.d), to{y + batch * p.queries * width + head * p.d, width, 0},
                    weights{probabilities + (batch * p.heads + head) * p.queries * p.keys, p.keys, 0};
      const Part<float> k = floats_of(p.k.of(batch, head, p.d), 0, p.keys, p.d, room[0]),
                        v = floats_of(p.v.of(batch, head, p.d), 0, p.keys, p.d, room[1]);
      for (std::int64_t start = 0; start < p.queries; start += kQueries) {
        const std::int64_t rows = std::min(kQueries, p.queries - start), seen = p.seen(start + rows);
        const Part<float> from = floats_of(q, start, rows, p.d, room[2]), block = target_of(to, start, p.d, room[3]),
                          scores = target_of(weights, start, p.keys, room[4]);
        multiply('N', 'T', rows, seen, p.d, p.scale, from.data, from.step, k.data, k.step, 0, scores.data, p.keys);
        for (std::int64_t row = 0; row < rows; ++row)
          attention_loops::softmax(scores.row(row), std::size_t(p.seen(start + row + 1)), std::size_t(p.keys));
        multiply('N', 'N', rows, p.d, seen, 1, scores.data, p.keys, v.data, v.step, 0, block.data, block.step);
        round(scores, weights, start, rows, p.keys);
        round(block, to, start, rows, p.d);
      }
    });
  }

  // The queries of a causal head from the last ones on: those reach all keys, whose gradients are then set, not added to.
  static void backward(const Attention<T>& p, const Attention<T>& grads, const T* dy, const T* probabilities) {
    const std::int64_t width = p.heads * p.d;
    const std::size_t of_keys = room_for<T>(p.keys, p.d), of_block = room_for<T>(kQueries, p.d);
    note_parallel_region(num_threads());
    for_heads(p, {of_keys, of_keys, of_keys, of_keys, of_block, of_block, of_block, room_for<T>(kQueries, p.keys),
                  std::size_t(kQueries * p.keys)},
              [&](std::int64_t batch, std::int64_t head, float* const* room) {
      const Part<T> q = p.q.of(batch, head, p.d), to_q = grads.q.of(batch, head, p.d),
                    to_k = grads.k.of(batch, head, p.d), to_v = grads.v.of(batch, head, p.d),
                    grad{const_cast<T*>(dy) + batch * p.queries * width + head * p.d, width, 0},
                    weights{const_cast<T*>(probabilities) + (batch * p.heads + head) * p.queries * p.keys, p.keys, 0};
      const Part<float> k = floats_of(p.k.of(batch, head, p.d), 0, p.keys, p.d, room[0]),
                        v = floats_of(p.v.of(batch, head, p.d), 0, p.keys, p.d, room[1]),
                        dk = target_of(to_k, 0, p.d, room[2]), dv = target_of(to_v, 0, p.d, room[3]);
      float* const dscores = room[8];
      float kept = 0;
      for (std::int64_t start = (p.queries - 1) / kQueries * kQueries; start >= 0; start -= kQueries) {
        const std::int64_t rows = std::min(kQueries, p.queries - start), seen = p.seen(start + rows);
        const Part<float> from = floats_of(q, start, rows, p.d, room[4]), dys = floats_of(grad, start, rows, p.d, room[5]),
                          dq = target_of(to_q, start, p.d, room[6]),
                          y = floats_of(weights, start, rows, p.keys, room[7]);
        multiply('N', 'T', rows, seen, p.d, 1, dys.data, dys.step, v.data, v.step, 0, dscores, seen);
        for (std::int64_t row = 0; row < rows; ++row)
          attention_loops::softmax_backward(dscores + row * seen, y.row(row), std::size_t(seen));
        multiply('N', 'N', rows, p.d, seen, p.scale, dscores, seen, k.data, k.step, 0, dq.data, dq.step);
        multiply('T', 'N', seen, p.d, rows, p.scale, dscores, seen, from.data, from.step, kept, dk.data, dk.step);
        multiply('T', 'N', seen, p.d, rows, 1, y.data, p.keys, dys.data, dys.step, kept, dv.data, dv.step);
        round(dq, to_q, start, rows, p.d);
        kept = 1;
      }
      round(dk, to_k, 0, p.keys, p.d);
      round(dv, to_v, 0, p.keys, p.d);
    });
  }
};

const Registration attention("attention", [](const Call& call) -> Step {
  if (const Step step = attention_forward<float, float, KeptAttention<float>>(call)) return step;
  return attention_forward<Bfloat16, Bfloat16, KeptAttention<Bfloat16>>(call);
});

const Registration attention_backward("attention_backward", [](const Call& call) -> Step {
  if (const Step step = attention_gradient<float, float, KeptAttention<float>>(call)) return step;
  return attention_gradient<Bfloat16, Bfloat16, KeptAttention<Bfloat16>>(call);
});

}  // namespace
}  // namespace singa_lite
#endif
