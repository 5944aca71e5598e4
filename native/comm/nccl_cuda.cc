// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_cuda.h"

namespace singa_lite {

namespace {

// The values of the driver's interface that are used here.
constexpr int kSuccess = 0, kNotReady = 600;
constexpr int kPointerDeviceOrdinal = 9;  // attribute
constexpr int kCaptureRelaxed = 2;
constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2;

}  // namespace

Driver::Driver(const std::vector<std::string>& names) try : library_(names) {
  library_.get(init_, "cuInit");
  library_.get(get_error_string_, "cuGetErrorString");
  library_.get(device_uuid_, "cuDeviceGetUuid_v2");
  library_.get(retain_primary_, "cuDevicePrimaryCtxRetain");
  library_.get(current_device_, "cuCtxGetDevice");
  library_.get(current_context_, "cuCtxGetCurrent");
  library_.get(push_, "cuCtxPushCurrent_v2");
  library_.get(pop_, "cuCtxPopCurrent_v2");
  library_.get(pointer_attribute_, "cuPointerGetAttribute");
  library_.get(exchange_capture_mode_, "cuThreadExchangeStreamCaptureMode");
  library_.get(is_capturing_, "cuStreamIsCapturing");
  library_.get(priorities_, "cuCtxGetStreamPriorityRange");
  library_.get(create_stream_, "cuStreamCreateWithPriority");
  library_.get(destroy_stream_, "cuStreamDestroy_v2");
  library_.get(wait_, "cuStreamWaitEvent");
  library_.get(create_event_, "cuEventCreate");
  library_.get(destroy_event_, "cuEventDestroy_v2");
  library_.get(record_, "cuEventRecord");
  library_.get(query_, "cuEventQuery");
  check(init_(0), "cuInit");
} catch (const CudaError&) {
  throw;
} catch (const std::runtime_error& error) {
  throw CudaError(std::string("CUDA's driver cannot be used: ") + error.what());
}

void Driver::check(Status status, const char* call) const {
  if (status == kSuccess) return;
  const char* text = nullptr;
  if (get_error_string_(status, &text) != kSuccess || text == nullptr) text = "unknown error";
  throw CudaError(std::string(call) + ": CUDA error " + std::to_string(status) + ", " + text);
}

std::string Driver::uuid(int device) const {
  char bytes[16];
  check(device_uuid_(bytes, device), "cuDeviceGetUuid");
  std::string digits;
  for (const char byte : bytes) {
    digits += "0123456789abcdef"[(byte >> 4) & 15];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
}

int Driver::device_of(const void* pointer) const {
  int device = 0;
  if (pointer != nullptr && pointer_attribute_(&device, kPointerDeviceOrdinal, pointer) == kSuccess) return device;
  return current_device_(&device) == kSuccess ? device : 0;
}

CudaContext Driver::primary_context(int device) const {
  CudaContext context = nullptr;
  check(retain_primary_(&context, device), "cuDevicePrimaryCtxRetain");
  return context;
}

CudaContext Driver::current_context() const {
  CudaContext context = nullptr;
  check(current_context_(&context), "cuCtxGetCurrent");
  return context;
}

void Driver::push(CudaContext context) const { check(push_(context), "cuCtxPushCurrent"); }

void Driver::pop() const noexcept {
  CudaContext context;
  pop_(&context);
}

void Driver::relax_captures() const {
  int mode = kCaptureRelaxed;
  check(exchange_capture_mode_(&mode), "cuThreadExchangeStreamCaptureMode");
}


bool Driver::is_capturing(CudaStream stream) const {
  int status = 0;
  check(is_capturing_(stream, &status), "cuStreamIsCapturing");
  return status != 0;
}

void Driver::wait(CudaStream stream, CudaEvent event) const { check(wait_(stream, event, 0), "cuStreamWaitEvent"); }

void Driver::record(CudaEvent event, CudaStream stream) const { check(record_(event, stream), "cuEventRecord"); }

bool Driver::has_happened(CudaEvent event) const {
  const Status status = query_(event);
  if (status != kNotReady) check(status, "cuEventQuery");
  return status == kSuccess;
}

Stream::Stream(std::shared_ptr<const Driver> driver) : driver_(std::move(driver)) {
  int lowest = 0, highest = 0;
  driver_->check(driver_->priorities_(&lowest, &highest), "cuCtxGetStreamPriorityRange");
  driver_->check(driver_->create_stream_(&stream_, kStreamNonBlocking, highest), "cuStreamCreateWithPriority");
}

Stream::~Stream() { driver_->destroy_stream_(stream_); }

Event::Event(std::shared_ptr<const Driver> driver) : driver_(std::move(driver)) {
  driver_->check(driver_->create_event_(&event_, kEventDisableTiming), "cuEventCreate");
}

Event::~Event() { driver_->destroy_event_(event_); }

}  // namespace singa_lite
