// SPDX-License-Identifier: Apache-2.0
// The formulas of formulas.h: a loop for each, and running one on arrays that broadcast.
#include <algorithm>
#include <optional>

#include "kernels/clones.h"
#include "kernels/elementwise.h"
#include "kernels/registry.h"
#include "kernels/threads.h"
#include "kernels/vector_math.h"
#include "kernels/widen.h"

// inside of vector_math, so that formulas find its functions before those of <cmath>
namespace singa_lite::vector_math::formula_loops {

using A = float;
using Real = float;

// The numbers of a formula are the members of its struct behind the first one.
template <class F>
ALWAYS_INLINE F with_numbers(const float* numbers) {
  F formula{};
  if (sizeof(F) > sizeof(float))
    __builtin_memcpy(reinterpret_cast<float*>(&formula) + 1, numbers, sizeof(F) - sizeof(float));
  return formula;
}

// to[i] = f(...) for the inputs of all elements; to may be the first of them.
#define LOOP(name, call)                                                                                            \
  CLONES void name##_loop(const float* const* from, const float* numbers, float* to, std::size_t count) {          \
    const auto f = with_numbers<name##_formula>(numbers);                                                           \
    const float *first = from[0], *second = from[1], *third = from[2];                                              \
    (void)second, (void)third;                                                                                      \
    _Pragma("GCC ivdep") for (std::size_t i = 0; i < count; ++i) to[i] = call;                                      \
  }

#define UNARY(name, type, x, value, ...)                                                                      \
  struct name##_formula {                                                                                     \
    float unused_, ##__VA_ARGS__;                                                                             \
    ALWAYS_INLINE float operator()(float x) const { return value; }                                           \
  };                                                                                                          \
  LOOP(name, f(first[i]))

#define BINARY(name, type, a, b, value, ...)                                                                  \
  struct name##_formula {                                                                                     \
    float unused_, ##__VA_ARGS__;                                                                             \
    ALWAYS_INLINE float operator()(float a, float b) const { return value; }                                  \
  };                                                                                                          \
  LOOP(name, f(first[i], second[i]))

#define TERNARY(name, type, c, a, b, value, ...)                                                              \
  struct name##_formula {                                                                                     \
    float unused_, ##__VA_ARGS__;                                                                             \
    ALWAYS_INLINE float operator()(float c, float a, float b) const { return value; }                         \
  };                                                                                                          \
  LOOP(name, f(first[i], second[i], third[i]))

#include "formulas.h"
#undef UNARY
#undef BINARY
#undef TERNARY
#undef LOOP

}  // namespace singa_lite::vector_math::formula_loops

namespace singa_lite {

const std::vector<Formula>& formulas() {
  constexpr std::size_t A = 1, Real = 6;  // the cost by type: those with functions like exp are several times dearer
  // a lambda, because GCC 12 emits a cloned function twice whose address is in a constant
#define ENTRY(name, num_inputs, type, ...)                                          \
  {#name, num_inputs, #__VA_ARGS__, type,                                           \
   [](const float* const* from, const float* numbers, float* to, std::size_t count) { \
     vector_math::formula_loops::name##_loop(from, numbers, to, count);             \
   }},
#define UNARY(name, type, x, value, ...) ENTRY(name, 1, type, __VA_ARGS__)
#define BINARY(name, type, a, b, value, ...) ENTRY(name, 2, type, __VA_ARGS__)
#define TERNARY(name, type, c, a, b, value, ...) ENTRY(name, 3, type, __VA_ARGS__)
  static const std::vector<Formula> all = {
#include "formulas.h"
  };
  return all;
}

namespace {

// Call body(offsets, i, count) for every run of elements i, ... within a row; offsets are where the inputs begin, in elements.
template <class Body>
void for_runs(const Formula& formula, const Broadcast& axes, const Body& body) {
  const std::size_t last = axes.sizes.size() - 1, inner = axes.sizes[last];
  std::size_t total = 1;
  for (const std::size_t size : axes.sizes) total *= size;
  parallel_for(total, formula.cost, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end;) {
      std::size_t row = i / inner;
      const std::size_t column = i % inner, count = std::min(inner - column, end - i);
      std::array<std::size_t, kMostInputs> offsets{};
      for (std::size_t k = 0; k < formula.num_inputs; ++k) offsets[k] = column * axes.strides[last][k];
      for (std::size_t axis = last; axis-- > 0; row /= axes.sizes[axis])
        for (std::size_t k = 0; k < formula.num_inputs; ++k)
          offsets[k] += row % axes.sizes[axis] * axes.strides[axis][k];
      body(offsets, i, count);
      i += count;
    }
  });
}

