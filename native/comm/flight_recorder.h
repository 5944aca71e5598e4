// SPDX-License-Identifier: Apache-2.0
// The flight recorder: the last collectives that each rank of a communicator has called, in memory that others can read.
//
// Layout: a FlightHeader, a FlightRank per rank, then kFlightCalls FlightCalls per rank. It is part of a Segment (engine.cc)
// or a file of one process (FlightFile). Rank r alone writes what is of r; whoever reads believes nothing (read_flight).
//
// Note [torn calls]: `end` is written first and `begin` last, and readers read them in the other order: where both are
// equal, all between is of one call. Later only its state and times change, each at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/segment.h"
#include "comm/slots.h"

namespace singa_lite {

constexpr std::size_t kFlightCalls = 64;  // of each rank, 20 KB
constexpr std::size_t kFlightDims = 4;    // of a shape
constexpr std::size_t kFlightTextBytes = 96;

enum class FlightState : std::uint32_t { kStarted, kAllThere, kEnded, kFailed };

struct alignas(kLine) FlightCall {
  std::atomic<std::uint64_t> begin;  // 1 + its number; 0: none
  Fingerprint call;
  double called_s;  // this and the next two by monotonic_s(); 0 until then
  std::atomic<double> all_called_s, ended_s;
  std::atomic<FlightState> state;
  std::int32_t line;
  std::uint32_t num_dims;
  std::uint64_t dims[kFlightDims];
  char name[kFlightTextBytes], file[kFlightTextBytes];  // the latter ended by a 0 if shorter
  std::atomic<std::uint64_t> end;
};
static_assert(sizeof(FlightCall) == 5 * kLine);

struct alignas(kLine) FlightRank {
  std::atomic<std::uint64_t> num_calls;
  std::atomic<double> joined_s;
  std::atomic<std::int32_t> pid;         // 0: a process of another host, or one that has not joined
  std::atomic<std::int32_t> world_rank;  // what errors call it
};

struct alignas(kLine) FlightHeader {
  std::atomic<std::uint64_t> magic;  // stored last
  std::uint32_t size;
  std::atomic<std::uint32_t> is_reported;  // a rank has taken it on itself to report the failure of all
  char id[256];     // the same in all records of one communicator
  char title[108];  // "world", or what a group is called
};

// Where a call was made and of what shape, which the ranks need not agree on.
struct CallSite {
  std::string_view file;
  int line = 0;
  std::size_t num_dims = 0;
  std::uint64_t dims[kFlightDims] = {};  // of a shape with more axes the first ones
};

// One communicator's record, as its ranks write it. Does not own the memory.
class FlightRecord {
 public:
  static std::size_t bytes_for(int size);

  // `memory`: bytes_for(size) bytes, zeros at first, at the start of a line.
  FlightRecord(char* memory, int size);

  // Written by one rank: what the communicator is called.
  void describe(const std::string& id, const std::string& title);
  void join(int rank, int pid, int world_rank);
  // Of a rank whose record is elsewhere.
  void name_rank(int rank, int pid, int world_rank);
  void start(int rank, const Fingerprint& call, std::string_view name, const CallSite& site, double called_s);
  // Of a call that has been started; nothing happens where newer calls have taken its place.
  void all_there(int rank, std::uint64_t number, double now_s);
  void end(int rank, std::uint64_t number, FlightState state, double now_s);
  // Whether this is the first claim of all ranks.
  bool claim_report();
  std::uint64_t num_calls(int rank) const { return ranks_[rank].num_calls.load(std::memory_order_acquire); }

 private:
  FlightCall* find(int rank, std::uint64_t number) const;
  FlightCall& call_at(int rank, std::uint64_t number) const;

  FlightHeader* header_;
  FlightRank* ranks_;
  FlightCall* calls_;
};

// A record in a file without a name, of one rank whose peers share no memory with it; others open it in /proc/PID/fd.
class FlightFile {
 public:
  // Throws CommError where the system gives no such file.
  explicit FlightFile(int size);
  ~FlightFile();
  FlightFile(const FlightFile&) = delete;
  FlightFile& operator=(const FlightFile&) = delete;

  FlightRecord& record() { return record_; }
  const char* memory() const { return memory_; }
  std::size_t bytes() const { return bytes_; }
  int descriptor() const { return fd_; }

 private:
  const std::size_t bytes_;
  int fd_;
  char* memory_;
  FlightRecord record_;
};

// What a record says, with every text and number made harmless.
struct CallReading {
  std::uint64_t number, count, name_hash;
  std::string kind, op, dtype, wire, file;
  std::string name;  // may hold zeros; of one that was cut the beginning and "..."
  int root, line;
  bool has_more_dims;
  FlightState state;
  double called_s, all_called_s, ended_s;
  std::vector<std::uint64_t> dims;
};
struct RankReading {
  int pid, world_rank;
  double joined_s;
  std::uint64_t num_calls;
  std::vector<CallReading> calls;  // by number
};
struct FlightReading {
  std::string id, title;
  std::vector<RankReading> ranks;
  bool is_reported;
};

// FlightRecord::claim_report in another process's FlightFile; none if it is gone or of a communicator with another id.
std::optional<bool> claim_report(const std::string& path, const std::string& id);

// Read the record in `bytes` of memory, which is a segment's or a FlightFile's and may be written meanwhile. Throws
// CommError where there is none of this version.
FlightReading read_flight(const char* memory, std::size_t bytes);

}  // namespace singa_lite
