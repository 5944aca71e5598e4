// SPDX-License-Identifier: Apache-2.0
// Messages between the workers and the servers of a job on one host, over a Segment of rings.
//
// Note [rings]: from every worker to every server and back runs a ring, a stream of bytes that one process writes and
// one reads. A message is a Frame, its head and the bytes of its arrays, one after the other, so a message of any size
// passes through a ring of any size, and messages of a pair keep their order.
//
// Note [both directions]: there is no thread. Every call moves what can be moved: out of the arrays of all messages
// under way, and into the arrays of the message that is read. A call that waits for a send, and cannot move it, also
// takes what has arrived for later into memory of its own, so two processes that send to each other both come to an end.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/segment.h"
#include "comm/spin.h"

namespace singa_lite {

// Of one ring; all together take at most kMaxSegmentBytes. 1.7 MB of 2 workers to a server and back: 3.6 ms, with rings
// of 256 KB 4.6.
constexpr std::size_t kRingBytes = 2 << 20;
constexpr std::size_t kMinRingBytes = 4 << 10;  // a smaller ring is useless: there are too many processes

struct Memory {
  char* data;
  std::size_t bytes;
};

struct RingCounters {
  alignas(kLine) std::atomic<std::uint64_t> written;  // bytes put in so far
  alignas(kLine) std::atomic<std::uint64_t> taken;    // and taken out
};

// One direction of a pair, in shared memory.
class Ring {
 public:
  Ring() = default;
  Ring(char* at, std::size_t capacity)
      : counters_(reinterpret_cast<RingCounters*>(at)), data_(at + sizeof(RingCounters)), capacity_(capacity) {}

  // Move at most `bytes` bytes; returns how many there were, or there was space for.
  std::size_t put(const char* from, std::size_t bytes);
  std::size_t take(char* to, std::size_t bytes);  // null: throw them away
  bool is_empty() const;

 private:
  RingCounters* counters_ = nullptr;
  char* data_ = nullptr;
  std::size_t capacity_ = 0;
};

struct Frame {
  std::uint64_t payload_bytes;
  std::uint64_t head_bytes;
};

// Bytes on their way to or from several pieces of memory.
class Pieces {
 public:
  void add(Memory piece) { pieces_.push_back(piece); }
  bool is_done() const { return at_ == pieces_.size(); }
  // Call move(data, bytes) -> bytes moved until it moves less than it was given; returns how many it moved.
  template <class Move>
  std::size_t advance(const Move& move);

 private:
  std::vector<Memory> pieces_;
  std::size_t at_ = 0, offset_ = 0;
};

// A message of this process on its way; its arrays stay where they are until it is sent.
struct Outgoing {
  Frame frame{};
  std::string head;
  Pieces pieces;
  double moved_s = 0;
  std::string failure;                         // why it cannot be sent any more
  std::atomic<bool> is_sent{false}, has_failed{false};
};

// A message for this process, or the news that its source has gone.
struct Incoming {
  enum class Target { kNone, kOwn, kArrays, kNowhere };

  int source = 0;
  std::string reason;  // of a source that has gone; then there is nothing else
  Frame frame{};
  std::size_t frame_bytes = 0;  // received so far
  std::string head;
  std::size_t head_bytes = 0;
  bool is_handed_out = false;
  Target target = Target::kNone;
  std::unique_ptr<char[]> own;  // what arrived before somebody read it
  Pieces pieces;
  std::size_t payload_bytes = 0;  // received so far
  double moved_s = 0;
  std::string failure;  // why the rest will not come

  bool has_head() const { return frame_bytes == sizeof(Frame) && head_bytes == frame.head_bytes; }
  bool is_complete() const { return has_head() && payload_bytes == frame.payload_bytes; }
};

class Messenger {
 public:
  // `rank` of the job: its workers first, then its servers.
  Messenger(const std::string& rendezvous_id, int rank, int num_workers, int num_servers, double timeout_s,
            const Segment::Check& check = {});
  ~Messenger() { leave(""); }

  // Second half of construction: returns once all have joined. Throws CommError.
  void wait_for_all(const Segment::Check& check = {});

  // Begin to send `head` and the bytes of `arrays`, which stay untouched until it has ended.
  std::shared_ptr<Outgoing> send(int to, std::string head, const std::vector<Memory>& arrays);
  // Whether it has been sent or has failed. Moves what can be moved without waiting.
  bool is_done(Outgoing& message);

  // The calls below wait until `deadline_s` (monotonic) at most, and return false or null if that was not enough.
  // `message` has been sent or has failed
  bool wait(Outgoing& message, double deadline_s);
  // The next message: of the sources that have one, the next in turn.
  std::shared_ptr<Incoming> receive(double deadline_s);
  // Whether `message` is in the arrays given to begin_read, or cannot come any more.
  bool read(Incoming& message, double deadline_s);
  void begin_read(Incoming& message, const std::vector<Memory>& arrays);
  void abandon_read(Incoming& message);  // the arrays are touched no more

  // Leave the job; `why`, if not empty, is shown to the peers. May be called twice, and by another thread.
  void leave(const std::string& why);
  bool is_forked() const;

 private:
  struct Peer {
    int rank = 0;
    Ring out, in;
    std::deque<std::shared_ptr<Outgoing>> outbox;
    std::shared_ptr<Incoming> current;              // the last message of the ring, not complete
    std::deque<std::shared_ptr<Incoming>> arrived;  // not handed out
    std::string verdict;                            // why nothing more will come, "" if it may
    bool is_reported = false;
  };

  template <class Done>
  bool progress(const Done& done, bool takes_all, double deadline_s);
  bool move_all(bool takes_all);
  bool push(Peer& peer);
  bool pull(Peer& peer, bool takes_all);
  std::size_t pull_head(Peer& peer, Incoming& message);
  std::size_t pull_payload(Peer& peer, Incoming& message);
  static void begin_own(Incoming& message);
  void wake(const Peer& peer);
  void sleep(bool takes_all, double seconds);
  void look_after(Peer& peer, bool looks_at_lock);
  std::string verdict_on(const Peer& peer, bool looks_at_lock) const;
  void report(Peer& peer);
  Peer& peer_of(int rank) { return peers_[std::size_t(rank - first_peer_)]; }
  AbortRecord& record_of(int rank) const;
  void check_usable() const;

  std::unique_ptr<Segment> segment_;
  const int rank_, num_workers_, num_servers_, first_peer_;
  const NameOf name_of_;
  const double timeout_s_;
  const std::uint64_t forks_;
  const bool may_spin_;
  std::vector<Peer> peers_;
  std::size_t next_peer_ = 0;  // whose turn it is
  double looked_s_ = 0;        // when the peers' locks were looked at
  std::mutex mutex_;           // held while anything above is used
  std::atomic<bool> is_stopping_{false};
};

}  // namespace singa_lite
