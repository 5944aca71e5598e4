// SPDX-License-Identifier: Apache-2.0
// Engine, second part: what the progress owner does while it waits for a peer, and how it notices that none will join in.
#include <algorithm>
#include <cstdio>

#include "comm/engine.h"
#include "comm/spin.h"
#include "common/error.h"

namespace singa_lite {
namespace {

constexpr double kSleepS = 5e-3;      // between checks that the peers are alive
constexpr char kClosed[] = "has closed its communicator: it ended, or made fewer calls than this rank";

// Note [sleep]: a sleeper publishes in one word which counter of which rank it needs, so that nobody else and
// no earlier value wakes it. The waker stores the counter, then reads the word; the sleeper stores the word,
// then reads the counter: both in sequential order, so one of them sees the other.
constexpr int kRankBits = 16, kCounterBits = 2;

std::uint64_t pack(int rank, Progress counter, std::uint64_t value) {
  return (value << (kRankBits + kCounterBits)) | (std::uint64_t(counter) << kRankBits) | std::uint64_t(rank);
}

bool is_reached(std::uint64_t word, int rank, Progress counter, std::uint64_t value) {
  return (word & 0xffff) == std::uint64_t(rank) && ((word >> kRankBits) & 3) == std::uint64_t(counter) &&
         (word >> (kRankBits + kCounterBits)) <= value;
}

}  // namespace

void Engine::advance(Progress counter, std::uint64_t value) {
  own_[std::size_t(counter)] = value;
  segment_->block(rank_).counters[std::size_t(counter)].store(value, std::memory_order_seq_cst);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    RankBlock& peer = segment_->block(r);
    std::uint64_t word = peer.waits_for.load(std::memory_order_seq_cst);
    if (word != 0 && is_reached(word, rank_, counter, value) && peer.waits_for.compare_exchange_strong(word, 0)) {
      peer.bell.fetch_add(1);
      futex_wake(peer.bell);
    }
  }
}

void Engine::ring_everyone() {
  for (int r = 0; r < size_; ++r) {
    segment_->block(r).bell.fetch_add(1);
    futex_wake(segment_->block(r).bell);
  }
}

void Engine::run_progress(const Op* until, double deadline_s) {
  Spin spin(may_spin_);
  bool has_moved = false;
  while (!is_stopping_.load(std::memory_order_relaxed)) {
    if (until ? until->state.load(std::memory_order_acquire) != 0 : large_in_flight_.load() == 0) return;
    if (step()) {
      spin.restart();
      has_moved = true;
      continue;
    }
    if (has_moved) moved_s_.store(monotonic_s(), std::memory_order_relaxed);  // not where wait() merely comes back
    has_moved = false;
    if (!spin.once()) sleep_until_moved();
    if (deadline_s > 0 && spin.has_looked_at_the_clock() && monotonic_s() > deadline_s) return;
  }
}

void Engine::sleep_until_moved() {
  Await await;
  if (!find_await(await)) return;
  sleep_for(await);
  check_peers(await);
}

// The earliest stage that cannot continue, and the first rank it lacks. The rank furthest behind in the world is
// never the one that sleeps, so somebody can always move.
bool Engine::find_await(Await& await) {
  if (!advance_cursor(consume_)) return false;
  const std::uint64_t round = consume_.round;
  if (advance_cursor(post_) && post_.round <= round)
    await = {0, Progress::kConsumed, post_.round + 1 - std::min<std::uint64_t>(kSlots, post_.round + 1)};
  else if (!consume_.op->is_two_shot)
    await = {0, Progress::kPosted, round + 1};
  else if (advance_cursor(reduce_, true) && reduce_.round <= round)
    await = {0, Progress::kPosted, reduce_.round + 1};
  else
    await = {0, Progress::kReduced, round + 1};
  for (int r = 0; r < size_; ++r) {
    const auto& counter = segment_->block(r).counters[std::size_t(await.counter)];
    if (r == rank_ || counter.load(std::memory_order_acquire) >= await.value) continue;
    await.rank = r;
    return true;
  }
  return false;
}

void Engine::sleep_for(const Await& await) {
  RankBlock& mine = segment_->block(rank_);
  const std::uint32_t bell = mine.bell.load();
  mine.waits_for.store(pack(await.rank, await.counter, await.value), std::memory_order_seq_cst);
  const auto& counter = segment_->block(await.rank).counters[std::size_t(await.counter)];
  if (counter.load(std::memory_order_seq_cst) < await.value) futex_wait(mine.bell, bell, kSleepS);
  mine.waits_for.store(0, std::memory_order_relaxed);
}

// Throws if a rank we need will not come. A counter is read after the verdict: what a rank left behind before it
// aborted, closed or died is still good.
void Engine::check_peers(const Await& await) {
  const std::string abort = segment_->abort_text();
  std::string late;
  Op& op = *consume_.op;
  if (!op.is_checked) check_descriptors(op, true);  // later its slot may hold another descriptor
  for (int r = 0; r < size_; ++r) {
    RankBlock& peer = segment_->block(r);
    const auto lags = [&] {
      return peer.counters[std::size_t(await.counter)].load(std::memory_order_acquire) < await.value;
    };
    if (r == rank_ || !lags()) continue;
    const bool is_alive = segment_->is_alive(r);  // asked first: a rank that has ended changes its presence no more
    const std::string who = "rank " + name_of_rank(r) + " (process " + std::to_string(peer.pid.load()) + ") ";
    if (peer.presence.load(std::memory_order_acquire) == Presence::kClosed && lags()) {
      const std::string why = segment_->abort_text();
      throw CommError(label(op) + ": " + (why.empty() ? who + kClosed : why));
    }
    if (!is_alive && lags()) throw CommError(label(op) + ": " + who + "died");
    late += (late.empty() ? "" : ", ") + name_of_rank(r);
  }
  if (late.empty()) return;
  if (!abort.empty()) throw CommError(label(op) + ": " + abort);
  const double limit_s = limit_s_.load();
  if (monotonic_s() - std::max(moved_s_.load(), since_s_.load()) <= limit_s) return;
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g s", limit_s);
  throw CommError(label(op) + ": waited " + seconds + " for rank " + late +
                  ", which is stopped, too slow, or does not make this call");
}

}  // namespace singa_lite
