// SPDX-License-Identifier: Apache-2.0
// A stand-in for libnccl.so.2 (test code, never installed): the calls the communicator uses, over POSIX shared
// memory between processes, run on the stand-in CUDA streams. Like NCCL it puts nothing on the stream before it has
// stopped answering "in progress", drops NaN in max and min, and waits for ever for a rank that does not come, at its end
// too.
//
// STANDIN_FAULT on rank STANDIN_RANK (-1: all): init_hangs, init_fails, async_error, op_hangs, op_fails, dies,
// end_hangs, abort_hangs; those of a collective strike at the third;
// give_hangs: the third collective stays "in progress", as one whose connections cannot be made.
// STANDIN_VERSION: what ncclGetVersion says.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Status { kSuccess, kCudaError, kSystemError, kInternal, kInvalidArgument, kInvalidUsage, kRemote, kInProgress };
enum Kind { kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kSendsAndReceives };
constexpr int kRanks = 8;
constexpr std::size_t kChunk = 1 << 20;  // bytes a rank offers at a time

struct Shared {
  std::atomic<int> joined, ended, arrived, turn;
  alignas(64) char data[kRanks][kChunk];
};

struct Comm {
  Shared* shared = nullptr;
  std::string name;
  int rank = 0, size = 0, calls = 0;
  bool is_blocking = false;
  std::atomic<int> status{kInProgress};
  std::atomic<bool> is_aborted{false};
  std::atomic<int> queued{0};
};

struct Call {
  Comm* comm;
  Kind kind;
  const char* in;
  char* out;
  std::size_t count;
  int dtype, op, root;
  bool hangs;
  std::vector<const char*> sends{};  // of a group: by peer
  std::vector<char*> receives{};
};

// What this thread has called since ncclGroupStart: a send to every rank and a receive from it, all of one size.
struct Group {
  Comm* comm = nullptr;
  void* stream = nullptr;
  std::size_t count = 0, calls = 0;
  int dtype = 0;
  std::vector<const char*> sends;
  std::vector<char*> receives;
};
thread_local std::unique_ptr<Group> group;

std::atomic<int> live{0};

bool has_fault(const char* fault, int rank) {
  const char* wanted = std::getenv("STANDIN_FAULT");
  const char* where = std::getenv("STANDIN_RANK");
  const int on = where != nullptr ? std::atoi(where) : -1;
  return wanted != nullptr && std::strcmp(wanted, fault) == 0 && (on == -1 || on == rank);
}

void rest() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

// False if this rank aborted meanwhile.
bool meet(Comm& comm) {
  if (comm.is_aborted) return false;
  Shared& shared = *comm.shared;
  const int turn = shared.turn;
  if (++shared.arrived == comm.size) {
    shared.arrived = 0;
    ++shared.turn;
  }
  while (shared.turn == turn) {
    if (comm.is_aborted) return false;
    rest();
  }
  return true;
}

