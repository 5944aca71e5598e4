// SPDX-License-Identifier: Apache-2.0
// What NCCL's communicator uses of CUDA's driver (libcuda.so.1, opened at run time): contexts, streams and events,
// every status checked.
// Own prototypes of the few functions used; their types are opaque pointers.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/library.h"

namespace singa_lite {

struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using CudaContext = struct CudaContextOpaque*;
using CudaStream = struct CudaStreamOpaque*;  // 1: the legacy default stream, 2: the per-thread one
using CudaEvent = struct CudaEventOpaque*;

class Driver {
 public:
  // Throws CudaError: no driver, one older than CUDA 11.4's, or no GPU.
  explicit Driver(const std::vector<std::string>& names);

  // 32 hexadecimal digits; that of the slice where the GPU is divided (MIG).
  std::string uuid(int device) const;
  // The GPU whose memory `pointer` is; that of the calling thread's context for memory unknown to CUDA or none.
  int device_of(const void* pointer) const;
  // The context that CUDA's runtime (and so cupy) uses; it stays for the life of the process.
  CudaContext primary_context(int device) const;

  // The calling thread's; nullptr if it has none.
  CudaContext current_context() const;
  void push(CudaContext context) const;
  void pop() const noexcept;
  // Lets the calling thread query events while another one captures a graph.
  void relax_captures() const;
  bool is_capturing(CudaStream stream) const;
  void wait(CudaStream stream, CudaEvent event) const;
  void record(CudaEvent event, CudaStream stream) const;
  // Whether what was recorded has happened. Throws CudaError if the GPU failed.
  bool has_happened(CudaEvent event) const;

 private:
  friend class Stream;
  friend class Event;
  using Status = int;
  void check(Status status, const char* call) const;

  Library library_;
  Status (*init_)(unsigned);
  Status (*get_error_string_)(Status, const char**);
  Status (*device_uuid_)(char*, int);
  Status (*retain_primary_)(CudaContext*, int);
  Status (*current_device_)(int*);
  Status (*current_context_)(CudaContext*);
  Status (*push_)(CudaContext);
  Status (*pop_)(CudaContext*);
  Status (*pointer_attribute_)(void*, int, const void*);
  Status (*exchange_capture_mode_)(int*);
  Status (*is_capturing_)(CudaStream, int*);
  Status (*priorities_)(int*, int*);
  Status (*create_stream_)(CudaStream*, unsigned, int);
  Status (*destroy_stream_)(CudaStream);
  Status (*wait_)(CudaStream, CudaEvent, unsigned);
  Status (*create_event_)(CudaEvent*, unsigned);
  Status (*destroy_event_)(CudaEvent);
  Status (*record_)(CudaEvent, CudaStream);
  Status (*query_)(CudaEvent);
};

// Makes `context` the calling thread's own for a while. It mostly is already, as cupy leaves it: then nothing is pushed.
class ContextScope {
 public:
  ContextScope(const Driver& driver, CudaContext context)
      : driver_(driver), is_pushed_(driver_.current_context() != context) {
    if (is_pushed_) driver_.push(context);
  }
  ~ContextScope() {
    if (is_pushed_) driver_.pop();
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Driver& driver_;
  const bool is_pushed_;
};

// A stream of the current context that the default stream does not wait for, of the highest priority.
class Stream {
 public:
  explicit Stream(std::shared_ptr<const Driver> driver);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  CudaStream get() const { return stream_; }

 private:
  std::shared_ptr<const Driver> driver_;
  CudaStream stream_ = nullptr;
};

// An event of the current context, without timing.
class Event {
 public:
  explicit Event(std::shared_ptr<const Driver> driver);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  CudaEvent get() const { return event_; }

 private:
  std::shared_ptr<const Driver> driver_;
  CudaEvent event_ = nullptr;
};

}  // namespace singa_lite
