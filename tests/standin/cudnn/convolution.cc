// SPDX-License-Identifier: Apache-2.0
// Convolutions.
#include <algorithm>

#include "standin.h"

using namespace standin;

namespace {

int last_run[2] = {-1, -1};  // algorithm, math

// The descriptors of one convolution fit each other: every rule the real library has for them.
int check(const Object& x, const Object& w, const Object& y, const Object& c) {
  if (x.kind != kTensor || w.kind != kFilter || y.kind != kTensor || c.kind != kConvolution)
    return fail(kBadParam, "kind of descriptor");
  if (x.dtype < 0 || x.dtype != w.dtype || x.dtype != y.dtype) return fail(kBadParam, "dtypes");
  if (x.layout != w.layout || x.layout != y.layout) return fail(kNotSupported, "layouts");
  if (x.layout != 0 && x.dtype == 1) return fail(kNotSupported, "float64 with channels last");
  if (c.compute != (x.dtype == 1 ? 1 : 0)) return fail(kNotSupported, "compute type");
  if (x.shape[0] != y.shape[0] || w.shape[0] != y.shape[1]) return fail(kBadParam, "batch or outputs");
  if (w.shape[0] % c.groups || x.shape[1] != w.shape[1] * c.groups) return fail(kBadParam, "channels and groups");
  for (int i = 0; i < 2; ++i) {
    const int reach = (w.shape[2 + i] - 1) * c.dilation[i] + 1;
    if (y.shape[2 + i] != 1 + (x.shape[2 + i] + 2 * c.padding[i] - reach) / c.stride[i])
      return fail(kBadParam, "output size");
  }
  return kSuccess;
}

// Calls `visit(x index, w index, y index)` for every product of the convolution.
template <class Visit>
void products(const Object& x, const Object& w, const Object& y, const Object& c, Visit visit) {
  const auto [channels, kh, kw] = std::array{w.shape[1], w.shape[2], w.shape[3]};
  const int each = w.shape[0] / c.groups;
  for (int n = 0; n < x.shape[0]; ++n)
    for (int o = 0; o < w.shape[0]; ++o)
      for (int i = 0; i < y.shape[2]; ++i)
        for (int j = 0; j < y.shape[3]; ++j) {
          const int of_y = ((n * w.shape[0] + o) * y.shape[2] + i) * y.shape[3] + j;
          int of_w = o * channels * kh * kw;
          for (int channel = 0; channel < channels; ++channel) {
            const int plane = n * x.shape[1] + o / each * channels + channel;
            for (int p = 0; p < kh; ++p) {
              const int row = i * c.stride[0] - c.padding[0] + p * c.dilation[0];
              const bool is_inside = row >= 0 && row < x.shape[2];
              for (int q = 0; q < kw; ++q, ++of_w) {
                const int column = j * c.stride[1] - c.padding[1] + q * c.dilation[1];
                if (is_inside && column >= 0 && column < x.shape[3])
                  visit((plane * x.shape[2] + row) * x.shape[3] + column, of_w, of_y);
              }
            }
          }
        }
}

struct Performance {
  int algorithm, status;
  float time;
  std::size_t memory;
  int determinism, math, reserved[3];
};

enum Direction { kForward = 1, kBackwardFilter, kBackwardData };  // each needs more workspace than the one before

std::size_t workspace_of(Direction direction, int algorithm, const Object& y) {
  return algorithm == 1 ? 64 + 8 * direction * count(y) : 0;
}

// Fastest first, with every trap: one that fails, one that is not deterministic, one timed in other arithmetic, one
// that needs workspace, one that always works.
int list(Direction direction, const Object& y, const Object& c, int asked, int* found, Performance* results) {
  const Performance all[] = {
      {6, kNotSupported, -1, 0, 1, c.math, {}},           {3, 0, 0.1f, 0, 0, c.math, {}},
      {2, 0, 0.2f, workspace_of(direction, 2, y), 1, 0, {}},         {1, 0, 0.3f, workspace_of(direction, 1, y), 1, c.math, {}},
      {0, 0, 0.4f, workspace_of(direction, 0, y), 1, c.math, {}},
  };
  *found = 0;
  for (const Performance& result : all)
    if (*found < asked) results[(*found)++] = result;
  if (const char* math = std::getenv("STANDIN_CUDNN_MATH"))
    for (int i = 0; i < *found; ++i) results[i].math = std::atoi(math);
  return kSuccess;
}

int find(Direction direction, const Object* handle, const Object& x, const Object& w, const Object& y, const Object& c, int asked,
         int* found, Performance* results, void* workspace, std::size_t bytes, void* out, std::size_t out_bytes) {
  if (const int status = check(x, w, y, c)) return status;
  const int started = start(handle, [=] {
    std::memset(out, 0xff, out_bytes);
    std::memset(workspace, 0xff, std::min(bytes, std::size_t(1) << 16));
  });
  if (started) return started;
  list(direction, y, c, asked, found, results);
  for (int i = 0; i < *found; ++i)
    if (results[i].memory > bytes) results[i].status = kTooSmall;
  return kSuccess;
}

int run_check(Direction direction, const Object& x, const Object& w, const Object& y, const Object& c, const void* a_data,
              const void* b_data, const void* out_data, int algorithm, std::size_t bytes) {
  if (const int status = check(x, w, y, c)) return status;
  for (const void* data : {a_data, b_data, out_data})
    if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) return fail(kMisaligned, "alignment");
  if (algorithm < 0 || algorithm > 3) return fail(kNotSupported, "algorithm");
  if (bytes < workspace_of(direction, algorithm, y)) return fail(kTooSmall, "workspace");
  last_run[0] = algorithm;
  last_run[1] = c.math;
  return kSuccess;
}

}  // namespace

