// SPDX-License-Identifier: Apache-2.0
// A stand-in for libcuda.so.1 on machines without a GPU (test code, never installed). Device memory is host memory;
// a stream is a queue that one thread works off in order, so that what is not ordered by an event comes out wrong.
// What is given to a stream that is captured becomes a node of a graph, which runs its nodes in another order each
// time, any that the order of streams and the events permit.
// STANDIN_SLOW_MS: every piece of work on a stream begins that many milliseconds late; STANDIN_JITTER_US: every fourth
// begins up to that many microseconds late.
// STANDIN_UUID: the GPU's UUID is made of this number instead of the process's.
#include <unistd.h>

#include <algorithm>
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
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace {

enum Status { kSuccess = 0, kInvalidValue = 1, kNoContext = 201, kInvalidHandle = 400, kNotReady = 600, kCapturing = 900, kIsolation = 905, kCapturedEvent = 907 };

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

class Queue;
using Task = std::function<void()>;
using Nodes = std::set<int>;  // what comes next comes after these

struct Graph {
  struct Node {
    Task task;
    Nodes after;
    int priority;
  };
  std::vector<Node> nodes;
};
using GraphHandle = std::shared_ptr<Graph>*;

struct ExecutableGraph {
  std::shared_ptr<Graph> graph;
  bool has_priorities;
};

// The one capture that there may be at a time.
struct Capture {
  std::mutex mutex;
  int number = 0;  // of this capture, 0 if there is none
  Queue* origin = nullptr;
  std::shared_ptr<Graph> graph;
  std::map<Queue*, Nodes> ends;  // of the streams that take part
};
Capture& capture() {
  static auto& only = *new Capture;
  return only;
}

thread_local std::vector<void*> contexts;  // what this thread has pushed

void* current_context() { return contexts.empty() ? nullptr : contexts.back(); }

class Queue {
 public:
  explicit Queue(int priority = 0, void* context = nullptr) : context(context), priority_(priority), thread_([this] { work(); }) {
    thread_.detach();  // a queue lives for ever: its thread may be in it
  }

  void add(Task task) {
    if (is_capturing && add_to_graph(task)) return;
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty() && !is_busy_; });
  }
  std::atomic<bool> is_capturing{false};
  void* const context;  // nullptr of the default streams

 private:
  bool add_to_graph(const Task& task) {
    Capture& now = capture();
    std::lock_guard lock(now.mutex);
    if (now.graph == nullptr) return false;
    Nodes& ends = now.ends[this];
    now.graph->nodes.push_back({task, ends, priority_});
    ends = {int(now.graph->nodes.size()) - 1};
    return true;
  }
  void work() {
    const int slow_ms = number("STANDIN_SLOW_MS", 0), jitter_us = number("STANDIN_JITTER_US", 0);
    std::mt19937 random(unsigned(reinterpret_cast<std::uintptr_t>(this)));
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      is_busy_ = true;
      lock.unlock();
      if (slow_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(slow_ms));
      if (jitter_us > 0 && random() % 4 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % unsigned(jitter_us)));
      task();
      task = nullptr;
      lock.lock();
      is_busy_ = false;
      changed_.notify_all();
    }
  }

  const int priority_;  // CUDA's: a lower number goes first
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool is_busy_ = false;
  std::thread thread_;
};

struct EventState {
  void* const context = current_context();
  std::mutex mutex;
  std::condition_variable changed;
  unsigned long recorded = 0, happened = 0;
  int capture = 0;  // in which it was recorded: what waits for it joins that, and nobody may ask whether it has happened
  Nodes after;
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

// Runs every node after those it must come after, and else in an order that only the number of the run decides; of a
// graph with priorities every other run follows them, as they promise nothing.
void run(const Graph& graph, bool has_priorities, unsigned number) {
  std::mt19937 random(number);
  std::vector<int> waits_for, ready;
  std::vector<std::vector<int>> before(graph.nodes.size());
  for (int node = 0; node < int(graph.nodes.size()); ++node) {
    const Nodes& after = graph.nodes[node].after;
    waits_for.push_back(int(after.size()));
    for (int other : after) before[other].push_back(node);
    if (after.empty()) ready.push_back(node);
  }
  while (!ready.empty()) {
    std::swap(ready[random() % ready.size()], ready.back());
    if (has_priorities && number % 2 == 0) {
      const auto is_before = [&](int a, int b) { return graph.nodes[a].priority < graph.nodes[b].priority; };
      std::swap(*std::min_element(ready.rbegin(), ready.rend(), is_before), ready.back());
    }
    const int node = ready.back();
    ready.pop_back();
    graph.nodes[node].task();
    for (int other : before[node])
      if (--waits_for[other] == 0) ready.push_back(other);
  }
}

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
int cuCtxGetDevice(int* device) { return *device = 0, current_context() != nullptr ? kSuccess : kNoContext; }
int cuCtxGetCurrent(void** context) { return *context = current_context(), kSuccess; }
int cuCtxSetCurrent(void* context) {
  if (!contexts.empty()) contexts.pop_back();
  return contexts.push_back(context), kSuccess;
}
int cuCtxPushCurrent_v2(void* context) { return contexts.push_back(context), kSuccess; }
int cuCtxPopCurrent_v2(void** context) {
  *context = current_context();
  return contexts.pop_back(), kSuccess;
}
int cuPointerGetAttribute(void* value, int, const void*) {
  *static_cast<int*>(value) = number("STANDIN_MEMORY_DEVICE", 0);
  return kSuccess;
}
int cuThreadExchangeStreamCaptureMode(int*) { return kSuccess; }
int cuStreamIsCapturing(void* stream, int* status) { return *status = queue_of(stream).is_capturing, kSuccess; }
int cuCtxGetStreamPriorityRange(int* lowest, int* highest) { return *lowest = 0, *highest = -5, kSuccess; }
int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  if (current_context() == nullptr) return kNoContext;
  if (flags != 1 || priority != -5) return kInvalidValue;
  *stream = new Queue(priority, current_context());
  return kSuccess;
}
int cuStreamDestroy_v2(void*) { return kSuccess; }
int cuStreamSynchronize(void* stream) {
  if (queue_of(stream).is_capturing) return kCapturing;
  return queue_of(stream).drain(), kSuccess;
}

