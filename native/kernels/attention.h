// SPDX-License-Identifier: Apache-2.0
// What calls of attention and its gradient mean: where queries, keys and values are in the arrays of projections.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/registry.h"

namespace singa_lite {

// A matrix of one sample and head: rows of d elements, `step` apart, inside a projection.
struct Part {
  float* data = nullptr;
  std::int64_t step = 0;
  std::int64_t sample = 0;  // elements from one sample to the next

  Part of(std::int64_t batch, std::int64_t head, std::int64_t d) const {
    return {data + batch * sample + head * d, step, sample};
  }
  float* row(std::int64_t number) const { return data + number * step; }
};

struct Attention {
  std::int64_t batch = 0, heads = 0, queries = 0, keys = 0, d = 0;
  bool is_causal = false;
  Part q, k, v;     // inputs, or their gradients
  float scale = 1;  // of scores

  // Keys that the queries before `end` see.
  std::int64_t seen(std::int64_t end) const { return is_causal ? std::min(end, keys) : keys; }

  // Read the options of a call, and where the projections are in arrays[first] and, if there are two, the next; false if
  // these are not those of attention.
  bool read(const Call& call, const std::vector<View>& arrays, std::size_t first) {
    if (!call.has_numbers({"num_heads", "causal"})) return false;
    heads = std::int64_t(call.number("num_heads"));
    is_causal = call.number("causal") != 0;
    const std::size_t count = arrays.size() - first;
    if (count != 1 && count != 2) return false;
    const View &x = arrays[first], &memory = arrays.back();
    if (x.ndim() != 3 || memory.ndim() != 3 || x.size() == 0 || memory.size() == 0) return false;
    const std::int64_t columns = x.shape[2], width = count == 1 ? columns / 3 : columns;
    if (count == 1 ? columns % 3 != 0 : memory.shape[2] != 2 * width || memory.shape[0] != x.shape[0]) return false;
    if (heads < 1 || width % heads) return false;
    batch = x.shape[0];
    queries = x.shape[1];
    keys = memory.shape[1];
    d = width / heads;
    scale = float(1 / std::sqrt(double(d)));
    const std::int64_t step = memory.shape[2], sample = step * keys;
    float* from = memory.floats() + (count == 1 ? width : 0);
    q = {x.floats(), columns, columns * queries};
    k = {from, step, sample};
    v = {from + width, step, sample};
    return true;
  }

  bool fits(const View& y, const View& kept, const Shape& kept_shape) const {
    return y.shape == Shape{batch, queries, heads * d} && kept.shape == kept_shape && (!is_causal || queries == keys);
  }
};

// The kernel (projections) -> (y, what `forward` keeps for the gradient, whose shape `kept_shape` gives).
inline Prepare attention_forward(Shape (*kept_shape)(const Attention&),
                                 void (*forward)(const Attention& p, float* y, float* kept)) {
  return [=](const Call& call) -> Step {
    Attention p;
    if (!call.are_floats(call.inputs.size(), 2) || !p.read(call, call.inputs, 0)) return {};
    if (!p.fits(call.outputs[0], call.outputs[1], kept_shape(p))) return {};
    return [p, forward, y = call.outputs[0].floats(), kept = call.outputs[1].floats()] {
      forward(p, y, kept);
      return true;
    };
  };
}

// The kernel (dy, kept, projections) -> (gradients of the projections).
inline Prepare attention_gradient(Shape (*kept_shape)(const Attention&),
                                  void (*backward)(const Attention& p, const Attention& grads, const float* dy,
                                                   const float* kept)) {
  return [=](const Call& call) -> Step {
    Attention p, grads;
    if (call.inputs.size() < 3 || !call.are_floats(call.inputs.size(), call.inputs.size() - 2)) return {};
    if (!p.read(call, call.inputs, 2) || !grads.read(call, call.outputs, 0)) return {};
    for (std::size_t i = 0; i < call.outputs.size(); ++i)
      if (call.outputs[i].shape != call.inputs[i + 2].shape) return {};
    if (!p.fits(call.inputs[0], call.inputs[1], kept_shape(p))) return {};
    return [p, grads, backward, dy = call.inputs[0].floats(), kept = call.inputs[1].floats()] {
      backward(p, grads, dy, kept);
      return true;
    };
  };
}

}  // namespace singa_lite
