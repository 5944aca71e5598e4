// SPDX-License-Identifier: Apache-2.0
// Python's view of native/kernels. A function has the name and the form of a kernel of singa_lite/backend/base.py and
// returns False, having done nothing, when the call is not one for it (another dtype, a strided array, odd shapes): the
// caller then takes the numpy path. The GIL is released while a kernel runs.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "kernels/conv.h"
#include "kernels/elementwise.h"
#include "kernels/loss.h"
#include "kernels/matmul.h"
#include "kernels/memory.h"
#include "kernels/norm.h"
#include "kernels/pack.h"
#include "kernels/pool.h"
#include "kernels/select.h"
#include "kernels/threads.h"
#include "kernels/update.h"

namespace py = pybind11;
using namespace singa_lite;
using namespace pybind11::literals;

namespace {

constexpr int kAligned = 0x0100;  // NPY_ARRAY_ALIGNED

// A row-major, aligned numpy array of one dtype; false if the object is anything else.
template <class T>
class Array {
 public:
  explicit Array(const py::handle& object) {
    if (!object || !py::isinstance<py::array>(object)) return;
    const auto array = py::reinterpret_borrow<py::array>(object);
    constexpr int kWanted = py::array::c_style | kAligned;
    if ((array.flags() & kWanted) != kWanted || !is_native(array)) return;
    data_ = static_cast<T*>(const_cast<void*>(array.data()));
    shape_ = array.shape();
    ndim = int(array.ndim());
    size = std::size_t(array.size());
    is_valid_ = std::is_const_v<T> || array.writeable();
  }

  explicit operator bool() const { return is_valid_; }
  T* data() const { return data_; }
  std::int64_t shape(int axis) const { return shape_[axis]; }
  bool has_shape_of(const Array<const T>& other) const { return has_shape(other.ndim, &other.shape_ref()); }
  bool has_shape(int n, const py::ssize_t* shape) const {
    return n == ndim && std::equal(shape_, shape_ + ndim, shape);
  }
  const py::ssize_t& shape_ref() const { return *shape_; }

  int ndim = 0;
  std::size_t size = 0;

 private:
  static bool is_native(const py::array& array) {
    const py::dtype dtype = array.dtype();
    return dtype.num() == number() && (dtype.byteorder() == '=' || dtype.byteorder() == '|');
  }
  static int number() {
    using Plain = std::remove_const_t<T>;
    if constexpr (std::is_same_v<Plain, std::uint16_t>) return 23;  // NPY_HALF
    else return py::dtype::num_of<Plain>();
  }
  T* data_ = nullptr;
  const py::ssize_t* shape_ = nullptr;
  bool is_valid_ = false;
};

using In = Array<const float>;
using Out = Array<float>;

// Whether all are arrays of their dtype.
template <class... Arrays>
bool all(const Arrays&... arrays) {
  return (bool(arrays) && ...);
}

// Entry of a tuple, or nothing.
py::handle at(const py::handle& tuple, std::size_t index) {
  if (!PyTuple_Check(tuple.ptr()) || std::size_t(PyTuple_GET_SIZE(tuple.ptr())) <= index) return {};
  return PyTuple_GET_ITEM(tuple.ptr(), Py_ssize_t(index));
}

std::size_t length(const py::handle& tuple) {
  return PyTuple_Check(tuple.ptr()) ? std::size_t(PyTuple_GET_SIZE(tuple.ptr())) : 0;
}

void read_pair(const py::handle& pair, std::int64_t to[2]) {
  const auto two = pair.cast<std::pair<std::int64_t, std::int64_t>>();
  to[0] = two.first;
  to[1] = two.second;
}

// The kernel's code, without the GIL.
template <class Body>
bool run(const Body& body) {
  py::gil_scoped_release release;
  if constexpr (std::is_same_v<decltype(body()), bool>) return body();
  else body();
  return true;
}

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
  return run([&] { relu(x.data(), out.data(), x.size); });
}

bool bind_relu_backward(const py::handle& dy_, const py::handle& y_, const py::handle& out_) {
  const In dy(dy_), y(y_);
  const Out out(out_);
  if (!all(dy, y, out) || dy.size != out.size || y.size != out.size) return false;
  return run([&] { relu_backward(dy.data(), y.data(), out.data(), dy.size); });
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
  return run([&] { arithmetic(op, a.data(), b.data(), out.data(), a.size, is_same ? a.size : b.size); });
}

bool bind_sum_to(const py::handle& dy_, const py::handle& out_) {
  const In dy(dy_);
  const Out out(out_);
  if (!all(dy, out) || dy.size == 0 || out.ndim != 1 || dy.ndim < 2 || out.shape(0) != dy.shape(dy.ndim - 1))
    return false;
  return run([&] { sum_rows(dy.data(), out.data(), dy.size / out.size, out.size); });
}

