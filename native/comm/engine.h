// SPDX-License-Identifier: Apache-2.0
// The collectives of one rank over a Segment: their order, their progress, their failure.
//
// Note [rounds]: every collective is split into rounds of at most one slot per rank, numbered through the life of
// the world; all ranks count alike, since all make the same calls. In round c a rank
//   posts     its part into its slot c % kSlots, once everyone has consumed round c - kSlots;
//   reduces   (two-shot all-reduce only) its piece of everyone's slot, in place, once all have posted;
//   consumes  the slots into the caller's array, once all have posted (two-shot: its own slot, once all reduced).
// The slot of a collective's first round carries its Descriptor, which all ranks compare.
//
// Note [two-shot]: a large all-reduce is split into one piece per rank, which that rank folds and then writes over the
// very bytes the others posted; each finds the whole result in its own slot. Writing what one has read matters: on
// AMD Zen 4 a core stores with 60 GB/s to lines its peer has changed since, but with 9 GB/s to lines the peer has
// only read (slots of 32 to 512 KB), which made the next post the slowest part: 1 MB took 0.103 ms, not 0.052.
//
// Note [progress]: one thread at a time, the progress owner, moves data. A call or wait() becomes it if nobody is,
// so a small or awaited collective costs no hand-off; a background thread takes over large ones that nobody
// awaits. Everybody else sleeps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/flight_recorder.h"
#include "comm/segment.h"
#include "comm/slots.h"
#include "comm/types.h"

namespace singa_lite {

constexpr double kWarnShare = 0.1;  // of the time-out, after which a waiting rank names those that are late

// What a caller requests. `in` is read and `out` is written; they may be the same memory.
struct Request {
  Kind kind = Kind::kAllReduce;
  ReduceOp op = ReduceOp::kNone;
  DType dtype = DType::kFloat32;
  DType wire = DType::kFloat32;  // element type in the slots: dtype, or a narrower one in an all-reduce of kFloat32
  int root = 0;
  const void* in = nullptr;
  void* out = nullptr;
  std::size_t count = 0;  // elements this rank puts in; those of one rank's block where has_blocks(kind)
  std::string name;
  float scale = 1;  // of a narrower wire: values are multiplied by it there
  bool asks_to_stop = false;  // told to all ranks, beside the data

  bool is_narrow() const { return wire != dtype; }
};

// One collective of this rank, in flight or ended.
struct Op {
  Request request;
  Fingerprint fingerprint{};
  bool is_two_shot = false, is_large = false;
  bool is_checked = false;  // the descriptors of all ranks have been compared
  std::uint64_t first_round = 0, num_rounds = 1;
  std::size_t round_elements = 0;  // in a slot; in one of its pieces where has_blocks(kind)
  // by monotonic_s(): the call here, the last rank's call, and the end; 0 until then
  double called_s = 0, all_called_s = 0, ended_s = 0;
  bool is_asked_to_stop = false;   // by any rank in this collective; the same on all ranks once it has ended
  std::atomic<int> state{0};       // 0 in flight, 1 ended, 2 failed
};

class Engine {
 public:
  Engine(const std::string& rendezvous_id, int rank, int size, double timeout_s, const Segment::Check& check = {});
  ~Engine() { close(); }

  // Have errors call rank r ``names[r]``: a group's ranks have the numbers of the world it was made in.
  void name_ranks(std::vector<int> names) {
    names_ = std::move(names);
    segment_->name_ranks([this](int rank) { return "rank " + name_of_rank(rank); });
  }
  // Keep a flight record from now on, of a communicator that is called `title`.
  void record(const std::string& title);
  // Whether no rank of this communicator has claimed before to report a failure.
  bool claim_report() { return is_stopping_.load() || record_.claim_report(); }
  // Throws CommError if this communicator is closed.
  FlightReading read_record() const;

  // Second half of construction: returns once all ranks have joined. Throws CommError.
  void wait_for_all(const Segment::Check& check = {});

  // Start a collective. Throws CommError if this communicator is broken, closed or in a forked child.
  std::shared_ptr<Op> start(Request request, const CallSite& site = {});
  // Wait until `op` has ended, at most `slice_s`; false if it has not. Throws CommError if it failed: also if no
  // peer moves for `limit_s` (negative: the engine's own time-out) from the first slice, `since_s`, on.
  bool wait(Op& op, double slice_s, double limit_s, double since_s);
  // The ranks that have not called `op` by now, in errors' numbers; none if all have, or if that is not known.
  std::vector<int> late_ranks(const Op& op) const;
  // Whether nothing of `op` has moved for kWarnShare of wait()'s time-out, and ranks are late.
  bool is_warning_due(const Op& op, double limit_s, double since_s) const;
  // Whether this rank failed first of all, for a reason of its own; true once.
  bool take_first_failure() { return is_first_failure_.exchange(false); }
  // Whether wait() would return or throw at once. Moves what can be moved without waiting.
  bool is_done(Op& op);

