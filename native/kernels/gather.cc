// SPDX-License-Identifier: Apache-2.0
// gather and its gradient: elements of float32 or bfloat16 at given positions of an axis. x is (before, size, after), y
// (before, count, after).
#include <algorithm>
#include <cstring>

#include "kernels/clones.h"
#include "kernels/registry.h"
#include "kernels/threads.h"

namespace singa_lite {
namespace gather_loops {

CLONES void add(const float* from, double* totals, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) totals[i] += double(from[i]);
}
CLONES void add(const Bfloat16* from, double* totals, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) totals[i] += double(from[i]);
}
CLONES void round(const double* totals, float* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = float(totals[i]);
}
CLONES void round(const double* totals, Bfloat16* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i].bits = Bfloat16::rounded(float(totals[i]));
}

}  // namespace gather_loops

namespace {

struct Gather {
  std::size_t before = 1, size = 0, after = 1, count = 0;
  const void* indices = nullptr;
  bool is_wide = false;  // int64

  // Index number i, or `size` if it is out of range.
  std::size_t operator[](std::size_t i) const {
    const std::int64_t index = is_wide ? static_cast<const std::int64_t*>(indices)[i]
                                       : std::int64_t(static_cast<const std::int32_t*>(indices)[i]);
    return index >= 0 && std::size_t(index) < size ? std::size_t(index) : size;
  }
  bool are_in_range() const {
    for (std::size_t i = 0; i < count; ++i)
      if ((*this)[i] == size) return false;
    return true;
  }
};

// Whether whole, indices and part are arrays of one gather.
bool read(const Call& call, const View& whole, const View& indices, const View& part, Gather* gather) {
  if (!call.has_numbers({"axis"}) || !whole.is_operand() || part.type != whole.type || !part.is_row_major) return false;
  if (!indices.is_row_major) return false;
  if (indices.type != 'i' && indices.type != 'l') return false;
  const auto axis = std::size_t(call.number("axis"));
  if (call.number("axis") < 0 || axis >= whole.shape.size()) return false;
  Shape expected(whole.shape.begin(), whole.shape.begin() + std::ptrdiff_t(axis));
  for (const std::int64_t size : expected) gather->before *= std::size_t(size);
  expected.insert(expected.end(), indices.shape.begin(), indices.shape.end());
  for (std::size_t i = axis + 1; i < whole.shape.size(); ++i) {
    gather->after *= std::size_t(whole.shape[i]);
    expected.push_back(whole.shape[i]);
  }
  gather->size = std::size_t(whole.shape[axis]);
  gather->count = indices.size();
  gather->indices = indices.data;
  gather->is_wide = indices.type == 'l';
  return part.shape == expected;
}

template <class Index, class T>
void take_elements(const Index* indices, std::size_t count, const T* x, T* y) {
  parallel_for(count, 2, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) y[i] = x[indices[i]];
  });
}

template <class T>
void take(const Gather& g, const T* x, T* y) {
  if (g.before == 1 && g.after == 1) {  // without divisions
    if (g.is_wide) return take_elements(static_cast<const std::int64_t*>(g.indices), g.count, x, y);
    return take_elements(static_cast<const std::int32_t*>(g.indices), g.count, x, y);
  }
  parallel_for(g.before * g.count, g.after, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      std::memcpy(y + i * g.after, x + (i / g.count * g.size + g[i % g.count]) * g.after, g.after * sizeof(T));
  });
}

// Every row of dx adds up its rows of dy in their order, whatever the number of threads.
template <class T>
void put_back(const Gather& g, const T* dy, T* dx) {
  std::vector<std::size_t> starts(g.size + 1), order(g.count);  // which indices name a position
  for (std::size_t i = 0; i < g.count; ++i) ++starts[g[i] + 1];
  for (std::size_t position = 0; position < g.size; ++position) starts[position + 1] += starts[position];
  std::vector<std::size_t> next(starts.begin(), starts.end() - 1);
  for (std::size_t i = 0; i < g.count; ++i) order[next[g[i]]++] = i;
  constexpr std::size_t kColumns = 512;  // whose sums stay in the first cache
  const std::size_t blocks = (g.after + kColumns - 1) / kColumns, width = std::min(g.after, kColumns);
  const std::size_t uses = 1 + g.count / std::max<std::size_t>(1, g.size);
  parallel_for(g.before * g.size * blocks, width * uses, [&](std::size_t begin, std::size_t end) {
    double totals[kColumns];
    for (std::size_t task = begin; task < end; ++task) {
      const std::size_t block = task % blocks, position = task / blocks % g.size, outer = task / blocks / g.size;
      const std::size_t first = block * kColumns, columns = std::min(kColumns, g.after - first);
      T* to = dx + (outer * g.size + position) * g.after + first;
      const T* from = dy + outer * g.count * g.after + first;
      const std::size_t start = starts[position], stop = starts[position + 1];
      if (stop - start == 1) {
        std::memcpy(to, from + order[start] * g.after, columns * sizeof(T));
        continue;
      }
      std::fill(totals, totals + columns, 0.0);
      for (std::size_t i = start; i < stop; ++i) gather_loops::add(from + order[i] * g.after, totals, columns);
      gather_loops::round(totals, to, columns);
    }
  });
}

template <class T>
Step take_step(const Gather& g, const Call& call) {
  return [g, x = static_cast<const T*>(call.inputs[0].data), y = static_cast<T*>(call.outputs[0].data)] {
    if (!g.are_in_range()) return false;
    if (g.count && g.before && g.after) take(g, x, y);
    return true;
  };
}

template <class T>
Step put_back_step(const Gather& g, const Call& call) {
  return [g, dy = static_cast<const T*>(call.inputs[0].data), dx = static_cast<T*>(call.outputs[0].data)] {
    if (!g.are_in_range()) return false;
    if (g.size && g.before && g.after) put_back(g, dy, dx);
    return true;
  };
}

const Registration gather("gather", [](const Call& call) -> Step {
  Gather g;
  if (call.inputs.size() != 2 || call.outputs.size() != 1 || !call.outputs[0].is_writeable) return {};
  if (!read(call, call.inputs[0], call.inputs[1], call.outputs[0], &g)) return {};
  return call.inputs[0].is_floats() ? take_step<float>(g, call) : take_step<Bfloat16>(g, call);
});

const Registration gather_backward("gather_backward", [](const Call& call) -> Step {
  Gather g;
  if (call.inputs.size() != 2 || call.outputs.size() != 1 || !call.outputs[0].is_writeable) return {};
  if (!read(call, call.outputs[0], call.inputs[1], call.inputs[0], &g)) return {};
  return call.inputs[0].is_floats() ? put_back_step<float>(g, call) : put_back_step<Bfloat16>(g, call);
});

}  // namespace
}  // namespace singa_lite
