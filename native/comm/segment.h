// SPDX-License-Identifier: Apache-2.0
// The shared memory of one world on one host: who is there, and the staging slots.
//
// Layout: one header page; one RankBlock per rank; then for every rank kSlots slots, each a Descriptor followed
// by chunk_bytes of data. Rank r alone writes block r (but for its bell) and slots r (but for what others reduce there,
// see Note [two-shot] in engine.h). No Python, no collectives.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>

namespace singa_lite {

constexpr std::size_t kLine = 64;             // cache line, also the alignment of every piece of data
constexpr std::size_t kSlots = 2;  // rounds a rank may be ahead; with 4 of 64 KB: 1 MB equal, 16 MB 1.8 instead of 1.4 ms
constexpr std::size_t kChunkBytes = 256 << 10;    // 1 MB by 2 ranks: 0.052 ms; with 128 KB the same, with 64 KB 0.055
constexpr std::size_t kMaxSegmentBytes = 32 << 20;  // half of the 64 MB a container's /dev/shm has by default
constexpr int kMaxRanks = 1024;

// A collective as its rank calls it; must be equal on all ranks, byte by byte.
struct Fingerprint {
  std::uint64_t sequence, count, name_hash;
  std::uint8_t kind, op, dtype, wire;
  std::int32_t root;
  std::uint64_t name_bytes;
};
static_assert(sizeof(Fingerprint) == 40 && std::has_unique_object_representations_v<Fingerprint>);

constexpr std::size_t kNameBytes = 17 * kLine - sizeof(Fingerprint);

// Stands in the slot of a collective's first round. Of a longer name the beginning is there, for errors.
struct Descriptor {
  Fingerprint fingerprint;
  char name[kNameBytes];
};
static_assert(sizeof(Descriptor) % kLine == 0);

enum class Presence : std::uint32_t { kAbsent, kAttached, kClosed };
enum class Progress : std::uint32_t { kPosted, kReduced, kConsumed };  // the three counters of a rank

struct alignas(kLine) RankBlock {
  std::atomic<std::uint64_t> counters[3];  // rounds posted, reduced and consumed, in one line
  alignas(kLine) std::atomic<std::uint64_t> waits_for;  // packed Await (engine.cc) while asleep, else 0
  std::atomic<std::uint32_t> bell;                      // the futex this rank sleeps on
  alignas(kLine) std::atomic<Presence> presence;
  std::atomic<std::int32_t> pid;
};

struct Header {
  std::atomic<std::uint64_t> magic;  // stored last, when the segment may be used
  std::uint64_t total_bytes;
  std::uint32_t size;
  std::uint32_t chunk_bytes;
  std::atomic<std::uint32_t> all_attached;
  std::atomic<std::uint32_t> abort_state;  // 0 none, 1 being written, 2 readable
  std::uint32_t abort_rank;
  char abort_text[1024];
};

class Segment {
 public:
  // Called while a rank waits for the world to be complete, some times a second: returns why it cannot be, or "".
  // What it throws ends the wait.
  using Check = std::function<std::string()>;

  // Creates (rank 0) or attaches "/singa_lite-<rendezvous_id>", waiting at most until `timeout_s` for rank 0 to do so.
  // Throws CommError: no space in /dev/shm, name taken, other size, other owner, rank taken, time-out, a lost rank.
  Segment(const std::string& rendezvous_id, int rank, int size, double timeout_s, const Check& check = {});
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Returns once every rank has attached, when the name is gone from /dev/shm. Throws CommError.
  void wait_for_all(double timeout_s, const Check& check = {});

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  RankBlock& block(int rank) const { return blocks_[rank]; }
  Descriptor& descriptor(int rank, std::uint64_t round) const {
    return *reinterpret_cast<Descriptor*>(slots_ + slot_index(rank, round) * slot_bytes_);
  }
  char* data(int rank, std::uint64_t round) const {
    return slots_ + slot_index(rank, round) * slot_bytes_ + sizeof(Descriptor);
  }
  int rank() const { return rank_; }
  int size() const { return size_; }
  std::size_t chunk_bytes() const { return chunk_bytes_; }

  // Whether the process of a peer still holds its lock: false from the instant it dies, collected or not.
  bool is_alive(int peer) const;

  // Show the others why this rank aborts; only the first text of a world is kept.
  void post_abort(const std::string& text);
  // "rank 2: <text>", or "" if no rank aborted.
  std::string abort_text() const;

  // Mark this rank closed for its peers. The memory stays mapped until destruction.
  void leave();

 private:
  class Wait;
  std::size_t slot_index(int rank, std::uint64_t round) const {
    return std::size_t(rank) * kSlots + round % kSlots;
  }
  void create();
  void attach(double timeout_s, const Check& check);
  void open_existing(double timeout_s, Wait& wait);
  void check_owner() const;
  void map(std::size_t bytes);
  void take_rank();
  void unlink_if_ours();
  std::string where() const;

  std::string name_;
  int rank_, size_;
  int fd_ = -1;
  bool is_created_ = false;
  bool may_unlink_ = false;  // the file is a segment of ours, should its maker be dead
  std::size_t chunk_bytes_ = 0, slot_bytes_ = 0, total_bytes_ = 0;
  char* base_ = nullptr;
  RankBlock* blocks_ = nullptr;
  char* slots_ = nullptr;
};

double monotonic_s();
// Sleep on a futex word while it holds `expected`, at most `seconds`; may return early.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, double seconds);
void futex_wake(std::atomic<std::uint32_t>& word);

}  // namespace singa_lite