bool bind_clip(const py::handle& x_, const py::handle& out_, std::optional<double> min, std::optional<double> max) {
  const In x(x_);
  const Out out(out_);
  if (!all(x, out) || x.size != out.size) return false;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const float low = float(min.value_or(-kInfinity)), high = float(max.value_or(kInfinity));
  if (!(low <= high)) return false;
  return run([&] { clip(x.data(), out.data(), low, high, x.size); });
}

bool bind_cast(const py::handle& x_, const py::handle& out_) {
  const In x(x_);
  const Array<std::uint16_t> half(out_);
  if (all(x, half) && x.size == half.size) return run([&] { to_half(x.data(), half.data(), x.size); });
  const Array<const std::uint16_t> from(x_);
  const Out out(out_);
  if (!all(from, out) || from.size != out.size) return false;
  return run([&] { from_half(from.data(), out.data(), out.size); });
}

bool bind_max_abs(const py::handle& x_, const py::handle& out_) {
  const In x(x_);
  const Out out(out_);
  if (!all(x, out) || out.size != 1) return false;
  return run([&] { *out.data() = max_abs(x.data(), x.size); });
}

// ---- matrices and windows --------------------------------------------------------------------------------------------

bool bind_matmul(const py::handle& a_, const py::handle& b_, const py::handle& out_, bool transpose_a,
                 bool transpose_b) {
  const In a(a_), b(b_);
  const Out out(out_);
  if (!all(a, b, out) || out.size == 0 || a.ndim < 2 || a.ndim > 3 || b.ndim != a.ndim || out.ndim != a.ndim)
    return false;
  const int last = a.ndim - 1;
  Matmul product{a.ndim == 3 ? a.shape(0) : 1, out.shape(last - 1), out.shape(last),
                 a.shape(transpose_a ? last - 1 : last), transpose_a, transpose_b};
  if (product.k == 0 || (a.ndim == 3 && b.shape(0) != a.shape(0))) return false;
  return run([&] { return matmul(product, a.data(), b.data(), out.data()); });
}

std::optional<Conv> conv_of(const std::int64_t* x, const std::int64_t* w, const std::int64_t* y,
                            const py::handle& stride, const py::handle& padding, const py::handle& dilation,
                            std::int64_t groups) {
  Conv conv{x[0], x[1], x[2], x[3], w[0], y[2], y[3], {w[2], w[3]}, {}, {}, {}, groups};
  read_pair(stride, conv.stride);
  read_pair(padding, conv.padding);
  read_pair(dilation, conv.dilation);
  for (const std::int64_t size : {x[0], x[1], x[2], x[3], w[0], y[2], y[3], w[2], w[3]})
    if (size == 0) return {};
  return conv;
}

template <class A, class B, class C>
std::optional<Conv> conv_of(const A& x, const B& w, const C& y, const py::handle& stride, const py::handle& padding,
                            const py::handle& dilation, std::int64_t groups) {
  if (!all(x, w, y) || x.ndim != 4 || w.ndim != 4 || y.ndim != 4) return {};
  return conv_of(&x.shape_ref(), &w.shape_ref(), &y.shape_ref(), stride, padding, dilation, groups);
}

bool bind_conv2d(const py::handle& x_, const py::handle& w_, const py::handle& b_, const py::handle& out_,
                 const py::handle& stride, const py::handle& padding, const py::handle& dilation,
                 std::int64_t groups) {
  const In x(x_), w(w_), b(b_);
  const Out out(out_);
  if (!b && !b_.is_none()) return false;
  const auto conv = conv_of(x, w, out, stride, padding, dilation, groups);
  if (!conv) return false;
  return run([&] { return conv_forward(*conv, x.data(), w.data(), b.data(), out.data()); });
}

bool bind_conv2d_backward_data(const py::handle& dy_, const py::handle& w_, const py::handle& out_,
                               const py::handle& stride, const py::handle& padding, const py::handle& dilation,
                               std::int64_t groups) {
  const In dy(dy_), w(w_);
  const Out out(out_);
  const auto conv = conv_of(out, w, dy, stride, padding, dilation, groups);
  if (!conv) return false;
  return run([&] { return conv_backward_data(*conv, dy.data(), w.data(), out.data()); });
}

