// SPDX-License-Identifier: Apache-2.0
#include "comm/flight_recorder.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/types.h"
#include "common/error.h"

namespace singa_lite {
namespace {

constexpr std::uint64_t kFlightMagic = 0x464c494748540001;  // "FLIGHT", layout 1

template <std::size_t N>
void put(char (&to)[N], std::string_view text) {
  const std::size_t bytes = std::min(N, text.size());
  std::memcpy(to, text.data(), bytes);
  if (bytes < N) to[bytes] = '\0';
}

template <std::size_t N>
std::string text_in(const char (&from)[N]) {
  return std::string(from, strnlen(from, N));
}

// Of a name that was cut also the mark of that.
std::string name_in(const char (&from)[kFlightTextBytes], std::uint64_t bytes) {
  return bytes > kFlightTextBytes ? std::string(from, kFlightTextBytes) + "..." : std::string(from, std::size_t(bytes));
}

// The end of a path says more than its beginning.
std::string_view last_bytes(std::string_view text) {
  return text.substr(text.size() - std::min(text.size(), kFlightTextBytes));
}

template <std::size_t N>
std::string word_of(const char* const (&words)[N], std::size_t number) {
  return number < N ? words[number] : "?";
}

// The same memory as a FlightRecord's, but every offset checked by the caller.
template <class T>
const T* at(const char* memory, std::size_t offset) {
  return reinterpret_cast<const T*>(memory + offset);
}

bool read_call(const FlightCall& from, CallReading& to) {
  const std::uint64_t begin = from.begin.load(std::memory_order_acquire);
  const Fingerprint call = from.call;
  to.called_s = from.called_s;
  to.line = from.line;
  const std::size_t num_dims = from.num_dims;
  to.dims.assign(from.dims, from.dims + std::min(num_dims, kFlightDims));
  to.name = name_in(from.name, call.name_bytes);
  to.file = text_in(from.file);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (begin == 0 || from.end.load(std::memory_order_relaxed) != begin) return false;  // see Note [torn calls]
  to.all_called_s = from.all_called_s.load();
  to.ended_s = from.ended_s.load();
  to.state = std::min(from.state.load(), FlightState::kFailed);
  to.number = begin - 1;
  to.count = call.count;
  to.name_hash = call.name_hash;
  to.kind = word_of(kKindNames, call.kind);
  to.op = word_of(kOpNames, call.op);
  to.dtype = word_of(kDTypeNames, call.dtype);
  to.wire = call.wire == call.dtype ? "" : word_of(kDTypeNames, call.wire);
  to.root = call.root;
  to.has_more_dims = num_dims > kFlightDims;
  return true;
}

char* mapped(int fd, std::size_t bytes) {
  void* memory = fd < 0 || ftruncate(fd, off_t(bytes)) != 0
                     ? MAP_FAILED
                     : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory != MAP_FAILED) return static_cast<char*>(memory);
  const std::string why = std::strerror(errno);
  if (fd >= 0) close(fd);
  throw CommError("flight recorder: cannot make a file in memory: " + why);
}

}  // namespace

std::size_t FlightRecord::bytes_for(int size) {
  return sizeof(FlightHeader) + std::size_t(size) * (sizeof(FlightRank) + kFlightCalls * sizeof(FlightCall));
}

FlightRecord::FlightRecord(char* memory, int size)
    : header_(reinterpret_cast<FlightHeader*>(memory)),
      ranks_(reinterpret_cast<FlightRank*>(memory + sizeof(FlightHeader))),
      calls_(reinterpret_cast<FlightCall*>(ranks_ + size)) {
  header_->size = std::uint32_t(size);
}

void FlightRecord::describe(const std::string& id, const std::string& title) {
  put(header_->id, id);
  put(header_->title, title);
  header_->magic.store(kFlightMagic, std::memory_order_release);
}

bool FlightRecord::claim_report() {
  std::uint32_t none = 0;
  return header_->is_reported.compare_exchange_strong(none, 1);
}

void FlightRecord::join(int rank, int pid, int world_rank) {
  name_rank(rank, pid, world_rank);
  ranks_[rank].joined_s.store(monotonic_s());
}

void FlightRecord::name_rank(int rank, int pid, int world_rank) {
  ranks_[rank].world_rank.store(world_rank);
  ranks_[rank].pid.store(pid);
}

FlightCall& FlightRecord::call_at(int rank, std::uint64_t number) const {
  return calls_[std::size_t(rank) * kFlightCalls + number % kFlightCalls];
}

