// SPDX-License-Identifier: Apache-2.0
// Batch norm, and the loss of softmax.
#include <algorithm>
#include <optional>

#include "bindings/arrays.h"
#include "bindings/families.h"
#include "kernels/loss.h"
#include "kernels/norm.h"

namespace singa_lite {
namespace {

using namespace pybind11::literals;

template <class X>
std::optional<Norm> norm_of(const X& x, std::int64_t block = 1) {
  if (!x || x.ndim < 2 || x.size == 0 || block < 1 || x.shape(1) % block) return {};
  const auto batch = std::size_t(x.shape(0)), channels = std::size_t(x.shape(1));
  return Norm{batch, channels, x.size / (batch * channels), std::size_t(block)};
}

template <class... Arrays>
bool are_per_channel(const Norm& norm, const Arrays&... arrays) {
  return ((bool(arrays) && arrays.size == norm.channels) && ...);
}

template <class T>
bool batchnorm_train_as(const py::handle& x_, const py::handle& scale_, const py::handle& bias_,
                        const py::handle& residual_, const py::handle& out, double momentum, double eps, bool relu,
                        std::int64_t block) {
  const Array<const T> x(x_), residual(residual_);
  const Array<T> y(at(out, 0));
  const In scale(scale_), bias(bias_);
  const Out mean(at(out, 1)), inverse_std(at(out, 2)), running_mean(at(out, 3)),
      running_var(at(out, 4));
  const auto norm = norm_of(x, block);
  if (!residual_.is_none() && (!residual || residual.size != x.size)) return false;
  if (!norm || !y || y.size != x.size ||
      !are_per_channel(*norm, scale, bias, mean, inverse_std, running_mean, running_var))
    return false;
  return run([=] {
    batchnorm_train(*norm, x.data(), scale.data(), bias.data(), residual.data(), relu, y.data(), mean.data(),
                    inverse_std.data(), running_mean.data(), running_var.data(), momentum, eps);
  });
}

bool bind_batchnorm_train(const py::handle& x, const py::handle& scale, const py::handle& bias,
                          const py::handle& residual, const py::handle& out, double momentum, double eps, bool relu,
                          std::int64_t block) {
  return batchnorm_train_as<float>(x, scale, bias, residual, out, momentum, eps, relu, block) ||
         batchnorm_train_as<Bfloat16>(x, scale, bias, residual, out, momentum, eps, relu, block);
}

template <class T>
bool batchnorm_infer_as(const py::handle& x_, const py::handle& scale_, const py::handle& bias_,
                        const py::handle& mean_, const py::handle& var_, const py::handle& out_, double eps) {
  const Array<const T> x(x_);
  const In scale(scale_), bias(bias_), mean(mean_), var(var_);
  const Array<T> out(out_);
  const auto norm = norm_of(x);
  if (!norm || !out || out.size != x.size || !are_per_channel(*norm, scale, bias, mean, var)) return false;
  return run([=] {
    batchnorm_infer(*norm, x.data(), scale.data(), bias.data(), mean.data(), var.data(), out.data(), eps);
  });
}

bool bind_batchnorm_infer(const py::handle& x, const py::handle& scale, const py::handle& bias, const py::handle& mean,
                          const py::handle& var, const py::handle& out, double eps) {
  return batchnorm_infer_as<float>(x, scale, bias, mean, var, out, eps) ||
         batchnorm_infer_as<Bfloat16>(x, scale, bias, mean, var, out, eps);
}

template <class T>
bool batchnorm_backward_as(const py::handle& dy_, const py::handle& x_, const py::handle& scale_,
                           const py::handle& mean_, const py::handle& inverse_std_, const py::handle& bias_,
                           const py::handle& out, std::int64_t block) {
  const Array<const T> dy(dy_), x(x_);
  const Array<T> dx(at(out, 0));
  const In scale(scale_), mean(mean_), inverse_std(inverse_std_), bias(bias_);
  const Out dscale(at(out, 1)), dbias(at(out, 2));
  const auto norm = norm_of(x, block);
  if (!bias_.is_none() && (!norm || !are_per_channel(*norm, bias))) return false;
  if (!norm || !all(dy, dx) || dy.size != x.size || dx.size != x.size ||
      !are_per_channel(*norm, scale, mean, inverse_std, dscale, dbias))
    return false;
  return run([=] {
    batchnorm_backward(*norm, dy.data(), x.data(), scale.data(), bias.data(), mean.data(), inverse_std.data(),
                       dx.data(), dscale.data(), dbias.data());
  });
}

bool bind_batchnorm_backward(const py::handle& dy, const py::handle& x, const py::handle& scale, const py::handle& mean,
                             const py::handle& inverse_std, const py::handle& bias, const py::handle& out,
                             std::int64_t block) {
  return batchnorm_backward_as<float>(dy, x, scale, mean, inverse_std, bias, out, block) ||
         batchnorm_backward_as<Bfloat16>(dy, x, scale, mean, inverse_std, bias, out, block);
}

// Whether labels may be class ids of the rows of x.
template <class Id>
bool fit(const In& x, const Array<const Id>& labels) {
  return x && labels && x.ndim == 2 && x.size > 0 && labels.ndim == 1 && labels.shape(0) == x.shape(0);
}

// Whether all are in range; those that are not are for numpy to complain about.
template <class Id>
bool are_ids(const Id* labels, std::size_t count, std::size_t classes) {
  return std::all_of(labels, labels + count, [&](Id id) { return id >= 0 && std::size_t(id) < classes; });
}

template <class Id>
bool cross_entropy_as(const py::handle& x_, const py::handle& labels_, const py::handle& out) {
  const In x(x_);
  const Array<const Id> labels(labels_);
  const Out loss(at(out, 0)), probabilities(at(out, 1));
  if (!fit(x, labels) || !all(loss, probabilities) || loss.size != 1 || probabilities.size != x.size) return false;
  const auto rows = std::size_t(x.shape(0)), columns = std::size_t(x.shape(1));
  return run([=] {
    if (!are_ids(labels.data(), rows, columns)) return false;
    *loss.data() = softmax_cross_entropy(x.data(), labels.data(), probabilities.data(), rows, columns);
    return true;
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
  if (!fit(probabilities, labels) || !all(dy, out) || dy.size != 1 || out.size != probabilities.size) return false;
  const auto rows = std::size_t(probabilities.shape(0)), columns = std::size_t(probabilities.shape(1));
  return run([=] {
    if (!are_ids(labels.data(), rows, columns)) return false;
    softmax_cross_entropy_backward(*dy.data(), probabilities.data(), labels.data(), out.data(), rows, columns);
    return true;
  });
}

bool bind_softmax_cross_entropy_backward(const py::handle& dy, const py::handle& probabilities,
                                         const py::handle& labels, const py::handle& out) {
  return cross_entropy_backward_as<std::int32_t>(dy, probabilities, labels, out) ||
         cross_entropy_backward_as<std::int64_t>(dy, probabilities, labels, out);
}


}  // namespace

void bind_norms(py::module_& m) {
  const py::kw_only kw;
  m.def("batchnorm_2d_train", &bind_batchnorm_train, "x"_a, "scale"_a, "bias"_a, "residual"_a = py::none(), kw,
        "out"_a, "momentum"_a, "eps"_a, "relu"_a = false, "memory_format"_a = 1);
  m.def("batchnorm_2d_infer", &bind_batchnorm_infer, "x"_a, "scale"_a, "bias"_a, "mean"_a, "var"_a, kw, "out"_a,
        "eps"_a);
  m.def("batchnorm_2d_backward", &bind_batchnorm_backward, "dy"_a, "x"_a, "scale"_a, "mean"_a, "inverse_std"_a,
        "bias"_a = py::none(), kw, "out"_a, "memory_format"_a = 1);
  m.def("softmax_cross_entropy", &bind_softmax_cross_entropy, "x"_a, "labels"_a, kw, "out"_a);
  m.def("softmax_cross_entropy_backward", &bind_softmax_cross_entropy_backward, "dy"_a, "probabilities"_a,
        "labels"_a, kw, "out"_a);
}

}  // namespace singa_lite
