// SPDX-License-Identifier: Apache-2.0
// The updates of updates.h: a loop for each, and running one on many tensors.
#include "kernels/update.h"

#include <algorithm>
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
    ALWAYS_INLINE void operator()(float g, float& p, [[maybe_unused]] float& s, [[maybe_unused]] float& t) const { \
      assignments                                                                                           \
    }                                                                                                       \
  };                                                                                                        \
  CLONES void name##_loop(const float* grad, float* param, float* first, float* second, std::size_t count,  \
                          const float* numbers) {                                                           \
    name##_rule rule;                                                                                       \
    __builtin_memcpy(&rule, numbers, sizeof rule);                                                          \
    float unused = 0;                                                                                       \
    _Pragma("GCC ivdep") for (std::size_t i = 0; i < count; ++i)                                            \
        rule(rule.weight_decay == 0 ? grad[i] : grad[i] + rule.weight_decay * param[i], param[i],           \
             num_states > 0 ? first[i] : unused, num_states > 1 ? second[i] : unused);                      \
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

// Bytes that a call writes.
using Range = std::pair<const char*, const char*>;

Range range_of(const View& view, std::size_t element_bytes) {
  const auto begin = static_cast<const char*>(view.data);
  return {begin, begin + view.size() * element_bytes};
}

// Whether threads may write to all of them at once.
bool are_apart(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i)
    if (ranges[i].first < ranges[i - 1].second) return false;
  return true;
}

// The tensors of a step from (grad, ...) and (param, ..., each state of all ..., a copy for each number in rounded);
// nothing if an array is not as it should be, or two outputs share memory.
std::optional<std::vector<UpdatePart>> parts_of(const Call& call, std::size_t num_states, const std::vector<double>& rounded) {
  const std::size_t count = call.inputs.size(), num_floats = count * (1 + num_states);
  std::vector<UpdatePart> parts(count);
  std::vector<Range> written;
  for (std::size_t i = 0; i < call.outputs.size(); ++i) {
    const View& out = call.outputs[i];
    const bool is_copy = i >= num_floats;
    const double number = is_copy ? rounded[i - num_floats] : double(i % count);
    if (!out.is_writeable || !(is_copy ? out.is_bfloat16s() : out.is_floats()) || !(number >= 0 && number < double(count)))
      return {};
    UpdatePart& part = parts[std::size_t(number)];
    if (is_copy) {
      if (part.rounded || number != double(std::size_t(number))) return {};
      part.rounded = out.bfloat16s();
    } else if (i < count) {
      if (!call.inputs[i].is_floats()) return {};
      part = {call.inputs[i].floats(), out.floats(), {}, call.inputs[i].size()};
    } else {
      part.states[i / count - 1] = out.floats();
    }
    if (out.size() != part.count) return {};
    if (part.count) written.push_back(range_of(out, is_copy ? sizeof(Bfloat16) : sizeof(float)));
  }
  if (!are_apart(std::move(written))) return {};
  return parts;
}

Step prepare(const Update& update, const Call& call) {
  Call named;
  named.attributes = call.attributes;
  const auto found = named.attributes.extract("rounded");
  const std::vector<double> rounded = found ? found.mapped() : std::vector<double>();
  const std::size_t count = call.inputs.size();
  if (count == 0 || call.outputs.size() != count * (1 + update.num_states) + rounded.size()) return {};
  const auto numbers = named.read_numbers<kMostNumbers>(update.numbers, {"weight_decay"});
  auto parts = parts_of(call, update.num_states, rounded);
  if (!parts || !numbers) return {};
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
