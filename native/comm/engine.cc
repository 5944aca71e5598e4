// SPDX-License-Identifier: Apache-2.0
// Engine, third part: who makes progress, see Note [progress], and how a failure reaches every waiter.
#include "comm/engine.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "comm/forks.h"
#include "comm/names.h"
#include "comm/spin.h"
#include "common/error.h"
#include "common/signals.h"

namespace singa_lite {
namespace {

// Above, a background thread pays. Waking it costs 10 to 50 us, and where every core computes it takes a rank's core
// away: with 1 MB a training step that exchanges 1.7 MB took 1.5 % longer.
constexpr std::size_t kLargeBytes = 4 << 20;

// The slots, and behind them the flight record.
Payload payload(int size) { return {Slots::payload(size).bytes + FlightRecord::bytes_for(size)}; }

}  // namespace

Engine::Engine(const std::string& rendezvous_id, int rank, int size, double timeout_s, const Segment::Check& check)
    : segment_(new Segment(rendezvous_id, rank, size, payload(size), timeout_s, check)),
      slots_(*segment_),
      id_(rendezvous_id),
      record_(segment_->payload() + Slots::payload(size).bytes, size),
      rank_(rank),
      size_(size),
      timeout_s_(timeout_s),
      forks_(forks_so_far()),
      may_spin_(size <= cores()),
      sources_(std::size_t(size)),
      limit_s_(timeout_s) {}

bool Engine::is_forked() const { return forks_ != forks_so_far(); }

void Engine::wait_for_all(const Segment::Check& check) { segment_->wait_for_all(timeout_s_, check); }

void Engine::record(const std::string& title) {
  if (rank_ == 0) {
    record_.describe(id_, title);
    segment_->header().flight_at = std::uint64_t(segment_->payload() + Slots::payload(size_).bytes - segment_->memory());
  }
  record_.join(rank_, getpid(), names_.empty() ? rank_ : names_[std::size_t(rank_)]);
  is_recording_ = true;
}

FlightReading Engine::read_record() const {
  if (is_stopping_.load()) throw CommError("rank " + name_of_rank(rank_) + ": this communicator is closed");
  return read_flight(segment_->memory(), segment_->total_bytes());
}

std::string Engine::label(const Op& op) const {
  return "rank " + name_of_rank(rank_) + ": " + name_of(op.request.kind) + " #" +
         std::to_string(op.fingerprint.sequence) + " '" + shortened(op.request.name) + "'";
}

void Engine::check_usable() const {
  const std::string who = "rank " + name_of_rank(rank_) + ": ";
  if (is_forked())
    throw CommError(who + "a shm communicator made before fork() is not usable in the child (process " +
                    std::to_string(getpid()) + "); make the world after the fork");
  const bool is_broken = is_broken_.load(std::memory_order_acquire);
  if (is_stopping_.load()) throw CommError(who + "this communicator is closed" + (is_broken ? ": " + failure_ : ""));
  if (is_broken) throw CommError(who + "this communicator is broken by an earlier failure: " + failure_);
}

std::shared_ptr<Op> Engine::start(Request request, const CallSite& site) {
  if (is_forked()) check_usable();
  auto op = std::make_shared<Op>();
  op->called_s = monotonic_s();
  op->fingerprint = {0,
                     request.count,
                     std::hash<std::string>()(request.name),
                     std::uint8_t(request.kind),
                     std::uint8_t(request.op),
                     std::uint8_t(request.dtype),
                     std::uint8_t(request.wire),
                     request.root,
                     std::uint32_t(request.name.size()),
                     bits_of(request.scale)};
  op->request = std::move(request);
  op->is_large = op->request.count * bytes_of(op->request.wire) > kLargeBytes;

  std::unique_lock<std::mutex> lock(mutex_);
  check_usable();  // under the lock: another thread may be closing
  split_into_rounds(*op);
  op->fingerprint.sequence = issued_.load(std::memory_order_relaxed);
  op->first_round = next_round_;
  next_round_ += op->num_rounds;
  if (is_recording_) record_.start(rank_, op->fingerprint, op->request.name, site, op->called_s);
  if (in_flight_.empty()) moved_s_.store(monotonic_s(), std::memory_order_relaxed);
  in_flight_.push_back(op);
  issued_.fetch_add(1, std::memory_order_release);
  if (op->is_large) {
    large_in_flight_.fetch_add(1);
    if (!thread_.joinable()) {
      const SignalsBlocked blocked;  // the thread inherits it: the process's signals belong to its own threads
      thread_ = std::thread([this] { run_thread(); });
    }
    has_work_.notify_one();
  } else if (progress_owner_ == ProgressOwner::kNone && large_in_flight_.load() == 0) {
    progress_owner_ = ProgressOwner::kCaller;
    lock.unlock();
    step_all_guarded();
    lock.lock();
    release(lock);
  }
  return op;
}

bool Engine::wait(Op& op, double slice_s, double limit_s, double since_s) {
  if (is_forked()) check_usable();
  const double deadline_s = monotonic_s() + slice_s;
  limit_s_.store(limit_s < 0 ? timeout_s_ : limit_s);
  since_s_.store(since_s);
  while (op.state.load(std::memory_order_acquire) == 0) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (progress_owner_ == ProgressOwner::kNone && !is_stopping_.load()) {
      progress_owner_ = ProgressOwner::kCaller;
      lock.unlock();
      run_progress_guarded(&op, deadline_s);
      lock.lock();
      release(lock);
    } else {
      waiters_.fetch_add(1);
      idle_.wait_for(lock, std::chrono::duration<double>(slice_s),
                     [&] { return op.state.load() != 0 || (progress_owner_ == ProgressOwner::kNone && !is_stopping_.load()); });
      waiters_.fetch_sub(1);
    }
    if (op.state.load() == 0 && monotonic_s() > deadline_s) return false;
  }
  limit_s_.store(timeout_s_);
  if (op.state.load() == 2) {
    const std::lock_guard<std::mutex> lock(mutex_);
    throw CommError(failure_);
  }
  return true;
}