  // Abort for a reason outside of the collectives: every rank gets `text`.
  void abort(const std::string& text);
  // Leave the world: ends the thread, fails what is in flight. May be called twice.
  void close();
  bool is_forked() const;

 private:
  enum class ProgressOwner { kNone, kCaller, kThread };

  // The position of a stage: its collective (null: none left) and the next round.
  struct Cursor {
    std::shared_ptr<Op> op;
    std::uint64_t sequence = 0, round = 0;
  };
  // A peer's counter that this rank cannot continue without.
  struct Await {
    int rank;
    Progress counter;
    std::uint64_t value;
  };
  struct Piece {
    std::size_t begin, count;
  };

  // rounds.cc: moving data; never waits
  bool step();  // the next thing that can be done now; false if there is none
  bool try_post();
  bool try_reduce();
  bool try_consume();
  void post(const Op& op, std::uint64_t round);
  void reduce_piece(const Op& op, std::uint64_t round);
  void consume(const Op& op, std::uint64_t round);
  void consume_one_shot(const Op& op, std::uint64_t round, std::size_t at, std::size_t count);
  void consume_two_shot(const Op& op, std::uint64_t round, std::size_t at, std::size_t count);
  void split_into_rounds(Op& op) const;
  Piece piece_of(std::size_t count, DType wire, int rank) const;
  std::size_t elements_in(const Op& op, std::uint64_t round) const;
  bool advance_cursor(Cursor& cursor, bool only_two_shot = false);
  std::uint64_t furthest() const;
  bool reached(Progress counter, std::uint64_t value);
  void advance(Progress counter, std::uint64_t value);
  void check_descriptors(Op& op, bool only_arrived);

  // waiting.cc: what the progress owner does when nothing can be moved
  void run_progress(const Op* until, double deadline_s);
  void sleep_until_moved();
  bool find_await(Await& await);
  void sleep_for(const Await& await);
  void check_peers(const Await& await);
  void ring_everyone();

  // engine.cc: roles and failure
  void run_thread();
  void release(std::unique_lock<std::mutex>& lock);
  void await_progress_owner(std::unique_lock<std::mutex>& lock);
  void step_all_guarded();
  void run_progress_guarded(const Op* until, double deadline_s);
  void fail(const std::string& text);
  void finish(Op& op);
  void set_failed(Op& op);
  void check_usable() const;
  std::string name_of_rank(int rank) const { return std::to_string(names_.empty() ? rank : names_[std::size_t(rank)]); }
  std::string label(const Op& op) const;

  std::unique_ptr<Segment> segment_;
  const Slots slots_;
  const std::string id_;
  FlightRecord record_;
  bool is_recording_ = false;
  const int rank_, size_;
  std::vector<int> names_;  // of the ranks in errors; empty: their numbers
  const double timeout_s_;
  const std::uint64_t forks_;
  const bool may_spin_;

  // The progress owner's own.
  Cursor post_, reduce_, consume_;
  std::uint64_t all_reached_[3] = {0, 0, 0};  // what everyone's counters are known to have reached
  std::uint64_t own_[3] = {0, 0, 0};          // this rank's counters, see Note [trusted memory]
  std::vector<const void*> sources_;

  std::mutex mutex_;  // guards the next block
  std::condition_variable idle_;      // for waiters: progress has no owner, or a collective has ended
  std::condition_variable has_work_;  // for the thread
  ProgressOwner progress_owner_ = ProgressOwner::kNone;
  std::deque<std::shared_ptr<Op>> in_flight_;
  std::uint64_t first_sequence_ = 0;  // of in_flight_.front()
  std::uint64_t next_round_ = 0;
  std::thread thread_;
  std::string failure_;

  std::atomic<std::uint64_t> issued_{0};  // collectives started so far
  std::atomic<int> waiters_{0}, large_in_flight_{0};
  std::atomic<bool> is_stopping_{false}, is_broken_{false}, is_first_failure_{false};
  std::atomic<double> limit_s_, since_s_{0}, moved_s_{0};  // the time-out in force, and from when it counts
};

}  // namespace singa_lite
