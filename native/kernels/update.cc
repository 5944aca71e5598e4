// SPDX-License-Identifier: Apache-2.0
// The updates of updates.h: a loop for each, and running one on many tensors.
#include "kernels/update.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "kernels/clones.h"
#include "kernels/elementwise.h"
#include "kernels/parts.h"
#include "kernels/registry.h"
#include "kernels/vector_math.h"

// inside of vector_math, so that updates find its functions before those of <cmath>
namespace singa_lite::vector_math::update_loops {

#define UPDATE(name, num_states, s, t, assignments, ...)                                                    \
  struct name##_rule {                                                                                      \
    float weight_decay, __VA_ARGS__;                                                                        \
    ALWAYS_INLINE void operator()(float g, float& p, float& s, float& t) const { assignments }              \
  };                                                                                                        \
  CLONES void name##_loop(const float* grad, float* param, float* first, float* second, std::size_t count,  \
                          const float* numbers) {                                                           \
    name##_rule rule;                                                                                       \
    __builtin_memcpy(&rule, numbers, sizeof rule);                                                          \
    float unused = 0;                                                                                       \
    _Pragma("GCC ivdep") for (std::size_t i = 0; i < count; ++i)                                            \
        rule(grad[i] + rule.weight_decay * param[i], param[i], num_states > 0 ? first[i] : unused,          \
             num_states > 1 ? second[i] : unused);                                                          \
  }
#define UPDATE0(name, value, ...) UPDATE(name, 0, first_, second_, p = value;, __VA_ARGS__)
#define UPDATE1(name, s, s_value, value, ...) UPDATE(name, 1, s, second_, s = s_value; p = value;, __VA_ARGS__)
#define UPDATE2(name, s, s_value, t, t_value, value, ...) \
  UPDATE(name, 2, s, t, s = s_value; t = t_value; p = value;, __VA_ARGS__)
#include "updates.h"
#undef UPDATE
#undef UPDATE0
#undef UPDATE1
#undef UPDATE2

}  // namespace singa_lite::vector_math::update_loops

namespace singa_lite {

const std::vector<Update>& updates() {
#define UPDATE(name, num_states, ...)                                                                         \
  {#name, num_states, #__VA_ARGS__,                                                                           \
   [](const UpdatePart& part, std::size_t begin, std::size_t count, const float* numbers) {                   \
     float* const first = num_states > 0 ? part.states[0] + begin : nullptr;                                  \
     float* const second = num_states > 1 ? part.states[1] + begin : nullptr;                                 \
     vector_math::update_loops::name##_loop(part.grad + begin, part.param + begin, first, second, count, numbers); \
   }},
#define UPDATE0(name, value, ...) UPDATE(name, 0, __VA_ARGS__)
#define UPDATE1(name, s, s_value, value, ...) UPDATE(name, 1, __VA_ARGS__)
#define UPDATE2(name, s, s_value, t, t_value, value, ...) UPDATE(name, 2, __VA_ARGS__)
  static const std::vector<Update> all = {
#include "updates.h"
  };
  return all;
}

namespace {
constexpr std::size_t kPiece = 4096;  // elements that are still in the first cache when they are rounded
}

void apply(const Update& update, const std::vector<UpdatePart>& parts, const float* numbers) {
  parallel_for_parts(parts, [&](const UpdatePart& part, std::size_t begin, std::size_t end) {
    const std::size_t piece = part.rounded ? kPiece : end - begin;
    for (; begin < end; begin += piece) {
      const std::size_t count = std::min(piece, end - begin);
      update.loop(part, begin, count, numbers);
      if (part.rounded) to_bfloat16(part.param + begin, part.rounded + begin, count);
    }
  });
}

namespace {

// Give the parameters of these numbers their copies; false if one does not fit.
bool add_copies(const std::vector<View>& copies, const std::vector<double>& numbers, std::vector<UpdatePart>* parts) {
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const View& copy = copies[i];
    const auto number = std::size_t(numbers[i]);
    if (!copy.is_bfloat16s() || !copy.is_writeable || number >= parts->size() || copy.size() != (*parts)[number].count)
      return false;
    (*parts)[number].rounded = copy.bfloat16s();
  }
  return true;
}

// The tensors of a step from (grad, ...) and (param, ..., each state of all ...); nothing if two outputs share memory,
// which threads must not write at once, or if sizes differ.
std::optional<std::vector<UpdatePart>> parts_of(const Call& call) {
  const std::size_t count = call.inputs.size();
  std::vector<UpdatePart> parts(count);
  std::vector<std::pair<const float*, const float*>> written;
  for (std::size_t i = 0; i < call.outputs.size(); ++i) {
    const View& out = call.outputs[i];
    UpdatePart& part = parts[i % count];
    if (i < count)
      part = {call.inputs[i].floats(), out.floats(), {}, call.inputs[i].size()};
    else
      part.states[i / count - 1] = out.floats();
    if (out.size() != part.count) return {};
    if (part.count) written.emplace_back(out.floats(), out.floats() + part.count);
  }
  std::sort(written.begin(), written.end());
  for (std::size_t i = 1; i < written.size(); ++i)
    if (written[i].first < written[i - 1].second) return {};
  return parts;
}

Step prepare(const Update& update, Call call) {
  const auto found = call.attributes.find("rounded");
  const std::vector<double> rounded = found == call.attributes.end() ? std::vector<double>() : found->second;
  call.attributes.erase("rounded");
  const std::size_t count = call.inputs.size(), end = count * (1 + update.num_states);
  if (count == 0 || call.outputs.size() != end + rounded.size()) return {};
  const std::vector<View> copies(call.outputs.begin() + end, call.outputs.end());
  call.outputs.resize(end);
  if (!call.are_floats(count, end)) return {};
  const auto numbers = call.read_numbers<kMostNumbers>(update.numbers, {"weight_decay"});
  auto parts = parts_of(call);
  if (!parts || !numbers || !add_copies(copies, rounded, &*parts)) return {};
  return [&update, parts = std::move(*parts), numbers = *numbers] {
    apply(update, parts, numbers.data());
    return true;
  };
}

const struct RegisterUpdates {
  RegisterUpdates() {
    for (const Update& update : updates())
      Registration(update.name, [&update](const Call& call) { return prepare(update, call); });
  }
} register_updates;

}  // namespace
}  // namespace singa_lite
