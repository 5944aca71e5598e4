// SPDX-License-Identifier: Apache-2.0
// Batch normalisation over batch and place.
#include <cmath>

#include "standin.h"

using namespace standin;

namespace {

constexpr int kSpatial = 1;
constexpr int kMostTrained = 880801, kMostInferred = 65535;

// Everything that the real library asks of the arguments the calls share.
int check(const Object* handle, int mode, const Object& x, const Object& other, const Object& parameters,
          std::initializer_list<const void*> data, double eps, int most) {
  if (handle->kind != kHandle || handle->stream == nullptr) return fail(kBadParam, "no stream is set");
  if (mode != kSpatial) return fail(kNotSupported, "mode");
  if (x.kind != kTensor || x.dtype < 0 || other.dtype != x.dtype || other.layout != x.layout ||
      std::memcmp(x.shape, other.shape, sizeof x.shape))
    return fail(kBadParam, "descriptors of x and y");
  const int expected[] = {1, x.shape[1], 1, 1};
  if (parameters.kind != kTensor || parameters.dtype != (x.dtype == 1 ? 1 : 0) ||
      std::memcmp(parameters.shape, expected, sizeof expected))
    return fail(kBadParam, "descriptor of the parameters");
  for (const void* pointer : data)
    if (pointer == nullptr) return fail(kBadParam, "a null pointer");
  if (!(eps >= 0)) return fail(kBadParam, "eps");
  if (x.shape[0] > most) return fail(kNotSupported, "more samples than " + std::to_string(most));
  return kSuccess;
}

int misaligned(std::initializer_list<const void*> data) {
  for (const void* pointer : data)
    if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) return fail(kMisaligned, "alignment");
  return kSuccess;
}

// Calls `visit(index, channel)` for every element.
template <class Visit>
void each(const Object& x, Visit visit) {
  const std::size_t area = std::size_t(x.shape[2]) * x.shape[3];
  for (std::size_t i = 0; i < count(x); ++i) visit(i, i / area % x.shape[1]);
}

double elements(const Object& x) { return double(count(x)) / x.shape[1]; }

}  // namespace

