// SPDX-License-Identifier: Apache-2.0
// attention and its gradient by blocks of queries, whose probabilities the gradient computes again. Causal blocks that are
// all masked are left out. Projections, y and their gradients are float32, or bfloat16, which a block or a head at a time is
// widened and rounded: all between them is float32.
#include <algorithm>

#include "kernels/attention.h"
#include "kernels/clones.h"
#include "kernels/registry.h"
#include "kernels/tiles.h"
#include "kernels/vector_math.h"
#include "kernels/widen.h"

namespace singa_lite {
namespace attention_loops {

// Note [whole vectors]: rows of scores have room for a multiple of kPanel, so that no loop has a rest, which would be
// computed one by one and take longer than all before it. What is masked, of the last kPanel elements alone, has the largest
// score before the exponential, as that of a small number would be subnormal and slow, and is 0 behind it.

// What is masked becomes `value`.
ALWAYS_INLINE void mask(float* row, std::size_t seen, std::size_t count, float value) {
  float* const last = row + (count - std::size_t(kPanel));
  const int left = int(seen) - int(count - std::size_t(kPanel));
  for (int i = 0; i < int(kPanel); ++i) last[i] = i < left ? last[i] : value;
}

// row = e^(scale * row - the largest of them), 0 behind `seen`; returns the sum. See Note [whole vectors].
CLONES float powers(float* row, float scale, std::size_t seen, std::size_t count) {
  float most = row[0], total = 0;
  mask(row, seen, count, most);
#pragma omp simd reduction(max : most)
  for (std::size_t i = 0; i < count; ++i) most = row[i] > most ? row[i] : most;
  for (std::size_t i = 0; i < count; ++i) row[i] = vector_math::exp((row[i] - most) * scale);
  mask(row, seen, count, 0);
#pragma omp simd reduction(+ : total)
  for (std::size_t i = 0; i < count; ++i) total += row[i];
  return total;
}

// to = factor * from, of rows; not memcpy, whose calls for few elements take longer.
CLONES void multiply(const float* from, std::int64_t from_step, float factor, float* to, std::int64_t to_step,
                     std::int64_t rows, std::int64_t count) {
  for (std::int64_t row = 0; row < rows; ++row, from += from_step, to += to_step)
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) to[i] = from[i] * factor;
}

// From powers, which add up to `sum`, and the gradient of probabilities: these, and the gradient of scores, 0 behind `seen`.
CLONES void backward(float* powers, float* grads, float scale, float sum, std::size_t seen, std::size_t count) {
  const float factor = 1 / sum;
  float total = 0;
  mask(grads, seen, count, 0);
#pragma omp simd reduction(+ : total)
  for (std::size_t i = 0; i < count; ++i) {
    powers[i] *= factor;
    total += powers[i] * grads[i];
  }
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) grads[i] = powers[i] * (grads[i] - total) * scale;
  mask(grads, seen, count, 0);
}

}  // namespace attention_loops

