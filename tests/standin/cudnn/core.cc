// SPDX-License-Identifier: Apache-2.0
// What all families share: handles, tensors, error texts.
#include "standin.h"

#include <cstdio>

#include "common/half.h"

extern "C" void standin_add(void* stream, const std::function<void()>* work);  // of the stand-in libcuda

namespace standin {

std::map<std::string, int> calls;
std::string reason;
int live = 0;

int fail(int status, const std::string& why) {
  reason = why;
  return status;
}

int counted(const char* name) {
  ++calls[name];
  const char* failing = std::getenv("STANDIN_CUDNN_FAIL");
  return failing != nullptr && std::string(failing) == name ? fail(5000, "as the test wished") : kSuccess;
}

int create(Object** object, int kind, const char* name) {
  if (const int status = counted(name)) return status;
  ++live;
  *object = new Object{kind};
  return kSuccess;
}

int destroy(Object* object) {
  --live;
  delete object;
  return kSuccess;
}

std::size_t size_of(int dtype) { return dtype == 0 ? 4 : dtype == 1 ? 8 : 2; }
std::size_t count(const Object& o) { return std::size_t(o.shape[0]) * o.shape[1] * o.shape[2] * o.shape[3]; }

// The values of an image in the other order: from NCHW as it lies in memory, or back.
std::vector<double> ordered(const Object& o, const std::vector<double>& values, bool is_to_memory) {
  if (o.layout == 0) return values;
  std::vector<double> result(values.size());
  const std::size_t channels = o.shape[1], area = std::size_t(o.shape[2]) * o.shape[3];
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::size_t image = i / area / channels, channel = i / area % channels, place = i % area;
    const std::size_t in_memory = (image * area + place) * channels + channel;
    (is_to_memory ? result[in_memory] : result[i]) = values[is_to_memory ? i : in_memory];
  }
  return result;
}

std::vector<double> read(const Object& o, const void* data) {
  const std::size_t n = count(o);
  std::vector<double> values(n);
  std::vector<float> floats(n);
  if (o.dtype == 1) std::memcpy(values.data(), data, n * 8);
  if (o.dtype == 0) std::memcpy(floats.data(), data, n * 4);
  if (o.dtype == 2) singa_lite::half_to_float(static_cast<const std::uint16_t*>(data), floats.data(), n);
  if (o.dtype == 9) singa_lite::bfloat16_to_float(static_cast<const std::uint16_t*>(data), floats.data(), n);
  if (o.dtype != 1) values.assign(floats.begin(), floats.end());
  return ordered(o, values, false);
}

void write(const Object& o, const std::vector<double>& plain, void* data) {
  const std::vector<double> values = ordered(o, plain, true);
  const std::vector<float> floats(values.begin(), values.end());
  if (o.dtype == 1) std::memcpy(data, values.data(), values.size() * 8);
  if (o.dtype == 0) std::memcpy(data, floats.data(), floats.size() * 4);
  if (o.dtype == 2) singa_lite::float_to_half(floats.data(), static_cast<std::uint16_t*>(data), floats.size());
  if (o.dtype == 9) singa_lite::float_to_bfloat16(floats.data(), static_cast<std::uint16_t*>(data), floats.size());
}

double scalar(int dtype, const void* value) {
  return dtype == 1 ? *static_cast<const double*>(value) : *static_cast<const float*>(value);
}

Factors factors(int dtype, const void* alpha, const void* beta) {
  return {scalar(dtype, alpha), scalar(dtype, beta)};
}

void blend(const Object& o, std::vector<double>& values, const Factors& factors, void* data) {
  const auto [a, b] = factors;
  std::vector<double> before(values.size());
  if (b != 0) before = read(o, data);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = a * values[i] + (b != 0 ? b * before[i] : 0);
  write(o, values, data);
}

int start(const Object* handle, const std::function<void()>& work) {
  if (handle->stream == nullptr) return fail(kBadParam, "no stream is set");
  standin_add(handle->stream, &work);
  return kSuccess;
}

}  // namespace standin

using namespace standin;

extern "C" {

int standin_cudnn_calls(const char* name) { return calls[name]; }
int standin_cudnn_live() { return live; }

std::size_t cudnnGetVersion() {
  const char* version = std::getenv("STANDIN_CUDNN_VERSION");
  return version != nullptr ? std::strtoull(version, nullptr, 10) : 92800;
}
const char* cudnnGetErrorString(int status) {
  return status == kBadParam ? "BAD_PARAM" : status == kNotSupported ? "NOT_SUPPORTED" : "STATUS";
}
void cudnnGetLastErrorString(char* message, std::size_t size) { std::snprintf(message, size, "%s", reason.c_str()); }

int cudnnCreate(Object** handle) { return create(handle, kHandle, "cudnnCreate"); }
int cudnnCreateTensorDescriptor(Object** o) { return create(o, kTensor, "cudnnCreateTensorDescriptor"); }
int cudnnDestroy(Object* o) { return destroy(o); }
int cudnnDestroyTensorDescriptor(Object* o) { return destroy(o); }
int cudnnSetStream(Object* handle, void* stream) {
  handle->stream = stream;
  return counted("cudnnSetStream");
}

int cudnnSetTensor4dDescriptor(Object* o, int layout, int dtype, int n, int c, int h, int w) {
  if (o->kind != kTensor || layout < 0 || layout > 1 || dtype < 0 || (dtype > 2 && dtype != 9) || n < 1 || c < 1 || h < 1 || w < 1)
    return fail(kBadParam, "tensor");
  o->dtype = dtype;
  o->layout = layout;
  const int shape[] = {n, c, h, w};
  std::memcpy(o->shape, shape, sizeof shape);
  return counted("cudnnSetTensor4dDescriptor");
}

}  // extern "C"
