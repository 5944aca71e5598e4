// SPDX-License-Identifier: Apache-2.0
// Matrix products, convolution and pooling.
#include <array>
#include <optional>
#include <string>

#include "bindings/arrays.h"
#include "bindings/families.h"
#include "kernels/conv.h"
#include "kernels/elementwise.h"
#include "kernels/layout.h"
#include "kernels/matmul.h"
#include "kernels/pool.h"

namespace singa_lite {
namespace {

using namespace pybind11::literals;

// The product of these arrays, whatever their types; nothing if they do not fit.
template <class A, class B, class Y>
std::optional<Matmul> matmul_of(const A& a, const B& b, const Y& out, bool transpose_a, bool transpose_b) {
  if (!all(a, b, out) || out.size == 0 || a.ndim < 2 || b.ndim != a.ndim || out.ndim != a.ndim) return {};
  const int last = a.ndim - 1;
  std::int64_t batch = 1;
  for (int axis = 0; axis < last - 1; ++axis) {  // what broadcasts is for numpy
    if (a.shape(axis) != out.shape(axis) || b.shape(axis) != out.shape(axis)) return {};
    batch *= out.shape(axis);
  }
  const Matmul product{batch, out.shape(last - 1), out.shape(last), a.shape(transpose_a ? last - 1 : last), transpose_a,
                       transpose_b};
  if (product.k == 0) return {};
  return product;
}

template <class Y>
bool matmul_bfloat16(const py::handle& a_, const py::handle& b_, const In& bias, const py::handle& out_,
                     bool transpose_a, bool transpose_b, bool relu) {
  const Array<const Bfloat16> a(a_), b(b_);
  const Array<Y> out(out_);
  const auto product = matmul_of(a, b, out, transpose_a, transpose_b);
  if (!product || (bias && bias.size != std::size_t(product->n))) return false;
  return run([=, product = *product] {
    return matmul(product, a.data(), b.data(), bias ? bias.data() : nullptr, relu, out.data());
  });
}

bool bind_matmul(const py::handle& a_, const py::handle& b_, const py::handle& bias_, const py::handle& out_,
                 bool transpose_a, bool transpose_b, bool relu) {
  const In a(a_), b(b_), bias(bias_);
  const Out out(out_);
  if (!bias_.is_none() && !bias) return false;
  const auto product = matmul_of(a, b, out, transpose_a, transpose_b);
  if (!product)
    return matmul_bfloat16<Bfloat16>(a_, b_, bias, out_, transpose_a, transpose_b, relu) ||
           matmul_bfloat16<float>(a_, b_, bias, out_, transpose_a, transpose_b, relu);
  if (bias && bias.size != std::size_t(product->n)) return false;
  return run([=, product = *product] {
    if (!matmul(product, a.data(), b.data(), out.data())) return false;
    if (bias || relu) add_row(bias.data(), relu, out.data(), out.size / std::size_t(product.n), std::size_t(product.n));
    return true;
  });
}

using Formats = std::pair<std::int64_t, std::int64_t>;  // of x and y, see Note [memory formats] in kernels/layout.h

std::optional<Conv> conv_of(const std::int64_t* x, const std::int64_t* w, const std::int64_t* y,
                            const py::handle& stride, const py::handle& padding, const py::handle& dilation,
                            std::int64_t groups, const Formats& formats) {
  Conv conv{x[0], x[1], x[2], x[3], w[0], y[2], y[3], {w[2], w[3]}, {}, {}, {}, groups};
  read_pair(stride, conv.stride);
  read_pair(padding, conv.padding);
  read_pair(dilation, conv.dilation);
  for (const std::int64_t size : {x[0], x[1], x[2], x[3], w[0], y[2], y[3], w[2], w[3]})
    if (size == 0) return {};
  conv.x_block = formats.first;
  conv.y_block = formats.second;
  return conv;
}

template <class A, class B, class C>
std::optional<Conv> conv_of(const A& x, const B& w, const C& y, const py::handle& stride, const py::handle& padding,
                            const py::handle& dilation, std::int64_t groups, const Formats& formats) {
  if (!all(x, w, y) || x.ndim != 4 || w.ndim != 4 || y.ndim != 4) return {};
  return conv_of(&x.shape_ref(), &w.shape_ref(), &y.shape_ref(), stride, padding, dilation, groups, formats);
}

// What all calls of a convolution have in common.
struct Geometry {
  const py::handle &stride, &padding, &dilation;
  std::int64_t groups;
  const Formats& formats;
};

template <class T, class A, class B, class C>
std::optional<Conv> conv_as(const A& x, const B& w, const C& y, const Geometry& g) {
  auto conv = conv_of(x, w, y, g.stride, g.padding, g.dilation, g.groups, g.formats);
  if (conv) conv->is_bfloat16 = std::is_same_v<T, Bfloat16>;
  return conv;
}

// Weights beside images of T: of T as well, or of float.
template <class T>
struct Weights {
  const Array<const T> same;
  const In floats;