std::vector<int> Engine::late_ranks(const Op& op) const {
  std::vector<int> late;
  for (int r = 0; r < size_; ++r) {
    const auto& posted = segment_->block(r).counters[std::size_t(Progress::kPosted)];
    // a rank that has called it posts it only once others have consumed what was before
    if (r != rank_ && posted.load(std::memory_order_acquire) <= op.first_round &&
        record_.num_calls(r) <= op.fingerprint.sequence)
      late.push_back(names_.empty() ? r : names_[std::size_t(r)]);
  }
  return late;
}

bool Engine::is_warning_due(const Op& op, double limit_s, double since_s) const {
  const double share_s = kWarnShare * (limit_s < 0 ? timeout_s_ : limit_s);
  if (is_stopping_.load() || monotonic_s() - std::max(moved_s_.load(), since_s) <= share_s) return false;
  return !late_ranks(op).empty();
}

bool Engine::is_done(Op& op) {
  if (is_forked()) check_usable();
  std::unique_lock<std::mutex> lock(mutex_);
  if (op.state.load() == 0 && progress_owner_ == ProgressOwner::kNone && large_in_flight_.load() == 0) {
    progress_owner_ = ProgressOwner::kCaller;
    lock.unlock();
    step_all_guarded();
    lock.lock();
    release(lock);
  }
  return op.state.load() != 0;
}

void Engine::abort(const std::string& text) {
  if (is_forked()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  if (is_stopping_.load()) return;
  segment_->post_abort(text);
  ring_everyone();
  await_progress_owner(lock);  // it reads the record when it waits, unless its collective ends before that
  if (is_stopping_.load() || is_broken_.load()) return;
  progress_owner_ = ProgressOwner::kCaller;
  lock.unlock();
  fail("rank " + name_of_rank(rank_) + ": this rank aborted: " + text);
  lock.lock();
  release(lock);
}

void Engine::close() {
  if (is_forked()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopping_.exchange(true)) return;
    has_work_.notify_all();
  }
  segment_->block(rank_).bell.fetch_add(1);
  futex_wake(segment_->block(rank_).bell);
  if (thread_.joinable()) thread_.join();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    await_progress_owner(lock);  // another thread may be moving data
    if (!is_broken_.load()) failure_ = "rank " + name_of_rank(rank_) + ": this communicator was closed while a collective was in flight";
    for (const auto& op : in_flight_) set_failed(*op);
    in_flight_.clear();
    idle_.notify_all();
  }
  segment_->leave();
  ring_everyone();
  segment_.reset();
}

void Engine::step_all_guarded() {
  try {
    while (step()) {
    }
  } catch (const CommError& error) {
    fail(error.what());
  }
}

void Engine::run_progress_guarded(const Op* until, double deadline_s) {
  try {
    run_progress(until, deadline_s);
  } catch (const CommError& error) {
    fail(error.what());
  }
}

// Called by the progress owner, which thereby has nothing more to do: no array is touched afterwards.
void Engine::fail(const std::string& text) {
  if (segment_->post_abort(text)) is_first_failure_.store(true);
  ring_everyone();
  const std::lock_guard<std::mutex> lock(mutex_);
  failure_ = text;
  is_broken_.store(true, std::memory_order_release);
  post_.op.reset();
  reduce_.op.reset();
  consume_.op.reset();
  first_sequence_ = issued_.load();
  for (const auto& op : in_flight_) set_failed(*op);
  in_flight_.clear();
  large_in_flight_.store(0);
  idle_.notify_all();
}

void Engine::set_failed(Op& op) {
  if (is_recording_) record_.end(rank_, op.fingerprint.sequence, FlightState::kFailed, monotonic_s());
  op.state.store(2);
}

void Engine::finish(Op& op) {
  if (op.is_large) large_in_flight_.fetch_sub(1);
  op.ended_s = monotonic_s();
  if (is_recording_) record_.end(rank_, op.fingerprint.sequence, FlightState::kEnded, op.ended_s);
  op.state.store(1);
  if (waiters_.load() == 0) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.notify_all();
}

// Return when progress has no owner.
void Engine::await_progress_owner(std::unique_lock<std::mutex>& lock) {
  waiters_.fetch_add(1);
  idle_.wait(lock, [&] { return progress_owner_ == ProgressOwner::kNone; });
  waiters_.fetch_sub(1);
}

// Release progress and wake whoever needs it next.
void Engine::release(std::unique_lock<std::mutex>&) {
  progress_owner_ = ProgressOwner::kNone;
  if (waiters_.load() != 0) idle_.notify_all();
  if (large_in_flight_.load() != 0) has_work_.notify_one();
}

void Engine::run_thread() {
  pthread_setname_np(pthread_self(), "singa_lite-comm");
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    has_work_.wait(lock, [&] {
      return is_stopping_.load() || (large_in_flight_.load() != 0 && progress_owner_ == ProgressOwner::kNone);
    });
    if (is_stopping_.load()) return;
    progress_owner_ = ProgressOwner::kThread;
    lock.unlock();
    run_progress_guarded(nullptr, 0);
    lock.lock();
    release(lock);
  }
}

}  // namespace singa_lite