FlightCall* FlightRecord::find(int rank, std::uint64_t number) const {
  FlightCall& call = call_at(rank, number);
  return call.begin.load(std::memory_order_relaxed) == number + 1 ? &call : nullptr;
}

// See Note [torn calls].
void FlightRecord::start(int rank, const Fingerprint& call, std::string_view name, const CallSite& site,
                         double called_s) {
  FlightCall& to = call_at(rank, call.sequence);
  to.end.store(call.sequence + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  to.call = call;
  to.called_s = called_s;
  to.all_called_s.store(0, std::memory_order_relaxed);
  to.ended_s.store(0, std::memory_order_relaxed);
  to.state.store(FlightState::kStarted, std::memory_order_relaxed);
  to.line = site.line;
  to.num_dims = std::uint32_t(site.num_dims);
  std::copy_n(site.dims, kFlightDims, to.dims);
  put(to.name, name);
  put(to.file, last_bytes(site.file));
  to.begin.store(call.sequence + 1, std::memory_order_release);
  ranks_[rank].num_calls.store(call.sequence + 1, std::memory_order_release);
}

void FlightRecord::all_there(int rank, std::uint64_t number, double now_s) {
  FlightCall* call = find(rank, number);
  if (call == nullptr) return;
  call->all_called_s.store(now_s, std::memory_order_relaxed);
  call->state.store(FlightState::kAllThere, std::memory_order_relaxed);
}

void FlightRecord::end(int rank, std::uint64_t number, FlightState state, double now_s) {
  FlightCall* call = find(rank, number);
  if (call == nullptr) return;
  call->ended_s.store(now_s, std::memory_order_relaxed);
  call->state.store(state, std::memory_order_relaxed);
}

FlightFile::FlightFile(int size)
    : bytes_(FlightRecord::bytes_for(size)),
      fd_(memfd_create("singa_lite-flight", MFD_CLOEXEC)),
      memory_(mapped(fd_, bytes_)),
      record_(memory_, size) {}

FlightFile::~FlightFile() {
  munmap(memory_, bytes_);
  close(fd_);
}

std::optional<bool> claim_report(const std::string& path, const std::string& id) {
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat status {};
  if (fd < 0) return std::nullopt;
  void* memory = fstat(fd, &status) == 0 && status.st_size >= off_t(sizeof(FlightHeader))
                     ? mmap(nullptr, sizeof(FlightHeader), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                     : MAP_FAILED;
  close(fd);
  if (memory == MAP_FAILED) return std::nullopt;
  FlightHeader& header = *static_cast<FlightHeader*>(memory);
  std::uint32_t none = 0;
  std::optional<bool> is_first;
  if (header.magic.load(std::memory_order_acquire) == kFlightMagic && text_in(header.id) == id)
    is_first = header.is_reported.compare_exchange_strong(none, 1);
  munmap(memory, sizeof(FlightHeader));
  return is_first;
}

FlightReading read_flight(const char* memory, std::size_t bytes) {
  const auto refuse = [] { throw CommError("flight recorder: there is no record of this version of singa_lite"); };
  const std::size_t start = Segment::flight_at(memory, bytes);
  if (start > bytes || bytes - start < sizeof(FlightHeader) || start % kLine != 0) refuse();
  const char* base = memory + start;
  const FlightHeader& header = *at<FlightHeader>(base, 0);
  const std::uint32_t size = header.size;
  if (header.magic.load(std::memory_order_acquire) != kFlightMagic || size < 1 || size > std::uint32_t(kMaxRanks) ||
      bytes - start < FlightRecord::bytes_for(int(size)))
    refuse();
  FlightReading reading{text_in(header.id), text_in(header.title), {}, header.is_reported.load() != 0};
  const FlightRank* ranks = at<FlightRank>(base, sizeof(FlightHeader));
  const FlightCall* calls = at<FlightCall>(base, sizeof(FlightHeader) + size * sizeof(FlightRank));
  for (std::size_t rank = 0; rank < size; ++rank) {
    RankReading one{ranks[rank].pid.load(), ranks[rank].world_rank.load(), ranks[rank].joined_s.load(),
                    ranks[rank].num_calls.load(), {}};
    for (std::size_t i = 0; i < (one.num_calls == 0 ? 0 : kFlightCalls); ++i) {
      CallReading call{};
      if (read_call(calls[rank * kFlightCalls + i], call)) one.calls.push_back(std::move(call));
    }
    std::sort(one.calls.begin(), one.calls.end(),
              [](const CallReading& a, const CallReading& b) { return a.number < b.number; });
    reading.ranks.push_back(std::move(one));
  }
  return reading;
}

}  // namespace singa_lite