bool bind_conv2d_backward_weight(const py::handle& dy_, const py::handle& x_, const py::handle& out_,
                                 const py::handle& stride, const py::handle& padding, const py::handle& dilation,
                                 std::int64_t groups) {
  const In dy(dy_), x(x_);
  const bool has_bias = PyTuple_Check(out_.ptr());
  const Out dw(has_bias ? at(out_, 0) : out_), db(has_bias ? at(out_, 1) : py::handle());
  if (has_bias && !db) return false;
  const auto conv = conv_of(x, dw, dy, stride, padding, dilation, groups);
  if (!conv) return false;
  return run([&] { return conv_backward_weight(*conv, dy.data(), x.data(), dw.data(), db.data()); });
}

template <class X, class Y>
std::optional<Pool> pool_of(const X& x, const Y& y, const py::handle& kernel_size, const py::handle& stride,
                            const py::handle& padding, bool count_include_pad) {
  if (!all(x, y) || x.ndim != 4 || y.ndim != 4 || x.size == 0 || y.size == 0) return {};
  Pool pool{x.shape(0) * x.shape(1), x.shape(2), x.shape(3), y.shape(2), y.shape(3), {}, {}, {}, count_include_pad};
  read_pair(kernel_size, pool.kernel);
  read_pair(stride, pool.stride);
  read_pair(padding, pool.padding);
  return pool;
}

template <class Index>
bool max_pool_as(const py::handle& x_, const py::handle& out_, const py::handle& kernel_size,
                 const py::handle& stride, const py::handle& padding) {
  const In x(x_);
  const Out y(at(out_, 0));
  const Array<Index> indices(at(out_, 1));
  const auto pool = pool_of(x, y, kernel_size, stride, padding, true);
  if (!pool || !indices || indices.size != y.size) return false;
  return run([&] { max_pool(*pool, x.data(), y.data(), indices.data()); });
}

bool bind_max_pool(const py::handle& x, const py::handle& out, const py::handle& kernel_size,
                   const py::handle& stride, const py::handle& padding) {
  return max_pool_as<std::uint8_t>(x, out, kernel_size, stride, padding) ||
         max_pool_as<std::int32_t>(x, out, kernel_size, stride, padding);
}

template <class Index>
bool max_pool_backward_as(const py::handle& dy_, const py::handle& indices_, const py::handle& out_,
                          const py::handle& kernel_size, const py::handle& stride, const py::handle& padding) {
  const In dy(dy_);
  const Array<const Index> indices(indices_);
  const Out out(out_);
  const auto pool = pool_of(out, dy, kernel_size, stride, padding, true);
  if (!pool || !indices || indices.size != dy.size) return false;
  return run([&] { max_pool_backward(*pool, dy.data(), indices.data(), out.data()); });
}

bool bind_max_pool_backward(const py::handle& dy, const py::handle& indices, const py::handle& out,
                            const py::handle& kernel_size, const py::handle& stride, const py::handle& padding) {
  return max_pool_backward_as<std::uint8_t>(dy, indices, out, kernel_size, stride, padding) ||
         max_pool_backward_as<std::int32_t>(dy, indices, out, kernel_size, stride, padding);
}

bool bind_avg_pool(const py::handle& x_, const py::handle& out_, const py::handle& kernel_size,
                   const py::handle& stride, const py::handle& padding, bool count_include_pad) {
  const In x(x_);
  const Out out(out_);
  const auto pool = pool_of(x, out, kernel_size, stride, padding, count_include_pad);
  if (!pool) return false;
  return run([&] { avg_pool(*pool, x.data(), out.data()); });
}

bool bind_avg_pool_backward(const py::handle& dy_, const py::handle& out_, const py::handle& kernel_size,
                            const py::handle& stride, const py::handle& padding, bool count_include_pad) {
  const In dy(dy_);
  const Out out(out_);
  const auto pool = pool_of(out, dy, kernel_size, stride, padding, count_include_pad);
  if (!pool) return false;
  return run([&] { avg_pool_backward(*pool, dy.data(), out.data()); });
}

// ---- normalisation and losses ----------------------------------------------------------------------------------------

std::optional<Norm> norm_of(const In& x) {
  if (!x || x.ndim < 2 || x.size == 0) return {};
  const auto batch = std::size_t(x.shape(0)), channels = std::size_t(x.shape(1));
  return Norm{batch, channels, x.size / (batch * channels)};
}

template <class... Arrays>
bool are_per_channel(const Norm& norm, const Arrays&... arrays) {
  return ((bool(arrays) && arrays.size == norm.channels) && ...);
}