struct BFloat16 {
  std::uint16_t upper;
  explicit BFloat16(float value) {  // to nearest even; no NaN comes here
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    upper = std::uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  operator float() const {
    const std::uint32_t bits = std::uint32_t(upper) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};

template <typename Element, typename Wide>
void combine(const Comm& comm, std::size_t index, char* out, int op) {
  Wide total = 0;
  for (int rank = 0; rank < comm.size; ++rank) {
    const Wide value = reinterpret_cast<const Element*>(comm.shared->data[rank])[index];
    if (rank == 0) total = value;
    else if (op == 2) total = std::is_floating_point_v<Wide> ? Wide(std::fmax(total, value)) : std::max(total, value);
    else if (op == 3) total = std::is_floating_point_v<Wide> ? Wide(std::fmin(total, value)) : std::min(total, value);
    else total += value;
  }
  *reinterpret_cast<Element*>(out) = Element(op == 4 ? total / Wide(comm.size) : total);
}

std::size_t bytes_of(int dtype) {
  return dtype == 1 ? 1 : dtype == 6 || dtype == 9 ? 2 : dtype == 2 || dtype == 7 ? 4 : 8;
}

void combine(const Comm& comm, int dtype, std::size_t index, char* out, int op) {
  switch (dtype) {
    case 2: return combine<std::int32_t, std::int32_t>(comm, index, out, op);
    case 4: return combine<std::int64_t, std::int64_t>(comm, index, out, op);
    case 6: return combine<_Float16, float>(comm, index, out, op);
    case 7: return combine<float, float>(comm, index, out, op);
    case 9: return combine<BFloat16, float>(comm, index, out, op);
    default: return combine<double, double>(comm, index, out, op);
  }
}

// With the peers of one distance after the other; a rank that posts another group than the rest is lost, as in NCCL.
void run_group(const Call& call) {
  Comm& comm = *call.comm;
  const std::size_t bytes = call.count * bytes_of(call.dtype);
  for (int distance = 0; distance < comm.size; ++distance) {
    const int to = (comm.rank + distance) % comm.size, from = (comm.rank - distance + comm.size) % comm.size;
    for (std::size_t start = 0; start < bytes; start += kChunk) {
      const std::size_t part = std::min(kChunk, bytes - start);
      std::memcpy(comm.shared->data[comm.rank], call.sends[to] + start, part);
      if (!meet(comm)) return;
      std::memcpy(call.receives[from] + start, comm.shared->data[from], part);
      if (!meet(comm)) return;
    }
  }
}

void run(const Call& call) {
  Comm& comm = *call.comm;
  while (call.hangs && !comm.is_aborted) rest();
  if (call.hangs) return;
  if (call.kind == kSendsAndReceives) return run_group(call);
  const std::size_t width = bytes_of(call.dtype), step = kChunk / width;
  const std::size_t total = call.kind == kReduceScatter ? call.count * comm.size : call.count;
  const std::size_t first = call.kind == kReduceScatter ? call.count * comm.rank : 0, last = first + call.count;
  for (std::size_t start = 0; start < total; start += step) {
    const std::size_t count = std::min(step, total - start);
    std::memcpy(comm.shared->data[comm.rank], call.in + start * width, count * width);
    if (!meet(comm)) return;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t place = start + i;
      if (call.kind == kBroadcast) {
        std::memcpy(call.out + place * width, comm.shared->data[call.root] + i * width, width);
      } else if (call.kind == kAllGather) {
        for (int rank = 0; rank < comm.size; ++rank)
          std::memcpy(call.out + (rank * call.count + place) * width, comm.shared->data[rank] + i * width, width);
      } else if (place >= first && place < last && (call.kind != kReduce || comm.rank == call.root)) {
        combine(comm, call.dtype, i, call.out + (place - first) * width, call.op);
      }
    }
    if (!meet(comm)) return;
  }
}

void* symbol(const char* name) { return dlsym(dlopen(std::getenv("SINGA_LITE_CUDA_LIB"), RTLD_NOW), name); }

// The stream, or the graph it is captured into, holds the communicator until the collective is over or the graph gone.
void launch(const Call& call, void* stream) {
  static const auto add = reinterpret_cast<void (*)(void*, const std::function<void()>*)>(symbol("standin_add"));
  ++call.comm->queued;
  const std::shared_ptr<Comm> held(call.comm, [](Comm* comm) { --comm->queued; });
  const std::function<void()> task = [call, held] { run(call); };
  add(stream, &task);
}

// Answers "in progress" and puts the collective on the stream a little later, as NCCL's own thread does.
int enqueue(Call call, void* stream) {
  Comm* comm = call.comm;
  if (comm->status != kSuccess) return kInvalidUsage;
  const bool is_third = ++comm->calls == 3;
  if (is_third && has_fault("op_fails", comm->rank)) return kInvalidArgument;
  if (is_third && has_fault("dies", comm->rank)) _exit(3);
  const bool errs = is_third && has_fault("async_error", comm->rank);
  call.hangs = errs || (is_third && has_fault("op_hangs", comm->rank));
  comm->status = kInProgress;
  if (is_third && has_fault("give_hangs", comm->rank)) return kInProgress;
  std::thread launcher([call, comm, stream, errs] {
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    launch(call, stream);
    comm->status = kSuccess;
    if (!errs) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the call has long returned
    comm->status = kRemote;
  });
  if (!comm->is_blocking) return launcher.detach(), kInProgress;
  launcher.join();
  return kSuccess;
}

// Keeps a send or receive for the group's end.
template <class Pointer>
int add(std::vector<Pointer> Group::*side, Pointer memory, std::size_t count, int dtype, int peer, Comm* comm, void* stream) {
  if (group == nullptr || peer < 0 || peer >= comm->size) return kInvalidUsage;
  if (group->calls++ == 0) {
    group->comm = comm, group->stream = stream, group->count = count, group->dtype = dtype;
    group->sends.resize(comm->size), group->receives.resize(comm->size);
  }
  if (group->comm != comm || group->count != count || group->dtype != dtype || ((*group).*side)[peer] != nullptr)
    return kInvalidUsage;
  ((*group).*side)[peer] = memory;
  return kSuccess;
}

void join(Comm* comm) {
  const int file = shm_open(comm->name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) {
    comm->status = kSystemError;
    return;
  }
  comm->shared = static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  close(file);
  ++comm->shared->joined;
  while (comm->shared->joined < comm->size && !comm->is_aborted) rest();
  shm_unlink(comm->name.c_str());
  if (has_fault("init_fails", comm->rank)) comm->status = kSystemError;
  else if (!has_fault("init_hangs", comm->rank)) comm->status = kSuccess;
}

}  // namespace

