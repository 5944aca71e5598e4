// SPDX-License-Identifier: Apache-2.0
// attention and its gradient for float32: products by oneDNN, straight from and into the packed projections.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

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

// For each sample and head.
template <class Body>
void for_heads(const Attention& p, const Body& body) {
  note_parallel_region(num_threads());
  parallel_for(std::size_t(p.batch * p.heads), std::size_t(p.queries * p.keys * p.d),
               [&](std::size_t begin, std::size_t end) {
                 for (auto i = std::int64_t(begin); i < std::int64_t(end); ++i) body(i / p.heads, i % p.heads);
               });
}

void forward(const Attention& p, float* y, float* probabilities) {
  const std::int64_t width = p.heads * p.d;
  for_heads(p, [&](std::int64_t batch, std::int64_t head) {
    const Part q = p.q.of(batch, head, p.d), k = p.k.of(batch, head, p.d), v = p.v.of(batch, head, p.d);
    float* weights = probabilities + (batch * p.heads + head) * p.queries * p.keys;
    float* to = y + batch * p.queries * width + head * p.d;
    for (std::int64_t start = 0; start < p.queries; start += kQueries) {
      const std::int64_t rows = std::min(kQueries, p.queries - start), seen = p.seen(start + rows);
      float* scores = weights + start * p.keys;
      multiply('N', 'T', rows, seen, p.d, p.scale, q.row(start), q.step, k.data, k.step, 0, scores, p.keys);
      for (std::int64_t row = 0; row < rows; ++row)
        attention_loops::softmax(scores + row * p.keys, std::size_t(p.seen(start + row + 1)), std::size_t(p.keys));
      multiply('N', 'N', rows, p.d, seen, 1, scores, p.keys, v.data, v.step, 0, to + start * width, width);
    }
  });
}

// The queries of a causal head from the last ones on: those reach all keys, whose gradients are then set, not added to.
void backward(const Attention& p, const Attention& grads, const float* dy, const float* probabilities) {
  const std::int64_t width = p.heads * p.d;
  for_heads(p, [&](std::int64_t batch, std::int64_t head) {
    const Part q = p.q.of(batch, head, p.d), k = p.k.of(batch, head, p.d), v = p.v.of(batch, head, p.d);
    const Part dq = grads.q.of(batch, head, p.d), dk = grads.k.of(batch, head, p.d),
               dv = grads.v.of(batch, head, p.d);
    const float* weights = probabilities + (batch * p.heads + head) * p.queries * p.keys;
    const float* from = dy + batch * p.queries * width + head * p.d;
    const std::unique_ptr<float[]> scratch(new float[std::size_t(kQueries * p.keys)]);
    float* dscores = scratch.get();
    float kept = 0;
    for (std::int64_t start = (p.queries - 1) / kQueries * kQueries; start >= 0; start -= kQueries) {
      const std::int64_t rows = std::min(kQueries, p.queries - start), seen = p.seen(start + rows);
      const float *y = weights + start * p.keys, *dys = from + start * width;
      multiply('N', 'T', rows, seen, p.d, 1, dys, width, v.data, v.step, 0, dscores, seen);
      for (std::int64_t row = 0; row < rows; ++row)
        attention_loops::softmax_backward(dscores + row * seen, y + row * p.keys, std::size_t(seen));
      multiply('N', 'N', rows, p.d, seen, p.scale, dscores, seen, k.data, k.step, 0, dq.row(start), dq.step);
      multiply('T', 'N', seen, p.d, rows, p.scale, dscores, seen, q.row(start), q.step, kept, dk.data, dk.step);
      multiply('T', 'N', seen, p.d, rows, 1, y, p.keys, dys, width, kept, dv.data, dv.step);
      kept = 1;
    }
  });
}

Shape kept_shape(const Attention& p) { return {p.batch, p.heads, p.queries, p.keys}; }

const Registration attention("attention", attention_forward(kept_shape, forward));
const Registration attention_backward("attention_backward", attention_gradient(kept_shape, backward));

}  // namespace
}  // namespace singa_lite
#endif