bool bind_batchnorm_train(const py::handle& x_, const py::handle& scale_, const py::handle& bias_,
                          const py::handle& out, double momentum, double eps) {
  const In x(x_), scale(scale_), bias(bias_);
  const Out y(at(out, 0)), mean(at(out, 1)), inverse_std(at(out, 2)), running_mean(at(out, 3)),
      running_var(at(out, 4));
  const auto norm = norm_of(x);
  if (!norm || !y || y.size != x.size ||
      !are_per_channel(*norm, scale, bias, mean, inverse_std, running_mean, running_var))
    return false;
  return run([&] {
    batchnorm_train(*norm, x.data(), scale.data(), bias.data(), y.data(), mean.data(), inverse_std.data(),
                    running_mean.data(), running_var.data(), momentum, eps);
  });
}

bool bind_batchnorm_infer(const py::handle& x_, const py::handle& scale_, const py::handle& bias_,
                          const py::handle& mean_, const py::handle& var_, const py::handle& out_, double eps) {
  const In x(x_), scale(scale_), bias(bias_), mean(mean_), var(var_);
  const Out out(out_);
  const auto norm = norm_of(x);
  if (!norm || !out || out.size != x.size || !are_per_channel(*norm, scale, bias, mean, var)) return false;
  return run([&] {
    batchnorm_infer(*norm, x.data(), scale.data(), bias.data(), mean.data(), var.data(), out.data(), eps);
  });
}

bool bind_batchnorm_backward(const py::handle& dy_, const py::handle& x_, const py::handle& scale_,
                             const py::handle& mean_, const py::handle& inverse_std_, const py::handle& out) {
  const In dy(dy_), x(x_), scale(scale_), mean(mean_), inverse_std(inverse_std_);
  const Out dx(at(out, 0)), dscale(at(out, 1)), dbias(at(out, 2));
  const auto norm = norm_of(x);
  if (!norm || !all(dy, dx) || dy.size != x.size || dx.size != x.size ||
      !are_per_channel(*norm, scale, mean, inverse_std, dscale, dbias))
    return false;
  return run([&] {
    batchnorm_backward(*norm, dy.data(), x.data(), scale.data(), mean.data(), inverse_std.data(), dx.data(),
                       dscale.data(), dbias.data());
  });
}

bool bind_softmax(const py::handle& x_, const py::handle& out_, int axis) {
  const In x(x_);
  const Out out(out_);
  if (!all(x, out) || x.size == 0 || x.size != out.size || (axis != -1 && axis != x.ndim - 1)) return false;
  const auto columns = std::size_t(x.shape(x.ndim - 1));
  return run([&] { softmax(x.data(), out.data(), x.size / columns, columns); });
}

// Whether labels are class ids of the rows of x, all in range; those that are not are for numpy to complain about.
template <class Id>
bool are_ids(const In& x, const Array<const Id>& labels) {
  if (!x || !labels || x.ndim != 2 || x.size == 0 || labels.ndim != 1 || labels.shape(0) != x.shape(0)) return false;
  for (std::size_t i = 0; i < labels.size; ++i)
    if (labels.data()[i] < 0 || labels.data()[i] >= x.shape(1)) return false;
  return true;
}

template <class Id>
bool cross_entropy_as(const py::handle& x_, const py::handle& labels_, const py::handle& out) {
  const In x(x_);
  const Array<const Id> labels(labels_);
  const Out loss(at(out, 0)), probabilities(at(out, 1));
  if (!are_ids(x, labels) || !all(loss, probabilities) || loss.size != 1 || probabilities.size != x.size) return false;
  const auto rows = std::size_t(x.shape(0)), columns = std::size_t(x.shape(1));
  return run([&] {
    *loss.data() = softmax_cross_entropy(x.data(), labels.data(), probabilities.data(), rows, columns);
  });
}

bool bind_softmax_cross_entropy(const py::handle& x, const py::handle& labels, const py::handle& out) {
  return cross_entropy_as<std::int32_t>(x, labels, out) || cross_entropy_as<std::int64_t>(x, labels, out);
}

template <class Id>
bool cross_entropy_backward_as(const py::handle& dy_, const py::handle& probabilities_, const py::handle& labels_,
                               const py::handle& out_) {
  const In dy(dy_), probabilities(probabilities_);
  const Array<const Id> labels(labels_);
  const Out out(out_);
  if (!are_ids(probabilities, labels) || !all(dy, out) || dy.size != 1 || out.size != probabilities.size) return false;
  const auto rows = std::size_t(probabilities.shape(0)), columns = std::size_t(probabilities.shape(1));
  return run([&] {
    softmax_cross_entropy_backward(*dy.data(), probabilities.data(), labels.data(), out.data(), rows, columns);
  });
}