extern "C" {

int standin_cudnn_last(int which) { return last_run[which]; }

int cudnnCreateFilterDescriptor(Object** o) { return create(o, kFilter, "cudnnCreateFilterDescriptor"); }
int cudnnCreateConvolutionDescriptor(Object** o) { return create(o, kConvolution, "cudnnCreateConvolutionDescriptor"); }
int cudnnDestroyFilterDescriptor(Object* o) { return destroy(o); }
int cudnnDestroyConvolutionDescriptor(Object* o) { return destroy(o); }
int cudnnSetTensor4dDescriptor(Object* o, int layout, int dtype, int n, int c, int h, int w);

int cudnnSetFilter4dDescriptor(Object* o, int dtype, int layout, int k, int c, int h, int w) {
  if (o->kind != kFilter) return fail(kBadParam, "filter");
  if (const int status = counted("cudnnSetFilter4dDescriptor")) return status;
  o->kind = kTensor;
  const int status = cudnnSetTensor4dDescriptor(o, layout, dtype, k, c, h, w);
  o->kind = kFilter;
  return status;
}
int cudnnSetConvolution2dDescriptor(Object* o, int ph, int pw, int sh, int sw, int dh, int dw, int mode, int compute) {
  if (o->kind != kConvolution || mode != 1 || ph < 0 || pw < 0 || sh < 1 || sw < 1 || dh < 1 || dw < 1)
    return fail(kBadParam, "convolution");
  *o = Object{kConvolution, -1, {}, {ph, pw}, {sh, sw}, {dh, dw}, compute};
  return counted("cudnnSetConvolution2dDescriptor");
}
int cudnnSetConvolutionGroupCount(Object* o, int groups) {
  if (groups < 1) return fail(kBadParam, "groups");
  o->groups = groups;
  return counted("cudnnSetConvolutionGroupCount");
}
int cudnnSetConvolutionMathType(Object* o, int math) {
  if (math < 0 || math > 3) return fail(kBadParam, "math");
  o->math = math;
  return counted("cudnnSetConvolutionMathType");
}

int cudnnFindConvolutionForwardAlgorithmEx(Object* handle, Object* x, const void*, Object* w, const void*, Object* c,
                                           Object* y, void* out, int asked, int* found, Performance* results,
                                           void* workspace, std::size_t bytes) {
  if (const int status = counted("cudnnFindConvolutionForwardAlgorithmEx")) return status;
  return find(kForward, handle, *x, *w, *y, *c, asked, found, results, workspace, bytes, out, count(*y) * size_of(y->dtype));
}
int cudnnFindConvolutionBackwardDataAlgorithmEx(Object* handle, Object* w, const void*, Object* y, const void*,
                                                Object* c, Object* x, void* out, int asked, int* found,
                                                Performance* results, void* workspace, std::size_t bytes) {
  if (const int status = counted("cudnnFindConvolutionBackwardDataAlgorithmEx")) return status;
  return find(kBackwardData, handle, *x, *w, *y, *c, asked, found, results, workspace, bytes, out, count(*x) * size_of(x->dtype));
}
int cudnnFindConvolutionBackwardFilterAlgorithmEx(Object* handle, Object* x, const void*, Object* y, const void*,
                                                  Object* c, Object* w, void* out, int asked, int* found,
                                                  Performance* results, void* workspace, std::size_t bytes) {
  if (const int status = counted("cudnnFindConvolutionBackwardFilterAlgorithmEx")) return status;
  return find(kBackwardFilter, handle, *x, *w, *y, *c, asked, found, results, workspace, bytes, out, count(*w) * size_of(w->dtype));
}

int cudnnGetConvolutionForwardAlgorithm_v7(Object*, Object* x, Object* w, Object* c, Object* y, int asked, int* found,
                                           Performance* results) {
  const int status = check(*x, *w, *y, *c);
  return status ? status : list(kForward, *y, *c, asked, found, results);
}
int cudnnGetConvolutionBackwardDataAlgorithm_v7(Object*, Object* w, Object* y, Object* c, Object* x, int asked,
                                                int* found, Performance* results) {
  const int status = check(*x, *w, *y, *c);
  return status ? status : list(kBackwardData, *y, *c, asked, found, results);
}
int cudnnGetConvolutionBackwardFilterAlgorithm_v7(Object*, Object* x, Object* y, Object* c, Object* w, int asked,
                                                  int* found, Performance* results) {
  const int status = check(*x, *w, *y, *c);
  return status ? status : list(kBackwardFilter, *y, *c, asked, found, results);
}

int cudnnGetConvolutionForwardWorkspaceSize(Object*, Object* x, Object* w, Object* c, Object* y, int algorithm,
                                            std::size_t* bytes) {
  *bytes = workspace_of(kForward, algorithm, *y);
  return check(*x, *w, *y, *c);
}
int cudnnGetConvolutionBackwardDataWorkspaceSize(Object*, Object* w, Object* y, Object* c, Object* x, int algorithm,
                                                 std::size_t* bytes) {
  *bytes = workspace_of(kBackwardData, algorithm, *y);
  return check(*x, *w, *y, *c);
}
int cudnnGetConvolutionBackwardFilterWorkspaceSize(Object*, Object* x, Object* y, Object* c, Object* w, int algorithm,
                                                   std::size_t* bytes) {
  *bytes = workspace_of(kBackwardFilter, algorithm, *y);
  return check(*x, *w, *y, *c);
}

int cudnnConvolutionForward(Object* handle, const void* alpha, Object* x, const void* x_data, Object* w, const void* w_data,
                            Object* c, int algorithm, void* workspace, std::size_t bytes, const void* beta, Object* y,
                            void* y_data) {
  if (const int status = counted("cudnnConvolutionForward")) return status;
  if (const int status = run_check(kForward, *x, *w, *y, *c, x_data, w_data, y_data, algorithm, bytes)) return status;
  return start(handle, [=, by = factors(x->dtype, alpha, beta), x = *x, w = *w, y = *y, c = *c] {
    if (bytes > 0) std::memset(workspace, 0xff, bytes);
    const auto xs = read(x, x_data), ws = read(w, w_data);
    std::vector<double> ys(count(y));
    products(x, w, y, c, [&](int i, int j, int k) { ys[k] += xs[i] * ws[j]; });
    blend(y, ys, by, y_data);
  });
}
int cudnnConvolutionBackwardData(Object* handle, const void* alpha, Object* w, const void* w_data, Object* y,
                                 const void* y_data, Object* c, int algorithm, void* workspace, std::size_t bytes,
                                 const void* beta, Object* x, void* x_data) {
  if (const int status = counted("cudnnConvolutionBackwardData")) return status;
  if (const int status = run_check(kBackwardData, *x, *w, *y, *c, x_data, w_data, y_data, algorithm, bytes)) return status;
  return start(handle, [=, by = factors(x->dtype, alpha, beta), x = *x, w = *w, y = *y, c = *c] {
    if (bytes > 0) std::memset(workspace, 0xff, bytes);
    const auto ws = read(w, w_data), ys = read(y, y_data);
    std::vector<double> xs(count(x));
    products(x, w, y, c, [&](int i, int j, int k) { xs[i] += ys[k] * ws[j]; });
    blend(x, xs, by, x_data);
  });
}
int cudnnConvolutionBackwardFilter(Object* handle, const void* alpha, Object* x, const void* x_data, Object* y,
                                   const void* y_data, Object* c, int algorithm, void* workspace, std::size_t bytes,
                                   const void* beta, Object* w, void* w_data) {
  if (const int status = counted("cudnnConvolutionBackwardFilter")) return status;
  if (const int status = run_check(kBackwardFilter, *x, *w, *y, *c, x_data, w_data, y_data, algorithm, bytes)) return status;
  return start(handle, [=, by = factors(x->dtype, alpha, beta), x = *x, w = *w, y = *y, c = *c] {
    if (bytes > 0) std::memset(workspace, 0xff, bytes);
    const auto xs = read(x, x_data), ys = read(y, y_data);
    std::vector<double> ws(count(w));
    products(x, w, y, c, [&](int i, int j, int k) { ws[j] += xs[i] * ys[k]; });
    blend(w, ws, by, w_data);
  });
}

int cudnnAddTensor(Object* handle, const void* alpha, Object* a, const void* a_data, const void* beta, Object* c,
                   void* c_data) {
  if (const int status = counted("cudnnAddTensor")) return status;
  if (a->dtype != c->dtype || a->shape[0] != 1 || a->shape[1] != c->shape[1] || a->shape[2] != 1 || a->shape[3] != 1)
    return fail(kBadParam, "shape of a");
  return start(handle, [=, by = factors(a->dtype, alpha, beta), a = *a, c = *c] {
    const auto as = read(a, a_data);
    std::vector<double> cs(count(c));
    const std::size_t area = std::size_t(c.shape[2]) * c.shape[3];
    for (std::size_t i = 0; i < cs.size(); ++i) cs[i] = as[i / area % c.shape[1]];
    blend(c, cs, by, c_data);
  });
}
int cudnnConvolutionBackwardBias(Object* handle, const void* alpha, Object* y, const void* y_data, const void* beta, Object* b,
                                 void* b_data) {
  if (const int status = counted("cudnnConvolutionBackwardBias")) return status;
  if (b->dtype != y->dtype || b->shape[0] != 1 || b->shape[1] != y->shape[1]) return fail(kBadParam, "shape of db");
  return start(handle, [=, by = factors(y->dtype, alpha, beta), y = *y, b = *b] {
    const auto ys = read(y, y_data);
    std::vector<double> bs(count(b));
    const std::size_t area = std::size_t(y.shape[2]) * y.shape[3];
    for (std::size_t i = 0; i < ys.size(); ++i) bs[i / area % y.shape[1]] += ys[i];
    blend(b, bs, by, b_data);
  });
}

}  // extern "C"
