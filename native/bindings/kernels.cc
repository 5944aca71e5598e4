// SPDX-License-Identifier: Apache-2.0
// Python's view of native/kernels: memory, element by element, selection, and the module itself.
#include <cstring>
#include <limits>
#include <optional>

#include "bindings/arrays.h"
#include "bindings/families.h"
#include "kernels/elementwise.h"
#include "kernels/memory.h"
#include "kernels/parts.h"
#include "kernels/reduce.h"
#include "kernels/select.h"
#include "kernels/threads.h"
#include "kernels/widen.h"

using namespace singa_lite;
using namespace pybind11::literals;

namespace {

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
constexpr bool kKnowsLevels = true;
#else
constexpr bool kKnowsLevels = false;
#endif

// ---- memory ----------------------------------------------------------------------------------------------------------

constexpr std::size_t kPooled = 64 << 10;  // bytes; below, malloc reuses memory itself

// A row-major array of undefined content, from the pool where it is large.
py::array empty(const py::handle& shape_, const py::object& dtype_) {
  const auto dtype = py::dtype::from_args(dtype_);
  const auto shape = shape_.cast<std::vector<py::ssize_t>>();
  std::size_t bytes = std::size_t(dtype.itemsize());
  for (const py::ssize_t size : shape) bytes *= std::size_t(size);
  if (bytes < kPooled || dtype.has_fields() || dtype.kind() == 'O') return py::array(dtype, shape);
  void* block = memory_pool().acquire(bytes);
  struct Owned {
    void* block;
    std::size_t bytes;
  };
  const py::capsule owner(new Owned{block, bytes}, [](void* pointer) {
    const auto* owned = static_cast<Owned*>(pointer);
    memory_pool().release(owned->block, owned->bytes);
    delete owned;
  });
  return py::array(dtype, shape, block, owner);
}

// numpy itself gives a flag that it took away back to no array whose memory belongs to something else.
void set_writeable(const py::array& array, bool is_writeable) {
  int& flags = py::detail::array_proxy(array.ptr())->flags;
  flags = is_writeable ? flags | py::detail::npy_api::NPY_ARRAY_WRITEABLE_ : flags & ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
}

// ---- element by element ----------------------------------------------------------------------------------------------

// The axes of x, adjacent ones joined that are both summed or both kept; nothing if one is empty.
template <class X>
std::optional<SummedAxes> summed_axes(const X& x, const std::vector<bool>& is_summed) {
  SummedAxes axes{{}, 0};
  bool is_last_summed = false;
  for (int axis = 0; axis < x.ndim; ++axis) {
    const auto size = std::size_t(x.shape(axis));
    if (size == 0) return {};
    if (size == 1) continue;
    if (axes.sizes.empty() || is_last_summed != is_summed[std::size_t(axis)]) axes.sizes.push_back(1);
    if (axes.sizes.size() == 1) axes.first = is_summed[std::size_t(axis)] ? 0 : 1;
    axes.sizes.back() *= size;
    is_last_summed = is_summed[std::size_t(axis)];
  }
  if (axes.sizes.size() <= axes.first) {  // nothing but axes of size 1 is summed
    axes.sizes.insert(axes.sizes.begin(), 1);
    axes.first = 0;
  }
  return axes;
}

// T: of x; To: of out.
template <class T, class To>
bool run_sum(const Array<const T>& x, const Array<To>& out, const std::vector<bool>& is_summed, bool is_mean) {
  if (!all(x, out)) return false;
  const auto axes = summed_axes(x, is_summed);
  if (!axes) return false;
  std::size_t summed = 1;
  for (std::size_t axis = axes->first; axis < axes->sizes.size(); axis += 2) summed *= axes->sizes[axis];
  if (out.size * summed != x.size) return false;
  return run([=, axes = *axes] {
    const Scratch<To> scratch(out.size);
    sum(x.data(), target_of(out.data(), scratch), axes, is_mean ? double(summed) : 1.0);
    store(out.data(), out.size, scratch);
  });
}

// The sum of an array of float into one of float, or of bfloat16 into either; is_summed(x) says which axes.
template <class IsSummed>
bool sum_any(const py::handle& x_, const py::handle& out_, bool is_mean, const IsSummed& is_summed) {
  if (const In x(x_); x) {
    const auto axes = is_summed(x);
    return axes && run_sum(x, Out(out_), *axes, is_mean);
  }
  const Array<const Bfloat16> x(x_);
  const auto axes = x ? is_summed(x) : std::nullopt;
  if (!axes) return false;
  return run_sum(x, Out(out_), *axes, is_mean) || run_sum(x, Array<Bfloat16>(out_), *axes, is_mean);
}

using IsSummed = std::optional<std::vector<bool>>;

template <bool is_mean>
bool bind_sum(const py::handle& x_, const py::handle& out, const std::vector<std::int64_t>& axes, bool) {
  return sum_any(x_, out, is_mean, [&](const auto& x) -> IsSummed {
    std::vector<bool> is_summed(std::size_t(x.ndim), false);
    for (const std::int64_t axis : axes) {
      if (axis < -x.ndim || axis >= x.ndim) return {};
      is_summed[std::size_t(axis < 0 ? axis + x.ndim : axis)] = true;
    }
    return is_summed;
  });
}

bool bind_sum_to(const py::handle& dy_, const py::handle& out_) {
  if (!py::isinstance<py::array>(out_)) return false;
  const auto out = py::reinterpret_borrow<py::array>(out_);
  return sum_any(dy_, out_, false, [&](const auto& dy) -> IsSummed {
    const int ndim = int(out.ndim()), added = dy.ndim - ndim;
    if (added < 0) return {};
    std::vector<bool> is_summed(std::size_t(dy.ndim), true);
    for (int axis = 0; axis < ndim; ++axis) is_summed[std::size_t(added + axis)] = out.shape(axis) == 1;
    return is_summed;
  });
}

bool bind_clip(const py::handle& x_, const py::handle& out_, std::optional<double> min, std::optional<double> max) {
  const In x(x_);
  const Out out(out_);
  if (!all(x, out) || x.size != out.size) return false;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const float low = float(min.value_or(-kInfinity)), high = float(max.value_or(kInfinity));
  if (!(low <= high)) return false;
  return run([=] { clip(x.data(), out.data(), low, high, x.size); });
}

bool bind_cast(const py::handle& x_, const py::handle& out_) {
  const In x(x_);
  const Array<std::uint16_t> half(out_);
  if (all(x, half) && x.size == half.size) return run([=] { to_half(x.data(), half.data(), x.size); });
  const Array<const std::uint16_t> from(x_);
  const Out out(out_);
  if (all(from, out) && from.size == out.size) return run([=] { from_half(from.data(), out.data(), out.size); });
  const Array<Bfloat16> rounded(out_);
  if (all(x, rounded) && x.size == rounded.size)
    return run([=] { to_bfloat16(x.data(), rounded.data(), x.size); });
  const Array<const Bfloat16> narrow(x_);
  if (!all(narrow, out) || narrow.size != out.size) return false;
  return run([=] { from_bfloat16(narrow.data(), out.data(), out.size); });
}

bool bind_max_abs(const py::handle& x_, const py::handle& out_) {
  const In x(x_);
  const Out out(out_);
  if (!all(x, out) || out.size != 1) return false;
  return run([=] { *out.data() = max_abs(x.data(), x.size); });
}

// ---- one flat array and many -----------------------------------------------------------------------------------------

struct CopyPart {
  const float* from;
  float* to;
  std::size_t count;
};

void copy_parts(const std::vector<CopyPart>& parts) {
  parallel_for_parts(parts, [](const CopyPart& part, std::size_t begin, std::size_t end) {
    std::memcpy(part.to + begin, part.from + begin, (end - begin) * sizeof(float));
  });
}

bool bind_pack(const py::args& xs, const py::handle& out_, std::size_t alignment) {
  const Out out(out_);
  if (!out || alignment == 0) return false;
  std::vector<CopyPart> parts;
  std::size_t start = 0;
  for (const py::handle& x_ : xs) {
    const In x(x_);
    if (!x || x.size > out.size - start) return false;
    parts.push_back({x.data(), out.data() + start, x.size});
    start += (x.size + alignment - 1) / alignment * alignment;
    if (start > out.size) return false;
  }
  return start == out.size && run([=] { copy_parts(parts); });
}

bool bind_unpack(const py::handle& flat_, const py::handle& out) {
  const In flat(flat_);
  if (!flat || !PyTuple_Check(out.ptr())) return false;
  std::vector<CopyPart> parts;
  std::size_t start = 0;
  for (std::size_t i = 0; i < length(out); ++i) {
    const Out x(at(out, i));
    if (!x || x.size > flat.size - start) return false;
    parts.push_back({flat.data() + start, x.data(), x.size});
    start += x.size;
  }
  return run([=] { copy_parts(parts); });
}

// ---- selection -------------------------------------------------------------------------------------------------------

constexpr std::size_t kMostSelectable = std::size_t(1) << 32;  // positions are 32 bits wide

// Hand positions to the caller's indices, of either width; false if the sizes disagree.
bool hand_over(const std::vector<std::uint32_t>& positions, const In& values, const py::handle& out) {
  const Array<std::int32_t> narrow(at(out, 0));
  const Array<std::int64_t> wide(at(out, 0));
  const Out selected(at(out, 1));
  if (!selected || selected.size != positions.size()) return false;
  if (narrow && narrow.size == selected.size) gather(positions, values.data(), narrow.data(), selected.data());
  else if (wide && wide.size == selected.size) gather(positions, values.data(), wide.data(), selected.data());
  else return false;
  return true;
}

bool bind_top_k(const py::handle& values_, const py::handle& out, std::int64_t k) {
  const In values(values_);
  if (!values || k < 0 || std::size_t(k) > values.size || values.size >= kMostSelectable) return false;
  if (Plan::recording()) return false;  // the result is not computed yet
  std::vector<std::uint32_t> positions;
  run([&] { positions = top_k(values.data(), values.size, std::size_t(k)); });
  return hand_over(positions, values, out);
}

bool bind_threshold_count(const py::handle& values_, const py::handle& out_, double threshold) {
  const In values(values_);
  const Array<std::int64_t> out(out_);
  if (!all(values, out) || out.size != 1 || threshold != threshold) return false;
  return run([=] {
    *out.data() = std::int64_t(threshold_count(values.data(), values.size, float(threshold)));
  });
}

bool bind_threshold_select(const py::handle& values_, const py::handle& out, double threshold) {
  const In values(values_);
  if (!values || values.size >= kMostSelectable || threshold != threshold) return false;
  if (Plan::recording()) return false;  // the result is not computed yet
  std::vector<std::uint32_t> positions;
  run([&] { positions = threshold_select(values.data(), values.size, float(threshold)); });
  return hand_over(positions, values, out);
}

template <class Index>
bool scatter_add_as(const py::handle& indices_, const py::handle& values_, const py::handle& out_) {
  const Array<const Index> indices(indices_);
  const In values(values_);
  const Out out(out_);
  if (!all(indices, values, out) || indices.size != values.size || out.ndim != 1) return false;
  return run([=] { return scatter_add(indices.data(), values.data(), indices.size, out.data(), out.size); });
}

bool bind_scatter_add(const py::handle& indices, const py::handle& values, const py::handle& out) {
  return scatter_add_as<std::int32_t>(indices, values, out) || scatter_add_as<std::int64_t>(indices, values, out);
}

template <class Index>
bool scatter_fill_as(const py::handle& indices_, const py::handle& out_, double value) {
  const Array<const Index> indices(indices_);
  const Out out(out_);
  if (!all(indices, out) || out.ndim != 1) return false;
  return run([=] { return scatter_fill(indices.data(), float(value), indices.size, out.data(), out.size); });
}

bool bind_scatter_fill(const py::handle& indices, const py::handle& out, double value) {
  return scatter_fill_as<std::int32_t>(indices, out, value) || scatter_fill_as<std::int64_t>(indices, out, value);
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
  m.doc() = "Float32 and bfloat16 kernels on numpy arrays; singa_lite/backend/cpu/native.py calls them.";
  bfloat16_number();  // raises what importing ml_dtypes does
#ifdef SINGA_LITE_ONEDNN
  m.attr("onednn") = SINGA_LITE_ONEDNN;
#else
  m.attr("onednn") = "";
#endif
  m.def("num_threads", &num_threads, "Threads the next kernel may use.");
  m.def("set_num_threads", &set_num_threads, "threads"_a, "Threads for kernels called from this thread.");

  m.attr("knows_levels") = bool(kKnowsLevels);
  m.def("fuses_multiply_add", &fuses_multiply_add, "Whether cloned functions run as compiled for x86-64-v3 or above.");

  m.def("empty", &empty, "shape"_a, "dtype"_a, "An array of undefined content whose memory is reused.");
  m.def("set_writeable", &set_writeable, "array"_a, "is_writeable"_a, "Set whether numpy may write to an array.");
  m.def("release_cached_memory", [] {
    release_thread_scratch();
    memory_pool().release_cached_memory();
  }, "Release memory that is kept for reuse, and the calling thread's scratch, to the system.");
  m.def("save_memory", [](bool begins) { memory_pool().save_memory(begins); }, "begins"_a,
        "Release what is kept for reuse before more memory is taken, from True to False; they nest.");
  m.def("discard_pages", [](py::array array) { discard_pages(array.mutable_data(), std::size_t(array.nbytes())); },
        "array"_a, "Let the system take the memory of a row-major array whose values are not needed any more.");
  m.def("pool_bytes", [] { return memory_pool().bytes_held(); }, "Bytes the pool holds, in use and kept.");

  const py::kw_only kw;
  m.def("sum", &bind_sum<false>, "x"_a, kw, "out"_a, "axes"_a, "keepdims"_a);
  m.def("mean", &bind_sum<true>, "x"_a, kw, "out"_a, "axes"_a, "keepdims"_a);
  m.def("sum_to", &bind_sum_to, "dy"_a, kw, "out"_a);
  m.def("clip", &bind_clip, "x"_a, kw, "out"_a, "min"_a, "max"_a);
  m.def("cast", &bind_cast, "x"_a, kw, "out"_a);
  m.def("max_abs", &bind_max_abs, "x"_a, kw, "out"_a);
  bind_registered(m);
  bind_windows(m);
  bind_norms(m);
  bind_plan(m);
  bind_quantize(m);
  m.def("pack", &bind_pack, "out"_a, "alignment"_a = 1);
  m.def("unpack", &bind_unpack, "flat"_a, kw, "out"_a);
  m.def("top_k", &bind_top_k, "values"_a, kw, "out"_a, "k"_a);
  m.def("threshold_count", &bind_threshold_count, "values"_a, kw, "out"_a, "threshold"_a);
  m.def("threshold_select", &bind_threshold_select, "values"_a, kw, "out"_a, "threshold"_a);
  m.def("scatter_add", &bind_scatter_add, "indices"_a, "values"_a, kw, "out"_a);
  m.def("scatter_fill", &bind_scatter_fill, "indices"_a, kw, "out"_a, "value"_a);
}