int cuEventCreate(void** event, unsigned flags) {
  if (current_context() == nullptr) return kNoContext;
  if (flags != 2) return kInvalidValue;
  *event = new std::shared_ptr<EventState>(std::make_shared<EventState>());
  return kSuccess;
}
int cuEventDestroy_v2(void* event) { return delete static_cast<EventHandle>(event), kSuccess; }
int cuEventRecord(void* event, void* stream) {
  std::shared_ptr<EventState> state = *static_cast<EventHandle>(event);
  Queue& queue = queue_of(stream);
  if (queue.context != nullptr && queue.context != state->context) return kInvalidHandle;
  std::lock_guard lock(state->mutex);
  state->capture = 0;
  if (queue.is_capturing) {
    Capture& now = capture();
    std::lock_guard capture_lock(now.mutex);
    state->capture = now.number;
    state->after = now.ends[&queue];
    return kSuccess;
  }
  queue.add([state, turn = ++state->recorded] {
    std::lock_guard lock(state->mutex);
    state->happened = turn;
    state->changed.notify_all();
  });
  return kSuccess;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  std::shared_ptr<EventState> state = *static_cast<EventHandle>(event);
  Queue& queue = queue_of(stream);
  std::lock_guard lock(state->mutex);
  if (state->capture != 0) {
    Capture& now = capture();
    std::lock_guard capture_lock(now.mutex);
    if (state->capture != now.number) return kCapturedEvent;
    queue.is_capturing = true;
    now.ends[&queue].insert(state->after.begin(), state->after.end());
    return kSuccess;
  }
  if (queue.is_capturing) return kIsolation;
  queue.add([state, turn = state->recorded] {
    std::unique_lock lock(state->mutex);
    state->changed.wait(lock, [&] { return state->happened >= turn; });
  });
  return kSuccess;
}
int cuEventQuery(void* event) {
  std::shared_ptr<EventState> state = *static_cast<EventHandle>(event);
  std::lock_guard lock(state->mutex);
  if (state->capture != 0) return kCapturedEvent;
  return state->happened >= state->recorded ? kSuccess : kNotReady;
}

int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  queue_of(stream).add([=] { function(argument); });
  return kSuccess;
}

// For the tests and the other stand-ins: work for a stream.
void standin_add(void* stream, const Task* task) { queue_of(stream).add(*task); }

// What the runtime's calls of a similar name do. The end gives null where a stream that took part was not joined.
int standin_begin_capture(void* stream) {
  static int captures = 0;
  Capture& now = capture();
  std::lock_guard lock(now.mutex);
  if (now.number != 0) return kCapturing;
  now.number = ++captures;
  now.origin = &queue_of(stream);
  now.graph = std::make_shared<Graph>();
  now.ends[now.origin] = {};
  now.origin->is_capturing = true;
  return kSuccess;
}
void* standin_end_capture(void* stream) {
  Capture& now = capture();
  std::lock_guard lock(now.mutex);
  if (now.origin != &queue_of(stream)) return nullptr;
  const Nodes ends = now.ends[now.origin];
  std::vector<int> open(ends.begin(), ends.end());
  Nodes joined = ends;
  while (!open.empty()) {
    const int node = open.back();
    open.pop_back();
    for (int other : now.graph->nodes[node].after)
      if (joined.insert(other).second) open.push_back(other);
  }
  const bool is_whole = joined.size() == now.graph->nodes.size();
  for (const auto& [queue, _] : now.ends) queue->is_capturing = false;
  auto graph = std::exchange(now.graph, nullptr);
  now.number = 0;
  now.origin = nullptr;
  now.ends.clear();
  return is_whole ? new std::shared_ptr<Graph>(graph) : nullptr;
}
void standin_destroy_graph(void* graph) { delete static_cast<GraphHandle>(graph); }
int cuGraphInstantiateWithFlags(void** made, void* graph, unsigned long long flags) {
  constexpr unsigned long long kUseNodePriority = 8;
  if (flags != 0 && flags != kUseNodePriority) return kInvalidValue;
  *made = new ExecutableGraph{*static_cast<GraphHandle>(graph), flags == kUseNodePriority};
  return kSuccess;
}
int standin_launch(void* executable, void* stream) {
  static std::atomic<unsigned> launches{0};
  if (queue_of(stream).is_capturing) return kCapturing;
  queue_of(stream).add([executable = *static_cast<ExecutableGraph*>(executable), number = ++launches] {
    run(*executable.graph, executable.has_priorities, number);
  });
  return kSuccess;
}
void standin_destroy(void* executable) { delete static_cast<ExecutableGraph*>(executable); }

// A stream of cupy's, of any priority.
void* standin_stream(int priority) { return new Queue(priority, current_context()); }

}  // extern "C"
