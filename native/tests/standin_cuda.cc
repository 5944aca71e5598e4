// SPDX-License-Identifier: Apache-2.0
// A stand-in for libcuda.so.1 on machines without a GPU (test code, never installed). Device memory is host memory;
// a stream is a queue that one thread works off in order, so that what is not ordered by an event comes out wrong.
// STANDIN_SLOW_MS: every piece of work on a stream begins that many milliseconds late.
// STANDIN_UUID: the GPU's UUID is made of this number instead of the process's.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

namespace {

enum Status { kSuccess = 0, kInvalidValue = 1, kNoContext = 201, kNotReady = 600, kCapturing = 900 };

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

class Queue;

// All streams, which live for ever: a queue's thread may be in it.
std::set<Queue*>& queues() {
  static auto& all = *new std::set<Queue*>;
  return all;
}

class Queue {
 public:
  Queue() : thread_([this] { work(); }) {
    thread_.detach();
    queues().insert(this);
  }

  void add(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty() && !is_busy_; });
  }
  std::atomic<bool> is_capturing{false};

 private:
  void work() {
    const int slow_ms = number("STANDIN_SLOW_MS", 0);
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      is_busy_ = true;
      lock.unlock();
      if (slow_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(slow_ms));
      task();
      task = nullptr;
      lock.lock();
      is_busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool is_busy_ = false;
  std::thread thread_;
};

struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  unsigned long recorded = 0, happened = 0;
  bool is_captured = false;  // what waits for it joins the capture, and nobody may ask whether it has happened
};
using EventHandle = std::shared_ptr<EventState>*;

// 0, 1 and 2 are the default streams.
Queue& queue_of(void* stream) {
  static std::mutex mutex;
  static auto& defaults = *new std::map<void*, Queue*>;
  if (reinterpret_cast<std::uintptr_t>(stream) > 2) return *static_cast<Queue*>(stream);
  std::lock_guard lock(mutex);
  Queue*& queue = defaults[stream];
  if (queue == nullptr) queue = new Queue;
  return *queue;
}

// The streams that take part in the capture, if there is one.
std::set<Queue*>& capturing() {
  static auto& streams = *new std::set<Queue*>;
  return streams;
}

void join_capture(Queue& queue) {
  queue.is_capturing = true;
  capturing().insert(&queue);
}

thread_local int contexts = 0;  // how many this thread has pushed

}  // namespace

extern "C" {

int cuInit(unsigned) { return kSuccess; }
int cuGetErrorString(int status, const char** text) {
  *text = status == kNoContext ? "invalid device context" : status == kCapturing ? "stream is capturing" : "stand-in error";
  return kSuccess;
}
int cuDeviceGetUuid_v2(char* uuid, int) {
  std::memset(uuid, 0, 16);
  const int value = number("STANDIN_UUID", getpid());
  std::memcpy(uuid, &value, sizeof value);
  return kSuccess;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(0x1000 + device);
  return kSuccess;
}
int cuCtxGetDevice(int* device) { return *device = 0, contexts > 0 ? kSuccess : kNoContext; }
int cuCtxPushCurrent_v2(void*) { return ++contexts, kSuccess; }
int cuCtxPopCurrent_v2(void**) { return --contexts, kSuccess; }
int cuCtxSynchronize() {
  if (contexts == 0) return kNoContext;
  if (!capturing().empty()) return kCapturing;
  for (Queue* queue : std::set<Queue*>(queues())) queue->drain();
  return kSuccess;
}
int cuPointerGetAttribute(void* value, int, const void*) {
  *static_cast<int*>(value) = number("STANDIN_MEMORY_DEVICE", 0);
  return kSuccess;
}
int cuThreadExchangeStreamCaptureMode(int*) { return kSuccess; }
int cuStreamIsCapturing(void* stream, int* status) { return *status = queue_of(stream).is_capturing, kSuccess; }
int cuCtxGetStreamPriorityRange(int* lowest, int* highest) { return *lowest = 0, *highest = -5, kSuccess; }
int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  if (contexts == 0) return kNoContext;
  if (flags != 1 || priority != -5) return kInvalidValue;
  *stream = new Queue;
  return kSuccess;
}
int cuStreamDestroy_v2(void*) { return kSuccess; }
int cuStreamSynchronize(void* stream) { return queue_of(stream).drain(), kSuccess; }

int cuEventCreate(void** event, unsigned flags) {
  if (contexts == 0) return kNoContext;
  if (flags != 2) return kInvalidValue;
  *event = new std::shared_ptr<EventState>(std::make_shared<EventState>());
  return kSuccess;
}
int cuEventDestroy_v2(void* event) { return delete static_cast<EventHandle>(event), kSuccess; }
int cuEventRecord(void* event, void* stream) {
  std::shared_ptr<EventState> state = *static_cast<EventHandle>(event);
  std::lock_guard lock(state->mutex);
  state->is_captured = queue_of(stream).is_capturing;
  queue_of(stream).add([state, turn = ++state->recorded] {
    std::lock_guard lock(state->mutex);
    state->happened = turn;
    state->changed.notify_all();
  });
  return kSuccess;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  std::shared_ptr<EventState> state = *static_cast<EventHandle>(event);
  std::lock_guard lock(state->mutex);
  if (state->is_captured) join_capture(queue_of(stream));
  queue_of(stream).add([state, turn = state->recorded] {
    std::unique_lock lock(state->mutex);
    state->changed.wait(lock, [&] { return state->happened >= turn; });
  });
  return kSuccess;
}
int cuEventQuery(void* event) {
  std::shared_ptr<EventState> state = *static_cast<EventHandle>(event);
  std::lock_guard lock(state->mutex);
  if (state->is_captured) return kCapturing;
  return state->happened >= state->recorded ? kSuccess : kNotReady;
}

int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  queue_of(stream).add([=] { function(argument); });
  return kSuccess;
}

// For the tests: pretend that a graph is being captured, from `stream` on, or end that.
void standin_capture(void* stream, int begins) {
  if (begins != 0) return join_capture(queue_of(stream));
  for (Queue* queue : capturing()) queue->is_capturing = false;
  capturing().clear();
}

}  // extern "C"
