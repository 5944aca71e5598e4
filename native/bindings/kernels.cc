// SPDX-License-Identifier: Apache-2.0
// Python's view of native/kernels: memory, element by element, optimizer steps, selection, and the module itself.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "bindings/arrays.h"
#include "bindings/families.h"
#include "kernels/elementwise.h"
#include "kernels/memory.h"
#include "kernels/pack.h"
#include "kernels/select.h"
#include "kernels/threads.h"
#include "kernels/update.h"

using namespace singa_lite;
using namespace pybind11::literals;

namespace {

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

// ---- element by element ----------------------------------------------------------------------------------------------

bool bind_relu(const py::handle& x_, const py::handle& out_) {
  const In x(x_);
  const Out out(out_);
  if (!all(x, out) || x.size != out.size) return false;
  return run([=] { relu(x.data(), out.data(), x.size); });
}

bool bind_relu_backward(const py::handle& dy_, const py::handle& y_, const py::handle& out_) {
  const In dy(dy_), y(y_);
  const Out out(out_);
  if (!all(dy, y, out) || dy.size != out.size || y.size != out.size) return false;
  return run([=] { relu_backward(dy.data(), y.data(), out.data(), dy.size); });
}

// Same shapes, a row of the last axis, or one number, added to the first.
template <Arithmetic op>
bool bind_arithmetic(const py::handle& a_, const py::handle& b_, const py::handle& out_) {
  const In a(a_), b(b_);
  const Out out(out_);
  if (!all(a, b, out) || a.size != out.size || a.ndim != out.ndim || a.size == 0) return false;
  const bool is_row = b.ndim == 1 && a.ndim >= 1 && b.shape(0) == a.shape(a.ndim - 1);
  const bool is_same = b.ndim == a.ndim && (b.ndim == 0 || b.has_shape(a.ndim, &a.shape_ref()));
  if (!is_same && !is_row && !(b.size == 1 && b.ndim <= a.ndim)) return false;
  return run([=] { arithmetic(op, a.data(), b.data(), out.data(), a.size, is_same ? a.size : b.size); });
}

bool bind_sum_to(const py::handle& dy_, const py::handle& out_) {
  const In dy(dy_);
  const Out out(out_);
  if (!all(dy, out) || dy.size == 0 || out.ndim != 1 || dy.ndim < 2 || out.shape(0) != dy.shape(dy.ndim - 1))
    return false;
  return run([=] { sum_rows(dy.data(), out.data(), dy.size / out.size, out.size); });
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
  if (!all(from, out) || from.size != out.size) return false;
  return run([=] { from_half(from.data(), out.data(), out.size); });
}

bool bind_max_abs(const py::handle& x_, const py::handle& out_) {
  const In x(x_);
  const Out out(out_);
  if (!all(x, out) || out.size != 1) return false;
  return run([=] { *out.data() = max_abs(x.data(), x.size); });
}

// ---- optimizer steps -------------------------------------------------------------------------------------------------

// The tensors of a step from (grad, ...) and (param, ..., each state of all ...); nothing if one is not for us, or if
// two outputs share memory, which threads must not write at once.
std::optional<std::vector<UpdatePart>> update_parts(const py::args& grads, const py::handle& out, std::size_t most) {
  const std::size_t count = grads.size(), arrays = PyTuple_Check(out.ptr()) ? length(out) : 1;
  if (count == 0 || arrays % count != 0 || arrays / count > most + 1) return {};
  std::vector<UpdatePart> parts(count);
  std::vector<std::pair<const float*, const float*>> written;
  for (std::size_t i = 0; i < arrays; ++i) {
    const Out array(PyTuple_Check(out.ptr()) ? at(out, i) : out);
    UpdatePart& part = parts[i % count];
    if (i < count) {
      const In grad(grads[i]);
      if (!grad) return {};
      part = {grad.data(), array.data(), {nullptr, nullptr}, grad.size};
    } else {
      part.state[i / count - 1] = array.data();
    }
    if (!array || array.size != part.count) return {};
    if (array.size) written.emplace_back(array.data(), array.data() + array.size);
  }
  std::sort(written.begin(), written.end());
  for (std::size_t i = 1; i < written.size(); ++i)
    if (written[i].first < written[i - 1].second) return {};
  return parts;
}

bool bind_sgd_update(const py::args& grads, const py::handle& out, double lr, double momentum, double dampening,
                     double weight_decay, bool nesterov) {
  const auto parts = update_parts(grads, out, 1);
  if (!parts) return false;
  const SgdStep step{float(lr), float(momentum), float(dampening), float(weight_decay), nesterov};
  return run([=] { sgd_update(*parts, step); });
}

bool bind_adam_update(const py::args& grads, const py::handle& out, double lr, double beta_1, double beta_2, double eps,
                      std::int64_t step, double weight_decay) {
  const auto parts = update_parts(grads, out, 2);
  if (!parts || length(out) != 3 * parts->size()) return false;
  const AdamStep now{float(beta_1),
                     float(beta_2),
                     float(eps),
                     float(weight_decay),
                     float(lr / (1 - std::pow(beta_1, double(step)))),
                     float(1 / (1 - std::pow(beta_2, double(step))))};
  return run([=] { adam_update(*parts, now); });
}

// ---- one flat array and many -----------------------------------------------------------------------------------------

bool bind_pack(const py::args& xs, const py::handle& out_) {
  const Out out(out_);
  if (!out) return false;
  std::vector<CopyPart> parts;
  std::size_t start = 0;
  for (const py::handle& x_ : xs) {
    const In x(x_);
    if (!x || x.size > out.size - start) return false;
    parts.push_back({x.data(), out.data() + start, x.size});
    start += x.size;
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
  if (Plan::listening()) return false;  // what comes back is not there yet
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
  if (Plan::listening()) return false;  // what comes back is not there yet
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
  m.doc() = "Float32 kernels on numpy arrays; singa_lite/backend/cpu/native.py is their door.";
#ifdef SINGA_LITE_ONEDNN
  m.attr("onednn") = SINGA_LITE_ONEDNN;
#else
  m.attr("onednn") = "";
#endif
  m.def("num_threads", &num_threads, "Threads the next kernel may use.");
  m.def("set_num_threads", &set_num_threads, "threads"_a, "Threads for kernels called from this thread.");

  m.def("empty", &empty, "shape"_a, "dtype"_a, "An array of undefined content whose memory is reused.");
  m.def("give_back", [] { memory_pool().give_back(); }, "Hand memory that is kept for reuse to the system.");
  m.def("pool_bytes", [] { return memory_pool().bytes_held(); }, "Bytes the pool holds, in use and kept.");

  const py::kw_only kw;
  m.def("relu", &bind_relu, "x"_a, kw, "out"_a);
  m.def("relu_backward", &bind_relu_backward, "dy"_a, "y"_a, kw, "out"_a);
  m.def("add", &bind_arithmetic<Arithmetic::kAdd>, "a"_a, "b"_a, kw, "out"_a);
  m.def("sub", &bind_arithmetic<Arithmetic::kSub>, "a"_a, "b"_a, kw, "out"_a);
  m.def("mul", &bind_arithmetic<Arithmetic::kMul>, "a"_a, "b"_a, kw, "out"_a);
  m.def("div", &bind_arithmetic<Arithmetic::kDiv>, "a"_a, "b"_a, kw, "out"_a);
  m.def("sum_to", &bind_sum_to, "dy"_a, kw, "out"_a);
  m.def("clip", &bind_clip, "x"_a, kw, "out"_a, "min"_a, "max"_a);
  m.def("cast", &bind_cast, "x"_a, kw, "out"_a);
  m.def("max_abs", &bind_max_abs, "x"_a, kw, "out"_a);
  bind_windows(m);
  bind_norms(m);
  bind_plan(m);
  m.def("sgd_update", &bind_sgd_update, "out"_a, "lr"_a, "momentum"_a = 0.0, "dampening"_a = 0.0,
        "weight_decay"_a = 0.0, "nesterov"_a = false);
  m.def("adam_update", &bind_adam_update, "out"_a, "lr"_a, "beta_1"_a, "beta_2"_a, "eps"_a, "step"_a,
        "weight_decay"_a = 0.0);
  m.def("pack", &bind_pack, "out"_a);
  m.def("unpack", &bind_unpack, "flat"_a, kw, "out"_a);
  m.def("top_k", &bind_top_k, "values"_a, kw, "out"_a, "k"_a);
  m.def("threshold_count", &bind_threshold_count, "values"_a, kw, "out"_a, "threshold"_a);
  m.def("threshold_select", &bind_threshold_select, "values"_a, kw, "out"_a, "threshold"_a);
  m.def("scatter_add", &bind_scatter_add, "indices"_a, "values"_a, kw, "out"_a);
  m.def("scatter_fill", &bind_scatter_fill, "indices"_a, kw, "out"_a, "value"_a);
}