extern "C" {

int cudnnDeriveBNTensorDescriptor(Object* parameters, const Object* x, int mode) {
  if (const int status = counted("cudnnDeriveBNTensorDescriptor")) return status;
  if (parameters->kind != kTensor || x->kind != kTensor || x->dtype < 0 || mode != kSpatial)
    return fail(kBadParam, "descriptor to derive from");
  const int shape[] = {1, x->shape[1], 1, 1};
  parameters->dtype = x->dtype == 1 ? 1 : 0;
  std::memcpy(parameters->shape, shape, sizeof shape);
  return kSuccess;
}

int cudnnBatchNormalizationForwardTraining(const Object* handle, int mode, const void* alpha, const void* beta,
                                           const Object* x, const void* x_data, const Object* y, void* y_data,
                                           const Object* parameters, const void* scale, const void* bias,
                                           double factor, void* running_mean, void* running_var, double eps,
                                           void* mean, void* inverse_std) {
  if (const int status = counted("cudnnBatchNormalizationForwardTraining")) return status;
  if (const int status =
          check(handle, mode, *x, *y, *parameters, {x_data, y_data, scale, bias}, eps, kMostTrained))
    return status;
  if (const int status = misaligned({x_data, y_data})) return status;
  if (!running_mean != !running_var || !mean != !inverse_std) return fail(kBadParam, "one of two is null");
  return start(handle, [=, by = factors(x->dtype, alpha, beta), parameters = *parameters, x = *x, y = *y] {
    const auto xs = read(x, x_data), scales = read(parameters, scale), biases = read(parameters, bias);
    std::vector<double> means(x.shape[1]), vars(x.shape[1]), inverses(x.shape[1]), ys(xs.size());
    each(x, [&](std::size_t i, int c) { means[c] += xs[i] / elements(x); });
    each(x, [&](std::size_t i, int c) { vars[c] += (xs[i] - means[c]) * (xs[i] - means[c]) / elements(x); });
    for (std::size_t c = 0; c < vars.size(); ++c) inverses[c] = 1 / std::sqrt(vars[c] + eps);
    each(x, [&](std::size_t i, int c) { ys[i] = (xs[i] - means[c]) * inverses[c] * scales[c] + biases[c]; });
    blend(y, ys, by, y_data);
    if (running_mean != nullptr) {
      auto running_means = read(parameters, running_mean), running_vars = read(parameters, running_var);
      const double unbiased = elements(x) / (elements(x) - 1);  // infinite for one element, as the real one's
      for (std::size_t c = 0; c < vars.size(); ++c) {
        running_means[c] = (1 - factor) * running_means[c] + factor * means[c];
        running_vars[c] = (1 - factor) * running_vars[c] + factor * vars[c] * unbiased;
      }
      write(parameters, running_means, running_mean);
      write(parameters, running_vars, running_var);
    }
    if (mean != nullptr) {
      write(parameters, means, mean);
      write(parameters, inverses, inverse_std);
    }
  });
}

int cudnnBatchNormalizationForwardInference(const Object* handle, int mode, const void* alpha, const void* beta,
                                            const Object* x, const void* x_data, const Object* y, void* y_data,
                                            const Object* parameters, const void* scale, const void* bias,
                                            const void* mean, const void* var, double eps) {
  if (const int status = counted("cudnnBatchNormalizationForwardInference")) return status;
  if (const int status =
          check(handle, mode, *x, *y, *parameters, {x_data, y_data, scale, bias, mean, var}, eps, kMostInferred))
    return status;
  if (const int status = misaligned({x_data, y_data})) return status;
  return start(handle, [=, by = factors(x->dtype, alpha, beta), parameters = *parameters, x = *x, y = *y] {
    const auto scales = read(parameters, scale), biases = read(parameters, bias);
    const auto means = read(parameters, mean), vars = read(parameters, var);
    auto ys = read(x, x_data);
    each(x, [&](std::size_t i, int c) {
      ys[i] = (ys[i] - means[c]) / std::sqrt(vars[c] + eps) * scales[c] + biases[c];
    });
    blend(y, ys, by, y_data);
  });
}

int cudnnBatchNormalizationBackward(const Object* handle, int mode, const void* alpha, const void* beta,
                                    const void* alpha_parameters, const void* beta_parameters, const Object* x,
                                    const void* x_data, const Object* dy, const void* dy_data, const Object* dx,
                                    void* dx_data, const Object* parameters, const void* scale, void* dscale,
                                    void* dbias, double eps, const void* mean, const void* inverse_std) {
  if (const int status = counted("cudnnBatchNormalizationBackward")) return status;
  for (const Object* other : {dy, dx})
    if (const int status = check(handle, mode, *x, *other, *parameters,
                                 {x_data, dy_data, dx_data, scale, dscale, dbias, mean, inverse_std}, eps,
                                 kMostTrained))
      return status;
  if (const int status = misaligned({x_data, dy_data, dx_data})) return status;
  return start(handle, [=, by = factors(x->dtype, alpha, beta), by_parameters = factors(x->dtype, alpha_parameters, beta_parameters),
                        parameters = *parameters, x = *x, dy = *dy, dx = *dx] {
    const auto dys = read(dy, dy_data), scales = read(parameters, scale);
    const auto means = read(parameters, mean), inverses = read(parameters, inverse_std);
    auto normal = read(x, x_data);
    each(x, [&](std::size_t i, int c) { normal[i] = (normal[i] - means[c]) * inverses[c]; });
    std::vector<double> dscales(x.shape[1]), dbiases(x.shape[1]), dxs(normal.size());
    each(x, [&](std::size_t i, int c) {
      dscales[c] += dys[i] * normal[i];
      dbiases[c] += dys[i];
    });
    each(x, [&](std::size_t i, int c) {
      dxs[i] = scales[c] * inverses[c] * (dys[i] - (dbiases[c] + normal[i] * dscales[c]) / elements(x));
    });
    blend(dx, dxs, by, dx_data);
    blend(parameters, dscales, by_parameters, dscale);
    blend(parameters, dbiases, by_parameters, dbias);
  });
}

}  // extern "C"