namespace {

constexpr std::int64_t kQueries = 32;  // rows of a block of scores: with 32, 5/8 of a causal sequence of 128 is computed

std::int64_t padded(std::int64_t count) { return (count + kPanel - 1) / kPanel * kPanel; }

Matrix rows_of(const Part<float>& part) { return {part.data, part.step, 1}; }
Matrix columns_of(const Part<float>& part) { return {part.data, 1, part.step}; }

// to = rows of d floats.
void store(const float* from, const Part<float>& to, std::int64_t rows, std::int64_t d) {
  attention_loops::multiply(from, d, 1, to.data, to.step, rows, d);
}
void store(const float* from, const Part<Bfloat16>& to, std::int64_t rows, std::int64_t d) {
  narrow_rows(from, d, to.data, to.step, rows, d);
}

template <class T>
void forward(const Attention<T>& p, T* y) {
  const std::int64_t width = p.heads * p.d, step = padded(p.keys);
  const std::size_t of_block = room_for<T>(kQueries, p.d);
  const std::initializer_list<std::size_t> sizes = {
      panel_floats(p.d, p.keys), panel_floats(p.keys, p.d), std::size_t(kQueries * step), std::size_t(kQueries),
      room_for<T>(p.keys, p.d), of_block, of_block};
  for_heads(p, sizes, [&](std::int64_t batch, std::int64_t head, float* const* scratch) {
    float *keys = scratch[0], *values = scratch[1], *scores = scratch[2], *totals = scratch[3];
    const Part<T> q = p.q.of(batch, head, p.d), to{y + batch * p.queries * width + head * p.d, width, 0};
    pack_panels(columns_of(floats_of(p.k.of(batch, head, p.d), 0, p.keys, p.d, scratch[4])), p.d, p.keys, keys);
    pack_panels(rows_of(floats_of(p.v.of(batch, head, p.d), 0, p.keys, p.d, scratch[4])), p.keys, p.d, values);
    for (std::int64_t start = 0; start < p.queries; start += kQueries) {
      const std::int64_t rows = std::min(kQueries, p.queries - start), seen = p.seen(start + rows);
      const Matrix queries = rows_of(floats_of(q, start, rows, p.d, scratch[5]));
      multiply_panels(queries, {keys, p.d}, rows, padded(seen), p.d, false, scores, step);
      for (std::int64_t row = 0; row < rows; ++row)
        totals[row] = attention_loops::powers(scores + row * step, p.scale, std::size_t(p.seen(start + row + 1)),
                                              std::size_t(padded(seen)));
      const Part<float> block = target_of(to, start, p.d, scratch[6]);
      multiply_panels({scores, step, 1}, {values, p.keys}, rows, p.d, seen, false, block.data, block.step);
      for (std::int64_t row = 0; row < rows; ++row)
        attention_loops::multiply(block.row(row), block.step, 1 / totals[row], block.row(row), block.step, 1, p.d);
      round(block, to, start, rows, p.d);
    }
  });
}

// The queries of a causal head from the last ones on: those reach all keys, whose gradients are then set, not added to.
template <class T>
void backward(const Attention<T>& p, const Attention<T>& grads, const T* dy) {
  const std::int64_t width = p.heads * p.d, step = padded(p.keys);
  const std::size_t across = panel_floats(p.d, p.keys), along = panel_floats(p.keys, p.d),
                    block = std::size_t(kQueries * step), few = panel_floats(kQueries, p.d),
                    sums = std::size_t(p.keys * p.d), of_block = room_for<T>(kQueries, p.d);
  const std::initializer_list<std::size_t> sizes = {across, across, along, block, block, few, sums, sums,
                                                    room_for<T>(p.keys, p.d), of_block, of_block, of_block};
  for_heads(p, sizes, [&](std::int64_t batch, std::int64_t head, float* const* scratch) {
    float *keys = scratch[0], *values = scratch[1], *key_rows = scratch[2], *scores = scratch[3],
          *dscores = scratch[4], *right = scratch[5], *dk = scratch[6], *dv = scratch[7];
    const Part<T> q = p.q.of(batch, head, p.d), dq = grads.q.of(batch, head, p.d),
                  from{const_cast<T*>(dy) + batch * p.queries * width + head * p.d, width, 0};
    const Part<float> v = floats_of(p.v.of(batch, head, p.d), 0, p.keys, p.d, scratch[8]);
    pack_panels(columns_of(v), p.d, p.keys, values);
    const Part<float> k = floats_of(p.k.of(batch, head, p.d), 0, p.keys, p.d, scratch[8]);
    pack_panels(columns_of(k), p.d, p.keys, keys);
    pack_panels(rows_of(k), p.keys, p.d, key_rows);
    bool adds = false;
    for (std::int64_t start = (p.queries - 1) / kQueries * kQueries; start >= 0; start -= kQueries) {
      const std::int64_t rows = std::min(kQueries, p.queries - start), seen = p.seen(start + rows);
      const Matrix dys = rows_of(floats_of(from, start, rows, p.d, scratch[9])),
                   queries = rows_of(floats_of(q, start, rows, p.d, scratch[10]));
      multiply_panels(queries, {keys, p.d}, rows, padded(seen), p.d, false, scores, step);
      multiply_panels(dys, {values, p.d}, rows, padded(seen), p.d, false, dscores, step);
      for (std::int64_t row = 0; row < rows; ++row) {
        const auto visible = std::size_t(p.seen(start + row + 1)), count = std::size_t(padded(seen));
        const float sum = attention_loops::powers(scores + row * step, p.scale, visible, count);
        attention_loops::backward(scores + row * step, dscores + row * step, p.scale, sum, visible, count);
      }
      const Part<float> to = target_of(dq, start, p.d, scratch[11]);
      multiply_panels({dscores, step, 1}, {key_rows, p.keys}, rows, p.d, seen, false, to.data, to.step);
      round(to, dq, start, rows, p.d);
      pack_panels(queries, rows, p.d, right);
      multiply_panels({dscores, 1, step}, {right, rows}, seen, p.d, rows, adds, dk, p.d);
      pack_panels(dys, rows, p.d, right);
      multiply_panels({scores, 1, step}, {right, rows}, seen, p.d, rows, adds, dv, p.d);
      adds = true;
    }
    store(dk, grads.k.of(batch, head, p.d), p.keys, p.d);
    store(dv, grads.v.of(batch, head, p.d), p.keys, p.d);
  });
}

// (projections) -> y
template <class T>
Step forward_step(const Call& call) {
  Attention<T> p;
  if (!call.are_operands(call.inputs.size(), 1) || !p.read(call, call.inputs, 0) || !p.fits(call.outputs[0])) return {};
  if (!are_arrays_of<T>(call.inputs) || !are_arrays_of<T>(call.outputs)) return {};
  return [p, y = static_cast<T*>(call.outputs[0].data)] {
    forward(p, y);
    return true;
  };
}

// (dy, projections) -> gradients of the projections
template <class T>
Step backward_step(const Call& call) {
  Attention<T> p, grads;
  const std::size_t count = call.inputs.size();
  if (count < 2 || !call.are_operands(count, count - 1)) return {};
  if (!are_arrays_of<T>(call.inputs) || !are_arrays_of<T>(call.outputs)) return {};
  if (!p.read(call, call.inputs, 1) || !grads.read(call, call.outputs, 0) || !p.fits(call.inputs[0])) return {};
  for (std::size_t i = 0; i < call.outputs.size(); ++i)
    if (call.outputs[i].shape != call.inputs[i + 1].shape) return {};
  return [p, grads, dy = static_cast<const T*>(call.inputs[0].data)] {
    backward(p, grads, dy);
    return true;
  };
}

const Registration attention("attention", [](const Call& call) -> Step {
  if (const Step step = forward_step<float>(call)) return step;
  return forward_step<Bfloat16>(call);
});

const Registration attention_backward("attention_backward", [](const Call& call) -> Step {
  if (const Step step = backward_step<float>(call)) return step;
  return backward_step<Bfloat16>(call);
});

}  // namespace
}  // namespace singa_lite
