// SPDX-License-Identifier: Apache-2.0
// attention of recorded steps: for each row of scores its log of the sum of exponentials is kept, from which the gradient
// computes a block of probabilities again. Causal blocks that are all masked are left out.
//
// block_attention: (inputs of attention) -> (y, logsumexp (batch, heads, queries)).
// block_attention_backward: (dy, logsumexp, inputs of attention) -> their gradients.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/attention.h"
#include "kernels/clones.h"
#include "kernels/registry.h"
#include "kernels/threads.h"
#include "kernels/tiles.h"
#include "kernels/vector_math.h"

namespace singa_lite {
namespace block_attention_loops {

// Note [whole vectors]: rows of scores have room for a multiple of kPanel, so that no loop has a rest, which would be
// computed one by one and take longer than all before it. What is masked, of the last kPanel elements alone, takes part as
// if its probability were 1, as the exponential of a small number would be subnormal and slow, and is 0 in the end.

// What is masked becomes `value`.
ALWAYS_INLINE void mask(float* row, std::size_t seen, std::size_t count, float value) {
  float* const last = row + (count - std::size_t(kPanel));
  const int left = int(seen) - int(count - std::size_t(kPanel));
  for (int i = 0; i < int(kPanel); ++i) last[i] = i < left ? last[i] : value;
}

// row = e^(scale * row - the largest of them), 0 behind `seen`; returns the sum. See Note [whole vectors].
CLONES float powers(float* row, float scale, std::size_t seen, std::size_t count, float* largest) {
  float most = row[0], total = 0;
  mask(row, seen, count, most);
#pragma omp simd reduction(max : most)
  for (std::size_t i = 0; i < count; ++i) most = row[i] > most ? row[i] : most;
  for (std::size_t i = 0; i < count; ++i) row[i] = vector_math::exp((row[i] - most) * scale);
  mask(row, seen, count, 0);
#pragma omp simd reduction(+ : total)
  for (std::size_t i = 0; i < count; ++i) total += row[i];
  *largest = most * scale;
  return total;
}

// to = factor * from, of rows; not memcpy, whose calls for few elements take longer.
CLONES void multiply(const float* from, std::int64_t from_step, float factor, float* to, std::int64_t to_step,
                     std::int64_t rows, std::int64_t count) {
  for (std::int64_t row = 0; row < rows; ++row, from += from_step, to += to_step)
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) to[i] = from[i] * factor;
}

// From scores and the gradient of their probabilities: the probabilities, and the gradient of the scores; 0 behind `seen`.
CLONES void backward(float* scores, float* grads, float scale, float logsumexp, std::size_t seen, std::size_t count) {
  mask(scores, seen, count, logsumexp / scale);
  mask(grads, seen, count, 0);
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (std::size_t i = 0; i < count; ++i) {
    scores[i] = vector_math::exp(scores[i] * scale - logsumexp);
    total += scores[i] * grads[i];
  }
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) grads[i] = scores[i] * (grads[i] - total) * scale;
  mask(scores, seen, count, 0);
  mask(grads, seen, count, 0);
}

}  // namespace block_attention_loops

namespace {

constexpr std::int64_t kQueries = 32;  // rows of a block of scores: with 32, 5/8 of a causal sequence of 128 is computed

// Memory of a thread, in parts that begin with a cache line.
class Scratch {
 public:
  explicit Scratch(std::initializer_list<std::size_t> sizes) {
    std::size_t all = kLine;
    for (const std::size_t size : sizes) all += rounded(size);
    memory_.resize(all);
    next_ = memory_.data() + (kLine - reinterpret_cast<std::uintptr_t>(memory_.data()) / sizeof(float) % kLine) % kLine;
  }
  float* take(std::size_t size) {
    float* const part = next_;
    next_ += rounded(size);
    return part;
  }

 private:
  static constexpr std::size_t kLine = 16;  // floats
  static std::size_t rounded(std::size_t size) { return (size + kLine - 1) / kLine * kLine; }