constexpr std::size_t kPiece = 512;  // elements that are widened at a time: those of three inputs stay in the first cache

}  // namespace

void apply(const Formula& formula, const Broadcast& axes, const std::array<Operand, kMostInputs>& inputs,
           const float* numbers, const Operand& out) {
  const auto& steps = axes.strides.back();
  bool needs_no_scratch = !out.is_bfloat16;
  for (std::size_t k = 0; k < formula.num_inputs; ++k) needs_no_scratch &= steps[k] && !inputs[k].is_bfloat16;
  for_runs(formula, axes, [&](const auto& offsets, std::size_t i, std::size_t count) {
    const std::size_t piece = needs_no_scratch ? count : std::min(kPiece, count);
    float scratch[kMostInputs + 1][kPiece];
    std::array<const float*, kMostInputs> from{};
    for (std::size_t k = 0; k < formula.num_inputs; ++k) {
      if (steps[k]) continue;
      const float repeated = *inputs[k].read(offsets[k], 1, scratch[k]);
      std::fill_n(scratch[k], piece, repeated);
      from[k] = scratch[k];
    }
    for (std::size_t start = 0; start < count; start += piece) {
      const std::size_t size = std::min(piece, count - start);
      for (std::size_t k = 0; k < formula.num_inputs; ++k)
        if (steps[k]) from[k] = inputs[k].read(offsets[k] + start, size, scratch[k]);
      float* const to = out.target(i + start, scratch[kMostInputs]);
      formula.loop(from.data(), numbers, to, size);
      out.write(i + start, size, to);
    }
  });
}

namespace {

// The axes of a call, adjacent ones joined where every input moves on evenly; nothing if the shapes don't fit.
std::optional<Broadcast> broadcast(const Call& call) {
  const Shape& shape = call.outputs[0].shape;
  std::array<std::size_t, kMostInputs> next{1, 1, 1};  // the stride of the next axis of each input, from the last one on
  Broadcast axes;
  for (std::size_t back = 1; back <= shape.size(); ++back) {
    const auto size = std::size_t(shape[shape.size() - back]);
    std::array<std::size_t, kMostInputs> strides{};
    for (std::size_t k = 0; k < call.inputs.size(); ++k) {
      const Shape& given = call.inputs[k].shape;
      const auto here = std::size_t(back <= given.size() ? given[given.size() - back] : 1);
      if (here != size && here != 1) return {};
      strides[k] = here == 1 ? 0 : next[k];
      next[k] *= here;
    }
    if (size == 1) continue;
    bool is_joined = !axes.sizes.empty();
    for (std::size_t k = 0; is_joined && k < call.inputs.size(); ++k)
      is_joined = strides[k] == axes.strides.front()[k] * axes.sizes.front();
    if (is_joined) {
      axes.sizes.front() *= size;
    } else {
      axes.sizes.insert(axes.sizes.begin(), size);
      axes.strides.insert(axes.strides.begin(), strides);
    }
  }
  for (const View& input : call.inputs)
    if (input.shape.size() > shape.size()) return {};
  if (axes.sizes.empty()) {
    axes.sizes.push_back(1);
    axes.strides.push_back({1, 1, 1});
  }
  return axes;
}

Step prepare(const Formula& formula, const Call& call) {
  if (!call.are_operands(formula.num_inputs, 1)) return {};
  const auto axes = broadcast(call);
  const auto numbers = call.read_numbers<4>(formula.numbers);
  if (!axes || !numbers) return {};
  std::array<Operand, kMostInputs> inputs{};
  for (std::size_t k = 0; k < formula.num_inputs; ++k) inputs[k] = call.inputs[k].operand();
  return [&formula, axes = *axes, inputs, numbers = *numbers, out = call.outputs[0].operand()] {
    apply(formula, axes, inputs, numbers.data(), out);
    return true;
  };
}

const struct RegisterFormulas {
  RegisterFormulas() {
    for (const Formula& formula : formulas())
      Registration(formula.name, [&formula](const Call& call) { return prepare(formula, call); });
  }
} register_formulas;

}  // namespace
}  // namespace singa_lite
