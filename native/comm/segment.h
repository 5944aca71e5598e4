// SPDX-License-Identifier: Apache-2.0
// The shared memory of one world on one host: who is there, and who has failed.
//
// Layout: one header page; one RankBlock per rank; then the payload, which is its owner's: the slots of the collectives
// (slots.h) or the rings of messages (p2p.h). Rank r alone writes block r, but for its bell. No Python.
//
// Note [trusted memory]: sizes and offsets that a process uses are its own, computed from its arguments; of the header it
// reads back flags and texts alone, so that bytes overwritten there are an error or do nothing. What is overwritten in
// the payload are other values, which nothing can tell: the memory is this user's alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace singa_lite {

constexpr std::size_t kLine = 64;             // cache line, also the alignment of every piece of data
constexpr std::size_t kMaxSegmentBytes = 32 << 20;  // half of the 64 MB a container's /dev/shm has by default
constexpr int kMaxRanks = 1024;

enum class Presence : std::uint32_t { kAbsent, kAttached, kClosed };
enum class Progress : std::uint32_t { kPosted, kReduced, kConsumed };  // the three counters of a rank

struct alignas(kLine) RankBlock {
  std::atomic<std::uint64_t> counters[3];  // rounds posted, reduced and consumed, in one line
  alignas(kLine) std::atomic<std::uint64_t> waits_for;  // packed Await (waiting.cc) while asleep, else 0
  std::atomic<std::uint32_t> bell;                      // the futex this rank sleeps on
  alignas(kLine) std::atomic<Presence> presence;
  std::atomic<std::int32_t> pid;
};

// Why somebody aborted; the first text is kept.
struct AbortRecord {
  // Whether it is the first.
  bool post(int rank, const std::string& why);
  bool is_posted() const { return state.load(std::memory_order_acquire) == 2; }
  // The text, of a record that may be damaged.
  std::string why() const { return std::string(text, strnlen(text, sizeof text)); }

  std::atomic<std::uint32_t> state;  // 0 none, 1 being written, 2 readable
  std::int32_t rank;
  char text[1024];
};

struct Header {
  std::atomic<std::uint64_t> magic;  // stored last, when the segment may be used
  std::uint64_t total_bytes;
  std::uint32_t size;
  std::atomic<std::uint32_t> all_attached;
  std::uint64_t flight_at;  // where in the segment its FlightRecord begins (flight_recorder.h); 0: it has none
  AbortRecord abort;
};

// How errors call a rank: a word and a number.
using NameOf = std::function<std::string(int)>;
// "rank 1, 2"
std::string list_of(const std::vector<int>& ranks, const NameOf& name_of);

// What its owner keeps in a segment.
struct Payload {
  std::size_t bytes;
  NameOf name_of = [](int rank) { return "rank " + std::to_string(rank); };
};

class Segment {
 public:
  // Called while a rank waits for the world to be complete, some times a second: returns why it cannot be, or "".
  // What it throws ends the wait.
  using Check = std::function<std::string()>;

  // Creates (rank 0) or attaches "/singa_lite-<rendezvous_id>", waiting at most until `timeout_s` for rank 0 to do so.
  // Throws CommError: no space in /dev/shm, name taken, other size, other owner, rank taken, time-out, a lost rank.
  Segment(const std::string& rendezvous_id, int rank, int size, Payload payload, double timeout_s,
          const Check& check = {});
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Returns once every rank has attached, when the name is gone from /dev/shm. Throws CommError.
  void wait_for_all(double timeout_s, const Check& check = {});

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  RankBlock& block(int rank) const { return blocks_[rank]; }
  char* payload() const { return payload_; }  // zeros at first, at the start of a line
  const char* memory() const { return base_; }
  std::size_t total_bytes() const { return total_bytes_; }
  // Header::flight_at of a segment's memory, 0 if it is not of this version.
  static std::size_t flight_at(const char* memory, std::size_t bytes);
  int size() const { return size_; }
  // Have errors call the ranks by `name_of` from now on, in place of the payload's.
  void name_ranks(NameOf name_of) { contents_.name_of = std::move(name_of); }

  // Whether the process of a peer still holds its lock: false from the instant it dies, collected or not.
  bool is_alive(int peer) const;

  // Show the others why this rank aborts; only the first text of a world is kept. Returns whether this is it.
  bool post_abort(const std::string& text);
  // "rank 2: <text>", or "" if no rank aborted.
  std::string abort_text() const;

  // Mark this rank closed for its peers. The memory stays mapped until destruction.
  void leave();

 private:
  class Wait;
  void create();
  void attach(double timeout_s, const Check& check);
  void open_existing(double timeout_s, Wait& wait);
  void check_owner() const;
  void map(std::size_t bytes);
  void take_rank();
  void unlink_if_ours();
  std::string where() const;

  std::string name_;
  const int rank_, size_;
  Payload contents_;
  int fd_ = -1;
  bool is_created_ = false;
  bool may_unlink_ = false;  // the file is a segment of ours, should its maker be dead
  std::size_t total_bytes_ = 0;
  char* base_ = nullptr;
  RankBlock* blocks_ = nullptr;
  char* payload_ = nullptr;
};

double monotonic_s();
// Sleep on a futex word while it holds `expected`, at most `seconds`; may return early.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, double seconds);
void futex_wake(std::atomic<std::uint32_t>& word);

}  // namespace singa_lite