extern "C" {

struct Id {
  char bytes[128];
};

int ncclGetVersion(int* version) {
  const char* text = std::getenv("STANDIN_VERSION");
  *version = text != nullptr ? std::atoi(text) : 22809;
  return kSuccess;
}
const char* ncclGetErrorString(int status) {
  return status == kRemote ? "remote process exited or there was a network error"
         : status == kSystemError ? "unhandled system error" : "invalid argument";
}
const char* ncclGetLastError(void*) { return "stand-in"; }

#ifndef STANDIN_WITHOUT_ID
int ncclGetUniqueId(Id* id) {
  std::memset(id->bytes, 0, sizeof id->bytes);
  const std::string name = "/singa_lite-standin-" + std::to_string(std::random_device()()) + "-" + std::to_string(getpid());
  std::memcpy(id->bytes, name.c_str(), name.size());
  return kSuccess;
}
#endif

int ncclCommInitRankConfig(void** out, int size, Id id, int rank, void* config) {
  int fields[4];  // magic, version, blocking, and what later versions keep behind it
  std::memcpy(fields, static_cast<char*>(config) + 8, sizeof fields);
  if (unsigned(fields[0]) != 0xcafebeef || fields[2] < 0 || fields[2] > 1 || fields[3] != INT32_MIN) return kInvalidArgument;
  Comm* comm = new Comm;
  comm->name = id.bytes;
  comm->rank = rank;
  comm->size = size;
  *out = comm;
  comm->is_blocking = fields[2] == 1;
  ++live;
  std::thread starter(join, comm);
  if (!comm->is_blocking) return starter.detach(), kInProgress;
  starter.join();
  return comm->status;
}
int ncclCommInitRank(void** out, int size, Id id, int rank) {
  int config[12] = {48, 0, int(0xcafebeef), 0, 1, INT32_MIN};
  return ncclCommInitRankConfig(out, size, id, rank, config);
}
int ncclCommGetAsyncError(void* comm, int* status) { return *status = static_cast<Comm*>(comm)->status, kSuccess; }

// Freed communicators are kept: a thread of the stand-in may still look at them.
int ncclCommFinalize(void* handle) {
  Comm* comm = static_cast<Comm*>(handle);
  if (comm->status != kSuccess) return kInvalidUsage;
  comm->status = kInProgress;
  std::thread([comm] {
    while (comm->queued > 0 || has_fault("end_hangs", comm->rank)) rest();
    ++comm->shared->ended;
    while (comm->shared->ended < comm->size && !comm->is_aborted) rest();
    comm->status = kSuccess;
  }).detach();
  return kInProgress;
}
int ncclCommDestroy(void* handle) {
  --live;
  return static_cast<Comm*>(handle)->status == kSuccess ? kSuccess : kInvalidUsage;
}
int ncclCommAbort(void* handle) {
  Comm* comm = static_cast<Comm*>(handle);
  comm->is_aborted = true;
  shm_unlink(comm->name.c_str());
  while (has_fault("abort_hangs", comm->rank)) rest();
  --live;
  return kSuccess;
}

int ncclAllReduce(const char* in, char* out, std::size_t count, int dtype, int op, Comm* comm, void* stream) {
  return enqueue({comm, kAllReduce, in, out, count, dtype, op, 0, false}, stream);
}
int ncclReduce(const char* in, char* out, std::size_t count, int dtype, int op, int root, Comm* comm, void* stream) {
  return enqueue({comm, kReduce, in, out, count, dtype, op, root, false}, stream);
}
int ncclBroadcast(const char* in, char* out, std::size_t count, int dtype, int root, Comm* comm, void* stream) {
  return enqueue({comm, kBroadcast, in, out, count, dtype, 0, root, false}, stream);
}
int ncclAllGather(const char* in, char* out, std::size_t count, int dtype, Comm* comm, void* stream) {
  return enqueue({comm, kAllGather, in, out, count, dtype, 0, 0, false}, stream);
}
int ncclReduceScatter(const char* in, char* out, std::size_t count, int dtype, int op, Comm* comm, void* stream) {
  return enqueue({comm, kReduceScatter, in, out, count, dtype, op, 0, false}, stream);
}

int ncclGroupStart() { return group = std::make_unique<Group>(), kSuccess; }
int ncclSend(const char* in, std::size_t count, int dtype, int peer, Comm* comm, void* stream) {
  return add(&Group::sends, in, count, dtype, peer, comm, stream);
}
int ncclRecv(char* out, std::size_t count, int dtype, int peer, Comm* comm, void* stream) {
  return add(&Group::receives, out, count, dtype, peer, comm, stream);
}
int ncclGroupEnd() {
  const std::unique_ptr<Group> ended = std::move(group);
  if (ended == nullptr || ended->calls == 0 || ended->calls != 2 * ended->sends.size()) return kInvalidUsage;
  return enqueue({ended->comm, kSendsAndReceives, nullptr, nullptr, ended->count, ended->dtype, 0, 0, false, ended->sends,
                  ended->receives},
                 ended->stream);
}

// For the tests: communicators that were neither destroyed nor aborted.
int standin_live() { return live; }
}  // extern "C"
