// SPDX-License-Identifier: Apache-2.0
// Average pooling.
#include "tests/standin/cudnn/standin.h"

using namespace standin;

namespace {

enum Mode { kIncludePadding = 1, kExcludePadding = 2 };

// Everything that the real library asks of the arguments both calls share.
int check(const Object* handle, const Object& p, const Object& x, const Object& y,
          std::initializer_list<const void*> data) {
  if (handle->kind != kHandle || handle->stream == nullptr) return fail(kBadParam, "no stream is set");
  if (p.kind != kPooling || p.mode < 0 || x.kind != kTensor || y.kind != kTensor || x.dtype < 0 || x.dtype != y.dtype)
    return fail(kBadParam, "descriptors");
  if (x.shape[0] != y.shape[0] || x.shape[1] != y.shape[1] || x.layout != y.layout) return fail(kBadParam, "batch or channels");
  for (int i = 0; i < 2; ++i)
    if (y.shape[2 + i] != 1 + (x.shape[2 + i] + 2 * p.padding[i] - p.window[i]) / p.stride[i])
      return fail(kBadParam, "output size");
  for (const void* pointer : data)
    if (pointer == nullptr) return fail(kBadParam, "a null pointer");
  for (const void* pointer : data)
    if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) return fail(kMisaligned, "alignment");
  return kSuccess;
}

// Calls `visit(x index, y index, divisor)` for every element of every window.
template <class Visit>
void windows(const Object& p, const Object& x, const Object& y, Visit visit) {
  for (std::size_t out = 0; out < count(y); ++out) {
    const int column = int(out % y.shape[3]) * p.stride[1] - p.padding[1];
    const int row = int(out / y.shape[3] % y.shape[2]) * p.stride[0] - p.padding[0];
    const std::size_t plane = out / y.shape[3] / y.shape[2];
    std::vector<std::size_t> inside;
    for (int i = row; i < row + p.window[0]; ++i)
      for (int j = column; j < column + p.window[1]; ++j)
        if (i >= 0 && i < x.shape[2] && j >= 0 && j < x.shape[3])
          inside.push_back((plane * x.shape[2] + i) * x.shape[3] + j);
    const double divisor = p.mode == kIncludePadding ? p.window[0] * p.window[1] : double(inside.size());
    for (const std::size_t in : inside) visit(in, out, divisor);
  }
}

}  // namespace

extern "C" {

int cudnnCreatePoolingDescriptor(Object** o) { return create(o, kPooling, "cudnnCreatePoolingDescriptor"); }
int cudnnDestroyPoolingDescriptor(Object* o) { return destroy(o); }

int cudnnSetPooling2dDescriptor(Object* o, int mode, int nan, int wh, int ww, int ph, int pw, int sh, int sw) {
  if (const int status = counted("cudnnSetPooling2dDescriptor")) return status;
  if (o->kind != kPooling || (mode != kIncludePadding && mode != kExcludePadding) || nan < 0 || nan > 1)
    return fail(kBadParam, "pooling");
  if (wh < 1 || ww < 1 || sh < 1 || sw < 1 || ph < 0 || pw < 0 || ph >= wh || pw >= ww)
    return fail(kBadParam, "window, stride or padding");
  *o = Object{kPooling, -1, {}, {ph, pw}, {sh, sw}};
  o->window[0] = wh;
  o->window[1] = ww;
  o->mode = mode;
  return kSuccess;
}

int cudnnPoolingForward(const Object* handle, const Object* p, const void* alpha, const Object* x, const void* x_data,
                        const void* beta, const Object* y, void* y_data) {
  if (const int status = counted("cudnnPoolingForward")) return status;
  if (const int status = check(handle, *p, *x, *y, {x_data, y_data})) return status;
  return start(handle, [=, by = factors(x->dtype, alpha, beta), p = *p, x = *x, y = *y] {
    const auto xs = read(x, x_data);
    std::vector<double> ys(count(y));
    windows(p, x, y, [&](std::size_t in, std::size_t out, double divisor) { ys[out] += xs[in] / divisor; });
    blend(y, ys, by, y_data);
  });
}

int cudnnPoolingBackward(const Object* handle, const Object* p, const void* alpha, const Object* y, const void* y_data,
                         const Object* dy, const void* dy_data, const Object* x, const void* x_data, const void* beta,
                         const Object* dx, void* dx_data) {
  if (const int status = counted("cudnnPoolingBackward")) return status;
  if (const int status = check(handle, *p, *x, *y, {x_data, y_data})) return status;
  if (const int status = check(handle, *p, *dx, *dy, {dx_data, dy_data})) return status;
  if (y->dtype != dy->dtype) return fail(kBadParam, "dtypes");
  return start(handle, [=, by = factors(x->dtype, alpha, beta), p = *p, dx = *dx, dy = *dy] {
    const auto dys = read(dy, dy_data);
    std::vector<double> dxs(count(dx));
    windows(p, dx, dy, [&](std::size_t in, std::size_t out, double divisor) { dxs[in] += dys[out] / divisor; });
    blend(dx, dxs, by, dx_data);
  });
}

}  // extern "C"
