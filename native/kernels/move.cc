// SPDX-License-Identifier: Apache-2.0
// Kernels that move elements of any type without computing: copy, transpose, broadcast_to, concat, slice and fill.
#include <algorithm>
#include <cstring>
#include <optional>

#include "kernels/clones.h"
#include "kernels/registry.h"
#include "kernels/threads.h"

namespace singa_lite {
namespace {

// An axis of a copy: strides in elements, 0 where the source is repeated.
struct Axis {
  std::int64_t size, from, to;
};

// A copy between arrays of any strides: axes outermost first, adjacent ones joined, none of size 1.
struct Copy {
  std::vector<Axis> axes;
  std::size_t element_bytes;
  const char* from;
  char* to;
};

std::size_t bytes_of(char type) {
  switch (type) {
    case '?': return 1;
    case 'e':
    case 'E': return 2;
    case 'f':
    case 'i': return 4;
    case 'd':
    case 'l': return 8;
    default: return 0;
  }
}

// From a view with these strides (in bytes; 0 repeats) to all of `to`; nothing if it cannot copy these arrays.
std::optional<Copy> copy_of(const View& from, const Shape& from_strides, const View& to) {
  const std::size_t bytes = bytes_of(to.type);
  if (bytes == 0 || from.type != to.type || !to.is_writeable) return {};
  Copy copy{{}, bytes, static_cast<const char*>(from.data), static_cast<char*>(to.data)};
  const auto count = std::int64_t(bytes);
  for (std::size_t i = 0; i < to.shape.size(); ++i) {
    if (from_strides[i] % count || to.strides[i] % count) return {};
    const Axis axis{to.shape[i], from_strides[i] / count, to.strides[i] / count};
    if (axis.size == 0) return Copy{{{0, 0, 0}}, bytes, copy.from, copy.to};
    if (axis.size == 1) continue;
    Axis* before = copy.axes.empty() ? nullptr : &copy.axes.back();
    if (before && before->from == axis.from * axis.size && before->to == axis.to * axis.size)
      *before = {before->size * axis.size, axis.from, axis.to};
    else
      copy.axes.push_back(axis);
  }
  if (copy.axes.empty()) copy.axes.push_back({1, 1, 1});
  return copy;
}

// A block that fits into the first cache from both sides, where one walks rows and the other columns.
constexpr std::int64_t kTile = 16;

template <class T>
void copy_elements(const T* from, T* to, const Axis& outer, const Axis& inner) {
  for (std::int64_t i = 0; i < outer.size; i += kTile)
    for (std::int64_t j = 0; j < inner.size; j += kTile) {
      const std::int64_t last_i = std::min(i + kTile, outer.size), last_j = std::min(j + kTile, inner.size);
      for (std::int64_t u = i; u < last_i; ++u)
        for (std::int64_t v = j; v < last_j; ++v) to[u * outer.to + v * inner.to] = from[u * outer.from + v * inner.from];
    }
}

typedef std::uint32_t Four __attribute__((vector_size(16)));

// Transpose 4 x 4 elements: rows of the source are `from_step` apart, those of the target `to_step`.
ALWAYS_INLINE void transpose_4x4(const std::uint32_t* from, std::int64_t from_step, std::uint32_t* to, std::int64_t to_step) {
  Four rows[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&rows[i], from + i * from_step, sizeof(Four));
  const Four top = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5);
  const Four next = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
  const Four third = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
  const Four last = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
  const Four columns[4] = {__builtin_shufflevector(top, third, 0, 1, 4, 5), __builtin_shufflevector(top, third, 2, 3, 6, 7),
                           __builtin_shufflevector(next, last, 0, 1, 4, 5), __builtin_shufflevector(next, last, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * to_step, &columns[i], sizeof(Four));
}

template <class T>
void copy_tiles(const T* from, T* to, const Axis& outer, const Axis& inner) {
  std::int64_t width = 0, height = 0;  // of what is made of 4 x 4 elements
  if constexpr (sizeof(T) == sizeof(std::uint32_t)) {
    if (outer.from == 1 && inner.to == 1) width = outer.size / 4 * 4, height = inner.size / 4 * 4;
    for (std::int64_t j = 0; j < height; j += 4)
      for (std::int64_t i = 0; i < width; i += 4)
        transpose_4x4(from + i + j * inner.from, inner.from, to + i * outer.to + j, outer.to);
  }
  copy_elements(from + height * inner.from, to + height * inner.to, {width, outer.from, outer.to},
                {inner.size - height, inner.from, inner.to});
  copy_elements(from + width * outer.from, to + width * outer.to, {outer.size - width, outer.from, outer.to}, inner);
}

template <class T>
void copy_row(const T* from, T* to, const Axis& axis) {
  if (axis.from == 1 && axis.to == 1) std::memcpy(to, from, std::size_t(axis.size) * sizeof(T));
  else if (axis.from == 0 && axis.to == 1) std::fill(to, to + axis.size, *from);
  else
    for (std::int64_t i = 0; i < axis.size; ++i) to[i * axis.to] = from[i * axis.from];
}

template <class T>
void run_copy(const Copy& copy) {
  const Axis inner = copy.axes.back();
  std::vector<Axis> outer(copy.axes.begin(), copy.axes.end() - 1);
  const T* from = reinterpret_cast<const T*>(copy.from);
  T* to = reinterpret_cast<T*>(copy.to);
  if (outer.empty())  // one row: split it
    return parallel_for(std::size_t(inner.size), 1, [&](std::size_t begin, std::size_t end) {
      const auto first = std::int64_t(begin);
      copy_row(from + first * inner.from, to + first * inner.to, {std::int64_t(end) - first, inner.from, inner.to});
    });
  // elements that are adjacent in the source but not in the target: tiles of the two axes
  std::optional<Axis> across;
  for (std::size_t i = 0; i < outer.size() && inner.from != 1 && inner.from != 0; ++i)
    if (outer[i].from == 1) {
      across = outer[i];
      outer.erase(outer.begin() + std::ptrdiff_t(i));
      break;
    }
  std::size_t rows = 1;
  for (const Axis& axis : outer) rows *= std::size_t(axis.size);
  const std::int64_t width = across ? across->size : 1, steps = across ? (width + kTile - 1) / kTile : 1;
  const auto cost = std::size_t(inner.size) * std::size_t(across ? std::min(kTile, width) : 1);
  parallel_for(rows * std::size_t(steps), cost, [&](std::size_t begin, std::size_t end) {
    // where row begin / steps starts, then on from row to row
    std::vector<std::int64_t> index(outer.size());
    const T* source = from;
    T* target = to;
    std::size_t row = begin / std::size_t(steps);
    for (std::size_t axis = outer.size(); axis-- > 0; row /= std::size_t(outer[axis].size)) {
      index[axis] = std::int64_t(row % std::size_t(outer[axis].size));
      source += index[axis] * outer[axis].from;
      target += index[axis] * outer[axis].to;
    }
    auto step = std::int64_t(begin % std::size_t(steps));
    for (std::size_t task = begin; task < end; ++task) {
      if (across) {
        const std::int64_t first = step * kTile;
        copy_tiles(source + first * across->from, target + first * across->to,
                   {std::min(kTile, width - first), across->from, across->to}, inner);
      } else {
        copy_row(source, target, inner);
      }
      if (++step < steps) continue;
      step = 0;
      for (std::size_t axis = outer.size(); axis-- > 0;) {
        source += outer[axis].from;
        target += outer[axis].to;
        if (++index[axis] < outer[axis].size) break;
        source -= index[axis] * outer[axis].from;
        target -= index[axis] * outer[axis].to;
        index[axis] = 0;
      }
    }
  });
}

Step step_of(const std::vector<Copy>& copies) {
  return [copies] {
    for (const Copy& copy : copies) {
      if (copy.axes[0].size == 0) continue;
      if (copy.element_bytes == 1) run_copy<std::uint8_t>(copy);
      else if (copy.element_bytes == 2) run_copy<std::uint16_t>(copy);
      else if (copy.element_bytes == 4) run_copy<std::uint32_t>(copy);
      else run_copy<std::uint64_t>(copy);
    }
    return true;
  };
}

Step copy_step(const View& from, const Shape& strides, const View& to) {
  const auto copy = copy_of(from, strides, to);
  return copy ? step_of({*copy}) : Step();
}

// The part of a view from `start` on along an axis, of another view's size.
std::optional<View> part_of(const View& whole, const View& like, std::size_t axis, std::int64_t start) {
  if (whole.shape.size() != like.shape.size() || axis >= whole.shape.size() || start < 0) return {};
  for (std::size_t i = 0; i < whole.shape.size(); ++i)
    if (i == axis ? start + like.shape[i] > whole.shape[i] : like.shape[i] != whole.shape[i]) return {};
  View part = whole;
  part.shape = like.shape;
  part.data = static_cast<char*>(whole.data) + start * whole.strides[axis];
  return part;
}

// The axis among so many that an attribute names.
std::optional<std::size_t> axis_of(const Call& call, std::size_t ndim) {
  const auto axis = std::int64_t(call.number("axis")), count = std::int64_t(ndim);
  if (axis < -count || axis >= count) return {};
  return std::size_t(axis < 0 ? axis + count : axis);
}

bool is_one_to_one(const Call& call) { return call.inputs.size() == 1 && call.outputs.size() == 1; }

const Registration copy("copy", [](const Call& call) -> Step {
  if (!is_one_to_one(call) || !call.has_numbers({}) || call.inputs[0].shape != call.outputs[0].shape) return {};
  return copy_step(call.inputs[0], call.inputs[0].strides, call.outputs[0]);
});

const Registration transpose("transpose", [](const Call& call) -> Step {
  const auto axes = call.attributes.find("axes");
  if (!is_one_to_one(call) || call.attributes.size() != 1 || axes == call.attributes.end()) return {};
  const View &x = call.inputs[0], &y = call.outputs[0];
  if (axes->second.size() != x.shape.size() || y.shape.size() != x.shape.size()) return {};
  Shape strides;
  for (std::size_t i = 0; i < y.shape.size(); ++i) {
    const auto axis = std::int64_t(axes->second[i]);
    if (axis < 0 || axis >= x.ndim() || x.shape[std::size_t(axis)] != y.shape[i]) return {};
    strides.push_back(x.strides[std::size_t(axis)]);
  }
  return copy_step(x, strides, y);
});

const Registration broadcast_to("broadcast_to", [](const Call& call) -> Step {
  if (!is_one_to_one(call) || !call.has_numbers({})) return {};
  const View &x = call.inputs[0], &y = call.outputs[0];
  if (x.ndim() > y.ndim()) return {};
  const std::size_t added = y.shape.size() - x.shape.size();
  Shape strides(added, 0);
  for (std::size_t i = 0; i < x.shape.size(); ++i) {
    if (x.shape[i] != 1 && x.shape[i] != y.shape[added + i]) return {};
    strides.push_back(x.shape[i] == 1 ? 0 : x.strides[i]);
  }
  return copy_step(x, strides, y);
});

const Registration slice("slice", [](const Call& call) -> Step {
  if (!is_one_to_one(call) || !call.has_numbers({"axis", "start"})) return {};
  const View &x = call.inputs[0], &y = call.outputs[0];
  const auto axis = axis_of(call, x.shape.size());
  const auto part = axis ? part_of(x, y, *axis, std::int64_t(call.number("start"))) : std::nullopt;
  return part ? copy_step(*part, part->strides, y) : Step();
});

const Registration concat("concat", [](const Call& call) -> Step {
  if (call.outputs.size() != 1 || !call.has_numbers({"axis"})) return {};
  const View& y = call.outputs[0];
  const auto axis = axis_of(call, y.shape.size());
  std::vector<Copy> copies;
  std::int64_t start = 0;
  for (const View& x : call.inputs) {
    const auto part = axis ? part_of(y, x, *axis, start) : std::nullopt;
    const auto copy = part ? copy_of(x, x.strides, *part) : std::nullopt;
    if (!copy) return {};
    copies.push_back(*copy);
    start += x.shape[*axis];
  }
  return axis && start == y.shape[*axis] ? step_of(copies) : Step();
});

template <class T>
Step fill_step(T* y, std::size_t count, T value) {
  return [y, count, value] {
    parallel_for(count, 1, [&](std::size_t begin, std::size_t end) { std::fill(y + begin, y + end, value); });
    return true;
  };
}

const Registration fill("fill", [](const Call& call) -> Step {
  if (!call.inputs.empty() || call.outputs.size() != 1 || !call.has_numbers({"value"})) return {};
  const View& y = call.outputs[0];
  if (!y.is_writeable) return {};
  const float value = float(call.number("value"));
  if (y.is_floats()) return fill_step(y.floats(), y.size(), value);
  return y.is_bfloat16s() ? fill_step(y.bfloat16s(), y.size(), Bfloat16(value)) : Step();
});

}  // namespace
}  // namespace singa_lite