  std::vector<float> memory_;
  float* next_;
};

// For each sample and head, with scratch of these sizes for each thread: body(sample, head, scratch parts...).
template <class Body>
void for_heads(const Attention& p, std::initializer_list<std::size_t> sizes, const Body& body) {
  parallel_for(std::size_t(p.batch * p.heads), std::size_t(p.queries * p.keys * p.d),
               [&](std::size_t begin, std::size_t end) {
                 Scratch scratch(sizes);
                 std::vector<float*> parts;
                 for (const std::size_t size : sizes) parts.push_back(scratch.take(size));
                 for (auto i = std::int64_t(begin); i < std::int64_t(end); ++i)
                   body(i / p.heads, i % p.heads, parts.data());
               });
}

std::int64_t padded(std::int64_t count) { return (count + kPanel - 1) / kPanel * kPanel; }

Matrix rows_of(const Part& part, std::int64_t start) { return {part.row(start), part.step, 1}; }
Matrix columns_of(const Part& part) { return {part.data, 1, part.step}; }

void forward(const Attention& p, float* y, float* logsumexp) {
  const std::int64_t width = p.heads * p.d, step = padded(p.keys);
  const std::initializer_list<std::size_t> sizes = {panel_floats(p.d, p.keys), panel_floats(p.keys, p.d),
                                                    std::size_t(kQueries * step), std::size_t(kQueries)};
  for_heads(p, sizes, [&](std::int64_t batch, std::int64_t head, float* const* scratch) {
    float *keys = scratch[0], *values = scratch[1], *scores = scratch[2], *totals = scratch[3];
    const Part q = p.q.of(batch, head, p.d);
    float* to = y + batch * p.queries * width + head * p.d;
    float* logs = logsumexp + (batch * p.heads + head) * p.queries;
    pack_panels(columns_of(p.k.of(batch, head, p.d)), p.d, p.keys, keys);
    pack_panels(rows_of(p.v.of(batch, head, p.d), 0), p.keys, p.d, values);
    for (std::int64_t start = 0; start < p.queries; start += kQueries) {
      const std::int64_t rows = std::min(kQueries, p.queries - start), seen = p.seen(start + rows);
      multiply_panels(rows_of(q, start), {keys, p.d}, rows, padded(seen), p.d, false, scores, step);
      for (std::int64_t row = 0; row < rows; ++row) {
        float largest;
        totals[row] = block_attention_loops::powers(scores + row * step, p.scale, std::size_t(p.seen(start + row + 1)),
                                                    std::size_t(padded(seen)), &largest);
        logs[start + row] = largest + std::log(totals[row]);
      }
      multiply_panels({scores, step, 1}, {values, p.keys}, rows, p.d, seen, false, to + start * width, width);
      for (std::int64_t row = 0; row < rows; ++row)
        block_attention_loops::multiply(to + (start + row) * width, width, 1 / totals[row], to + (start + row) * width, width,
                                        1, p.d);
    }
  });
}

// The queries of a causal head from the last ones on: those reach all keys, whose gradients are then set, not added to.
void backward(const Attention& p, const Attention& grads, const float* dy, const float* logsumexp) {
  const std::int64_t width = p.heads * p.d, step = padded(p.keys);
  const std::size_t across = panel_floats(p.d, p.keys), along = panel_floats(p.keys, p.d),
                    block = std::size_t(kQueries * step), few = panel_floats(kQueries, p.d),
                    sums = std::size_t(p.keys * p.d);
  for_heads(p, {across, across, along, block, block, few, sums, sums}, [&](std::int64_t batch, std::int64_t head,
                                                                          float* const* scratch) {
    float *keys = scratch[0], *values = scratch[1], *key_rows = scratch[2], *scores = scratch[3],
          *dscores = scratch[4], *right = scratch[5], *dk = scratch[6], *dv = scratch[7];
    const Part q = p.q.of(batch, head, p.d), k = p.k.of(batch, head, p.d), dq = grads.q.of(batch, head, p.d);
    const float* from = dy + batch * p.queries * width + head * p.d;
    const float* logs = logsumexp + (batch * p.heads + head) * p.queries;
    pack_panels(columns_of(k), p.d, p.keys, keys);
    pack_panels(columns_of(p.v.of(batch, head, p.d)), p.d, p.keys, values);
    pack_panels(rows_of(k, 0), p.keys, p.d, key_rows);
    bool adds = false;
    for (std::int64_t start = (p.queries - 1) / kQueries * kQueries; start >= 0; start -= kQueries) {
      const std::int64_t rows = std::min(kQueries, p.queries - start), seen = p.seen(start + rows);
      const Matrix dys = {from + start * width, width, 1};
      multiply_panels(rows_of(q, start), {keys, p.d}, rows, padded(seen), p.d, false, scores, step);
      multiply_panels(dys, {values, p.d}, rows, padded(seen), p.d, false, dscores, step);
      for (std::int64_t row = 0; row < rows; ++row)
        block_attention_loops::backward(scores + row * step, dscores + row * step, p.scale, logs[start + row],
                                        std::size_t(p.seen(start + row + 1)), std::size_t(padded(seen)));
      multiply_panels({dscores, step, 1}, {key_rows, p.keys}, rows, p.d, seen, false, dq.row(start), dq.step);
      pack_panels(rows_of(q, start), rows, p.d, right);
      multiply_panels({dscores, 1, step}, {right, rows}, seen, p.d, rows, adds, dk, p.d);
      pack_panels(dys, rows, p.d, right);
      multiply_panels({scores, 1, step}, {right, rows}, seen, p.d, rows, adds, dv, p.d);
      adds = true;
    }
    const Part to_k = grads.k.of(batch, head, p.d), to_v = grads.v.of(batch, head, p.d);
    block_attention_loops::multiply(dk, p.d, 1, to_k.data, to_k.step, p.keys, p.d);
    block_attention_loops::multiply(dv, p.d, 1, to_v.data, to_v.step, p.keys, p.d);
  });
}

Shape kept_shape(const Attention& p) { return {p.batch, p.heads, p.queries}; }

const Registration attention("block_attention", attention_forward(kept_shape, forward));
const Registration attention_backward("block_attention_backward", attention_gradient(kept_shape, backward));

}  // namespace
}  // namespace singa_lite