  explicit Weights(const py::handle& w) : same(w), floats(w) {}
  const void* data() const { return same ? static_cast<const void*>(same.data()) : floats.data(); }
};

template <class T, class A, class C>
std::optional<Conv> conv_with(const A& x, const Weights<T>& w, const C& y, const Geometry& geometry) {
  if (w.same) return conv_as<T>(x, w.same, y, geometry);
  auto conv = conv_as<T>(x, w.floats, y, geometry);
  if (conv) conv->has_float_weights = true;
  return conv;
}

template <class T>
bool conv2d_as(const py::handle& x_, const py::handle& w_, const py::handle& b_, const py::handle& out_,
               const Geometry& geometry, bool relu) {
  const Array<const T> x(x_);
  const Weights<T> w(w_);
  const In b(b_);
  const Array<T> out(out_);
  if (!b && !b_.is_none()) return false;
  auto conv = conv_with<T>(x, w, out, geometry);
  if (!conv) return false;
  conv->relu = relu;
  return run([=] { return conv_forward(*conv, x.data(), w.data(), b.data(), out.data()); });
}

bool bind_conv2d(const py::handle& x, const py::handle& w, const py::handle& b, const py::handle& out,
                 const py::handle& stride, const py::handle& padding, const py::handle& dilation,
                 std::int64_t groups, const Formats& formats, bool relu) {
  const Geometry geometry{stride, padding, dilation, groups, formats};
  return conv2d_as<float>(x, w, b, out, geometry, relu) || conv2d_as<Bfloat16>(x, w, b, out, geometry, relu);
}

template <class T>
bool conv2d_backward_data_as(const py::handle& dy_, const py::handle& w_, const py::handle& out_,
                             const Geometry& geometry) {
  const Array<const T> dy(dy_);
  const Weights<T> w(w_);
  const Array<T> out(out_);
  const auto conv = conv_with<T>(out, w, dy, geometry);
  if (!conv) return false;
  return run([=] { return conv_backward_data(*conv, dy.data(), w.data(), out.data()); });
}

bool bind_conv2d_backward_data(const py::handle& dy, const py::handle& w, const py::handle& out,
                               const py::handle& stride, const py::handle& padding, const py::handle& dilation,
                               std::int64_t groups, const Formats& formats) {
  const Geometry geometry{stride, padding, dilation, groups, formats};
  return conv2d_backward_data_as<float>(dy, w, out, geometry) || conv2d_backward_data_as<Bfloat16>(dy, w, out, geometry);
}

template <class T>
bool conv2d_backward_weight_as(const py::handle& dy_, const py::handle& x_, const py::handle& out_,
                               const Geometry& geometry) {
  const Array<const T> dy(dy_), x(x_);
  const bool has_bias = PyTuple_Check(out_.ptr());
  const Out dw(has_bias ? at(out_, 0) : out_), db(has_bias ? at(out_, 1) : py::handle());
  if (has_bias && !db) return false;
  const auto conv = conv_as<T>(x, dw, dy, geometry);
  if (!conv) return false;
  return run([=] { return conv_backward_weight(*conv, dy.data(), x.data(), dw.data(), db.data()); });
}

bool bind_conv2d_backward_weight(const py::handle& dy, const py::handle& x, const py::handle& out,
                                 const py::handle& stride, const py::handle& padding, const py::handle& dilation,
                                 std::int64_t groups, const Formats& formats) {
  const Geometry geometry{stride, padding, dilation, groups, formats};
  return conv2d_backward_weight_as<float>(dy, x, out, geometry) ||
         conv2d_backward_weight_as<Bfloat16>(dy, x, out, geometry);
}

template <class X, class Y>
std::optional<Pool> pool_of(const X& x, const Y& y, const py::handle& kernel_size, const py::handle& stride,
                            const py::handle& padding, bool count_include_pad, std::int64_t block) {
  if (!all(x, y) || x.ndim != 4 || y.ndim != 4 || x.size == 0 || y.size == 0) return {};
  if (block < 1 || x.shape(1) % block) return {};
  Pool pool{x.shape(0) * x.shape(1) / block, x.shape(2), x.shape(3), y.shape(2), y.shape(3), {}, {}, {}, count_include_pad,
            block};
  read_pair(kernel_size, pool.kernel);
  read_pair(stride, pool.stride);
  read_pair(padding, pool.padding);
  return pool;
}

template <class T, class Index>
bool max_pool_as(const py::handle& x_, const py::handle& out_, const py::handle& kernel_size,
                 const py::handle& stride, const py::handle& padding, std::int64_t block) {
  const Array<const T> x(x_);
  const Array<T> y(at(out_, 0));
  const Array<Index> indices(at(out_, 1));
  const auto pool = pool_of(x, y, kernel_size, stride, padding, true, block);
  if (!pool || !indices || indices.size != y.size) return false;
  return run([=] { max_pool(*pool, x.data(), y.data(), indices.data()); });
}

bool bind_max_pool(const py::handle& x, const py::handle& out, const py::handle& kernel_size,
                   const py::handle& stride, const py::handle& padding, std::int64_t block) {
  return max_pool_as<float, std::uint8_t>(x, out, kernel_size, stride, padding, block) ||
         max_pool_as<float, std::int32_t>(x, out, kernel_size, stride, padding, block) ||
         max_pool_as<Bfloat16, std::uint8_t>(x, out, kernel_size, stride, padding, block) ||
         max_pool_as<Bfloat16, std::int32_t>(x, out, kernel_size, stride, padding, block);
}

template <class T, class Index>
bool max_pool_backward_as(const py::handle& dy_, const py::handle& indices_, const py::handle& out_,
                          const py::handle& kernel_size, const py::handle& stride, const py::handle& padding, std::int64_t block) {
  const Array<const T> dy(dy_);
  const Array<const Index> indices(indices_);
  const Array<T> out(out_);
  const auto pool = pool_of(out, dy, kernel_size, stride, padding, true, block);
  if (!pool || !indices || indices.size != dy.size) return false;
  return run([=] { max_pool_backward(*pool, dy.data(), indices.data(), out.data()); });
}

bool bind_max_pool_backward(const py::handle& dy, const py::handle& indices, const py::handle& out,
                            const py::handle& kernel_size, const py::handle& stride, const py::handle& padding, std::int64_t block) {
  return max_pool_backward_as<float, std::uint8_t>(dy, indices, out, kernel_size, stride, padding, block) ||
         max_pool_backward_as<float, std::int32_t>(dy, indices, out, kernel_size, stride, padding, block) ||
         max_pool_backward_as<Bfloat16, std::uint8_t>(dy, indices, out, kernel_size, stride, padding, block) ||
         max_pool_backward_as<Bfloat16, std::int32_t>(dy, indices, out, kernel_size, stride, padding, block);
}

template <class T>
bool avg_pool_as(const py::handle& x_, const py::handle& out_, const py::handle& kernel_size, const py::handle& stride,
                 const py::handle& padding, bool count_include_pad, std::int64_t block) {
  const Array<const T> x(x_);
  const Array<T> out(out_);
  const auto pool = pool_of(x, out, kernel_size, stride, padding, count_include_pad, block);
  if (!pool) return false;
  return run([=] { avg_pool(*pool, x.data(), out.data()); });
}

bool bind_avg_pool(const py::handle& x, const py::handle& out, const py::handle& kernel_size, const py::handle& stride,
                   const py::handle& padding, bool count_include_pad, std::int64_t block) {
  return avg_pool_as<float>(x, out, kernel_size, stride, padding, count_include_pad, block) ||
         avg_pool_as<Bfloat16>(x, out, kernel_size, stride, padding, count_include_pad, block);
}

template <class T>
bool avg_pool_backward_as(const py::handle& dy_, const py::handle& out_, const py::handle& kernel_size,
                          const py::handle& stride, const py::handle& padding, bool count_include_pad,
                          std::int64_t block) {
  const Array<const T> dy(dy_);
  const Array<T> out(out_);
  const auto pool = pool_of(out, dy, kernel_size, stride, padding, count_include_pad, block);
  if (!pool) return false;
  return run([=] { avg_pool_backward(*pool, dy.data(), out.data()); });
}

bool bind_avg_pool_backward(const py::handle& dy, const py::handle& out, const py::handle& kernel_size,
                            const py::handle& stride, const py::handle& padding, bool count_include_pad,
                            std::int64_t block) {
  return avg_pool_backward_as<float>(dy, out, kernel_size, stride, padding, count_include_pad, block) ||
         avg_pool_backward_as<Bfloat16>(dy, out, kernel_size, stride, padding, count_include_pad, block);
}

// The memory formats of x and y with which a convolution ("conv2d" or one of its gradients) reorders no array, or None.
std::optional<Formats> bind_conv_formats(const std::string& kernel, const std::array<std::int64_t, 4>& x,
                                       const std::array<std::int64_t, 4>& w, const std::array<std::int64_t, 4>& y,
                                       bool has_bias, const py::handle& stride, const py::handle& padding,
                                       const py::handle& dilation, std::int64_t groups, const py::object& dtype) {
  auto conv = conv_of(x.data(), w.data(), y.data(), stride, padding, dilation, groups, {1, 1});
  if (!conv) return {};
  conv->is_bfloat16 = py::dtype::from_args(dtype).num() == bfloat16_number();
  const auto kind = kernel == "conv2d"                 ? ConvKind::kForward
                    : kernel == "conv2d_backward_data" ? ConvKind::kBackwardData
                                                       : ConvKind::kBackwardWeight;
  return conv_formats(*conv, kind, has_bias);
}

template <class T>
bool reorder_as(const py::handle& x_, const py::handle& out_, const Formats& formats) {
  const Array<const T> x(x_);
  const Array<T> out(out_);
  if (!all(x, out) || x.ndim != 4 || x.size == 0 || out.size != x.size) return false;
  const Image image{x.shape(0), x.shape(1), x.shape(2), x.shape(3), std::is_same_v<T, Bfloat16>};
  for (const std::int64_t block : {formats.first, formats.second}) {
    const bool is_known = block == 1 || block == 8 || block == 16 || block == image.channels;
    if (!is_known || image.channels % block != 0) return false;
  }
  return run([=] { return reorder(image, x.data(), formats.first, out.data(), formats.second); });
}

bool bind_reorder(const py::handle& x, const py::handle& out, const Formats& formats) {
  return reorder_as<float>(x, out, formats) || reorder_as<Bfloat16>(x, out, formats);
}

}  // namespace

void bind_windows(py::module_& m) {
  const py::kw_only kw;
#ifdef SINGA_LITE_ONEDNN
  m.def("matmul", &bind_matmul, "a"_a, "b"_a, "bias"_a = py::none(), kw, "out"_a, "transpose_a"_a = false,
        "transpose_b"_a = false, "relu"_a = false);
  m.def("conv_formats", &bind_conv_formats, "kernel"_a, "x"_a, "w"_a, "y"_a, "has_bias"_a, kw, "stride"_a, "padding"_a,
        "dilation"_a, "groups"_a, "dtype"_a);
  m.def("multiplies_bfloat16", &multiplies_bfloat16,
        "Whether products multiply bfloat16 numbers; if not, they are widened to float32, as is faster there.");
  m.def("reorder", &bind_reorder, "x"_a, kw, "out"_a, "memory_formats"_a);
  m.def("use_winograd", &use_winograd, "is_wanted"_a, "Compute convolutions of 3 x 3 by Winograd's filtering, or never.");
#else
  (void)&bind_matmul, (void)&bind_conv_formats, (void)&bind_reorder;
#endif
  m.def("conv2d", &bind_conv2d, "x"_a, "w"_a, "b"_a = py::none(), kw, "out"_a, "stride"_a, "padding"_a, "dilation"_a,
        "groups"_a, "memory_formats"_a = Formats(1, 1), "relu"_a = false);
  m.def("conv2d_backward_data", &bind_conv2d_backward_data, "dy"_a, "w"_a, kw, "out"_a, "stride"_a, "padding"_a,
        "dilation"_a, "groups"_a, "memory_formats"_a = Formats(1, 1));
  m.def("conv2d_backward_weight", &bind_conv2d_backward_weight, "dy"_a, "x"_a, kw, "out"_a, "stride"_a, "padding"_a,
        "dilation"_a, "groups"_a, "memory_formats"_a = Formats(1, 1));
  m.def("max_pool_2d", &bind_max_pool, "x"_a, kw, "out"_a, "kernel_size"_a, "stride"_a, "padding"_a, "memory_format"_a = 1);
  m.def("max_pool_2d_backward", &bind_max_pool_backward, "dy"_a, "indices"_a, kw, "out"_a, "kernel_size"_a,
        "stride"_a, "padding"_a, "memory_format"_a = 1);
  m.def("avg_pool_2d", &bind_avg_pool, "x"_a, kw, "out"_a, "kernel_size"_a, "stride"_a, "padding"_a,
        "count_include_pad"_a, "memory_format"_a = 1);
  m.def("avg_pool_2d_backward", &bind_avg_pool_backward, "dy"_a, kw, "out"_a, "kernel_size"_a, "stride"_a,
        "padding"_a, "count_include_pad"_a, "memory_format"_a = 1);
}

}  // namespace singa_lite