bool bind_softmax_cross_entropy_backward(const py::handle& dy, const py::handle& probabilities,
                                         const py::handle& labels, const py::handle& out) {
  return cross_entropy_backward_as<std::int32_t>(dy, probabilities, labels, out) ||
         cross_entropy_backward_as<std::int64_t>(dy, probabilities, labels, out);
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
  return run([&] { sgd_update(*parts, step); });
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
  return run([&] { adam_update(*parts, now); });
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
  return start == out.size && run([&] { copy_parts(parts); });
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
  return run([&] { copy_parts(parts); });
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
  std::vector<std::uint32_t> positions;
  run([&] { positions = top_k(values.data(), values.size, std::size_t(k)); });
  return hand_over(positions, values, out);
}

bool bind_threshold_count(const py::handle& values_, const py::handle& out_, double threshold) {
  const In values(values_);
  const Array<std::int64_t> out(out_);
  if (!all(values, out) || out.size != 1 || threshold != threshold) return false;
  return run([&] {
    *out.data() = std::int64_t(threshold_count(values.data(), values.size, float(threshold)));
  });
}

bool bind_threshold_select(const py::handle& values_, const py::handle& out, double threshold) {
  const In values(values_);
  if (!values || values.size >= kMostSelectable || threshold != threshold) return false;
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
  return run([&] { return scatter_add(indices.data(), values.data(), indices.size, out.data(), out.size); });
}

bool bind_scatter_add(const py::handle& indices, const py::handle& values, const py::handle& out) {
  return scatter_add_as<std::int32_t>(indices, values, out) || scatter_add_as<std::int64_t>(indices, values, out);
}

template <class Index>
bool scatter_fill_as(const py::handle& indices_, const py::handle& out_, double value) {
  const Array<const Index> indices(indices_);
  const Out out(out_);
  if (!all(indices, out) || out.ndim != 1) return false;
  return run([&] { return scatter_fill(indices.data(), float(value), indices.size, out.data(), out.size); });
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

  m.def("empty", &empty, "shape"_a, "dtype"_a, "An array of undefined content whose memory is reused.");
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
  m.def("conv2d", &bind_conv2d, "x"_a, "w"_a, "b"_a = py::none(), kw, "out"_a, "stride"_a, "padding"_a, "dilation"_a,
        "groups"_a);
  m.def("conv2d_backward_data", &bind_conv2d_backward_data, "dy"_a, "w"_a, kw, "out"_a, "stride"_a, "padding"_a,
        "dilation"_a, "groups"_a);
  m.def("conv2d_backward_weight", &bind_conv2d_backward_weight, "dy"_a, "x"_a, kw, "out"_a, "stride"_a, "padding"_a,
        "dilation"_a, "groups"_a);
  m.def("max_pool_2d", &bind_max_pool, "x"_a, kw, "out"_a, "kernel_size"_a, "stride"_a, "padding"_a);
  m.def("max_pool_2d_backward", &bind_max_pool_backward, "dy"_a, "indices"_a, kw, "out"_a, "kernel_size"_a,
        "stride"_a, "padding"_a);
  m.def("avg_pool_2d", &bind_avg_pool, "x"_a, kw, "out"_a, "kernel_size"_a, "stride"_a, "padding"_a,
        "count_include_pad"_a);
  m.def("avg_pool_2d_backward", &bind_avg_pool_backward, "dy"_a, kw, "out"_a, "kernel_size"_a, "stride"_a,
        "padding"_a, "count_include_pad"_a);
  m.def("batchnorm_2d_train", &bind_batchnorm_train, "x"_a, "scale"_a, "bias"_a, kw, "out"_a, "momentum"_a, "eps"_a);
  m.def("batchnorm_2d_infer", &bind_batchnorm_infer, "x"_a, "scale"_a, "bias"_a, "mean"_a, "var"_a, kw, "out"_a,
        "eps"_a);
  m.def("batchnorm_2d_backward", &bind_batchnorm_backward, "dy"_a, "x"_a, "scale"_a, "mean"_a, "inverse_std"_a, kw,
        "out"_a);
  m.def("softmax", &bind_softmax, "x"_a, kw, "out"_a, "axis"_a);
  m.def("softmax_cross_entropy", &bind_softmax_cross_entropy, "x"_a, "labels"_a, kw, "out"_a);
  m.def("softmax_cross_entropy_backward", &bind_softmax_cross_entropy_backward, "dy"_a, "probabilities"_a,
        "labels"_a, kw, "out"_a);
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
#ifdef SINGA_LITE_ONEDNN
  m.def("matmul", &bind_matmul, "a"_a, "b"_a, kw, "out"_a, "transpose_a"_a = false, "transpose_b"_a = false);
#else
  (void)&bind_matmul;
#endif
}
