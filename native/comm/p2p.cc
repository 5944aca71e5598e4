// SPDX-License-Identifier: Apache-2.0
#include "comm/p2p.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "comm/forks.h"
#include "common/error.h"

namespace singa_lite {
namespace {

constexpr double kSleepS = 10e-3;      // between checks that the peers are alive
constexpr std::size_t kParts = 4;      // of a ring that are moved at a time, so that both ends work at once
constexpr std::size_t kTurnBytes = 2 * kRingBytes;  // of one peer, before it is another's turn

// Before the rings: who says that there are how many workers, and why each process aborted.
struct Start {
  std::int64_t num_workers;
  char unused[kLine - sizeof(std::int64_t)];
};
static_assert(sizeof(AbortRecord) % alignof(AbortRecord) == 0);

std::size_t round_up_to_line(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

std::size_t start_bytes(int size) { return sizeof(Start) + round_up_to_line(std::size_t(size) * sizeof(AbortRecord)); }

std::size_t ring_bytes(int num_workers, int num_servers) {
  const std::size_t rings = 2 * std::size_t(num_workers) * std::size_t(num_servers);
  return std::min(kRingBytes, kMaxSegmentBytes / rings / kLine * kLine);
}

Payload payload(int num_workers, int num_servers) {
  if (num_workers < 1 || num_servers < 1 || num_workers + num_servers > kMaxRanks ||
      ring_bytes(num_workers, num_servers) < kMinRingBytes)
    throw CommError("shm: " + std::to_string(num_workers) + " workers and " + std::to_string(num_servers) +
                    " servers cannot share a host: at least one of each, and 4096 pairs at most");
  const std::size_t rings = 2 * std::size_t(num_workers) * std::size_t(num_servers);
  return {start_bytes(num_workers + num_servers) + rings * ring_bytes(num_workers, num_servers),
          [num_workers](int rank) {
            return rank < num_workers ? "worker " + std::to_string(rank)
                                      : "server " + std::to_string(rank - num_workers);
          }};
}

}  // namespace

// ---- a ring ---------------------------------------------------------------------------------------------

bool Ring::is_empty() const {
  return counters_->written.load(std::memory_order_seq_cst) == counters_->taken.load(std::memory_order_relaxed);
}

std::size_t Ring::put(const char* from, std::size_t bytes) {
  const std::uint64_t written = counters_->written.load(std::memory_order_relaxed);
  const std::size_t space = capacity_ - std::size_t(written - counters_->taken.load(std::memory_order_seq_cst));
  const std::size_t count = std::min({bytes, space, std::max<std::size_t>(capacity_ / kParts, 1)});
  const std::size_t at = std::size_t(written % capacity_), first = std::min(count, capacity_ - at);
  if (count == 0) return 0;
  std::memcpy(data_ + at, from, first);
  std::memcpy(data_, from + first, count - first);
  counters_->written.store(written + count, std::memory_order_seq_cst);
  return count;
}

std::size_t Ring::take(char* to, std::size_t bytes) {
  const std::uint64_t taken = counters_->taken.load(std::memory_order_relaxed);
  const std::size_t there = std::size_t(counters_->written.load(std::memory_order_seq_cst) - taken);
  const std::size_t count = std::min({bytes, there, std::max<std::size_t>(capacity_ / kParts, 1)});
  const std::size_t at = std::size_t(taken % capacity_), first = std::min(count, capacity_ - at);
  if (count == 0) return 0;
  if (to) {
    std::memcpy(to, data_ + at, first);
    std::memcpy(to + first, data_, count - first);
  }
  counters_->taken.store(taken + count, std::memory_order_seq_cst);
  return count;
}

template <class Move>
std::size_t Pieces::advance(const Move& move) {
  std::size_t moved = 0;
  while (at_ < pieces_.size()) {
    const Memory& piece = pieces_[at_];
    const std::size_t count = offset_ == piece.bytes ? 0 : move(piece.data + offset_, piece.bytes - offset_);
    moved += count;
    offset_ += count;
    if (offset_ < piece.bytes) break;
    ++at_;
    offset_ = 0;
  }
  return moved;
}

// ---- joining and leaving --------------------------------------------------------------------------------

Messenger::Messenger(const std::string& rendezvous_id, int rank, int num_workers, int num_servers, double timeout_s,
                     const Segment::Check& check)
    : rank_(rank),
      num_workers_(num_workers),
      num_servers_(num_servers),
      first_peer_(rank < num_workers ? num_workers : 0),
      name_of_(payload(num_workers, num_servers).name_of),
      timeout_s_(timeout_s),
      forks_(forks_so_far()),
      may_spin_(num_workers + num_servers <= cores()) {
  segment_ = std::make_unique<Segment>(rendezvous_id, rank, num_workers + num_servers, payload(num_workers, num_servers),
                                       timeout_s, check);
  if (rank == 0) reinterpret_cast<Start*>(segment_->payload())->num_workers = num_workers;
  const bool is_worker = rank < num_workers;
  const std::size_t bytes = ring_bytes(num_workers, num_servers);
  char* rings = segment_->payload() + start_bytes(num_workers + num_servers);
  const auto ring = [&](int worker, int server, bool is_to_server) {
    const std::size_t pair = std::size_t(worker) * std::size_t(num_servers) + std::size_t(server);
    return Ring(rings + (2 * pair + (is_to_server ? 0 : 1)) * bytes, bytes - sizeof(RingCounters));
  };
  for (int i = 0; i < (is_worker ? num_servers : num_workers); ++i) {
    const int worker = is_worker ? rank : i, server = is_worker ? i : rank - num_workers;
    Peer& peer = peers_.emplace_back();
    peer.rank = first_peer_ + i;
    peer.out = ring(worker, server, is_worker);
    peer.in = ring(worker, server, !is_worker);
  }
}

void Messenger::wait_for_all(const Segment::Check& check) {
  segment_->wait_for_all(timeout_s_, check);
  const std::int64_t theirs = reinterpret_cast<Start*>(segment_->payload())->num_workers;
  if (theirs != num_workers_)
    throw CommError("shm: " + name_of_(rank_) + ": rank 0 says that " + std::to_string(theirs) + " of the " +
                    std::to_string(num_workers_ + num_servers_) + " processes are workers, not " +
                    std::to_string(num_workers_) + "; set SINGA_LITE_NUM_SERVERS alike for all");
}

bool Messenger::is_forked() const { return forks_ != forks_so_far(); }

void Messenger::check_usable() const {
  if (is_forked())
    throw CommError(name_of_(rank_) + ": a shm messenger made before fork() is not usable in the child (process " +
                    std::to_string(getpid()) + "); make the job after the fork");
  if (is_stopping_.load()) throw CommError(name_of_(rank_) + ": this messenger is closed");
}

AbortRecord& Messenger::record_of(int rank) const {
  return reinterpret_cast<AbortRecord*>(segment_->payload() + sizeof(Start))[rank];
}

void Messenger::leave(const std::string& why) {
  if (is_forked()) return;
  is_stopping_.store(true);  // ends the call of another thread, which has the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!segment_) return;
  if (!why.empty()) record_of(rank_).post(rank_, why);
  segment_->leave();
  for (int rank = 0; rank < segment_->size(); ++rank) {  // the own bell too: another thread may sleep
    segment_->block(rank).bell.fetch_add(1);
    futex_wake(segment_->block(rank).bell);
  }
  for (Peer& peer : peers_)
    for (const auto& message : peer.outbox) {
      message->failure = "this messenger was closed";
      message->has_failed.store(true);
    }
  peers_.clear();
  segment_.reset();
}

// ---- calls ----------------------------------------------------------------------------------------------

std::shared_ptr<Outgoing> Messenger::send(int to, std::string head, const std::vector<Memory>& arrays) {
  check_usable();
  auto message = std::make_shared<Outgoing>();
  message->head = std::move(head);
  message->frame.head_bytes = message->head.size();
  for (const Memory& array : arrays) message->frame.payload_bytes += array.bytes;
  message->pieces.add({reinterpret_cast<char*>(&message->frame), sizeof(Frame)});
  message->pieces.add({message->head.data(), message->head.size()});
  for (const Memory& array : arrays) message->pieces.add(array);
  message->moved_s = monotonic_s();
  const std::lock_guard<std::mutex> lock(mutex_);
  check_usable();
  Peer& peer = peer_of(to);
  if (!peer.verdict.empty()) {
    message->failure = peer.verdict;
    message->has_failed.store(true);
    return message;
  }
  peer.outbox.push_back(message);
  move_all(false);
  return message;
}

bool Messenger::is_done(Outgoing& message) { return wait(message, 0); }

bool Messenger::wait(Outgoing& message, double deadline_s) {
  return progress([&] { return message.is_sent.load() || message.has_failed.load(); }, true, deadline_s);
}

std::shared_ptr<Incoming> Messenger::receive(double deadline_s) {
  std::shared_ptr<Incoming> received;
  const auto take_next = [&] {
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      Peer& peer = peers_[(next_peer_ + i) % peers_.size()];
      if (peer.arrived.empty()) continue;
      received = std::move(peer.arrived.front());
      peer.arrived.pop_front();
      received->is_handed_out = true;
      next_peer_ = (next_peer_ + i + 1) % peers_.size();
      return true;
    }
    return false;
  };
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_usable();
    for (Peer& peer : peers_)  // what was not read must not hold up what comes after it
      if (peer.current && peer.current->is_handed_out && peer.current->target == Incoming::Target::kNone)
        begin_own(*peer.current);
  }
  progress(take_next, false, deadline_s);
  return received;
}

void Messenger::begin_read(Incoming& message, const std::vector<Memory>& arrays) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_usable();
  Pieces pieces;
  for (const Memory& array : arrays) pieces.add(array);
  if (message.own) {
    const char* from = message.own.get();
    std::size_t left = message.payload_bytes;
    pieces.advance([&](char* to, std::size_t bytes) {
      const std::size_t count = std::min(bytes, left);
      std::memcpy(to, from, count);
      from += count;
      left -= count;
      return count;
    });
    message.own.reset();
  }
  message.pieces = std::move(pieces);
  message.target = Incoming::Target::kArrays;
  message.moved_s = monotonic_s();
}

bool Messenger::read(Incoming& message, double deadline_s) {
  return progress([&] { return message.is_complete() || !message.failure.empty(); }, false, deadline_s);
}

void Messenger::abandon_read(Incoming& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  message.target = Incoming::Target::kNowhere;
}

// ---- moving bytes ---------------------------------------------------------------------------------------

// Move until done() or the deadline; `takes_all`, if nothing moves otherwise: see Note [both directions].
template <class Done>
bool Messenger::progress(const Done& done, bool takes_all, double deadline_s) {
  Spin spin(may_spin_);
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      check_usable();
      bool has_moved = move_all(false);
      const double now_s = monotonic_s();
      const bool looks_at_locks = now_s - looked_s_ > kSleepS;
      if (looks_at_locks) looked_s_ = now_s;
      if (looks_at_locks || !has_moved)
        for (Peer& peer : peers_) look_after(peer, looks_at_locks);
      if (done()) return true;
      if (!has_moved && takes_all) has_moved = move_all(true);
      if (now_s >= deadline_s) return false;
      if (has_moved) {
        spin.restart();
        continue;
      }
    }
    if (!spin.once()) sleep(takes_all, std::min(kSleepS, deadline_s - monotonic_s()));
  }
}

bool Messenger::move_all(bool takes_all) {
  bool has_moved = false;
  for (Peer& peer : peers_) {
    has_moved |= push(peer);
    has_moved |= pull(peer, takes_all);
  }
  return has_moved;
}

bool Messenger::push(Peer& peer) {
  std::size_t left = kTurnBytes;
  bool has_moved = false;
  while (!peer.outbox.empty() && left > 0) {
    Outgoing& message = *peer.outbox.front();
    const std::size_t moved = message.pieces.advance([&](const char* from, std::size_t bytes) {
      const std::size_t count = peer.out.put(from, std::min(bytes, left));
      left -= count;
      return count;
    });
    if (moved > 0) message.moved_s = monotonic_s();
    has_moved |= moved > 0;
    if (message.pieces.is_done()) {
      message.is_sent.store(true);
      peer.outbox.pop_front();
      has_moved = true;
    } else if (moved == 0) {
      break;
    }
  }
  if (has_moved) wake(peer);  // not for each part: where cores are few every wake costs this process its turn
  return has_moved;
}

bool Messenger::pull(Peer& peer, bool takes_all) {
  std::size_t left = kTurnBytes;
  bool has_moved = false;
  while (left > 0) {
    if (!peer.current) {
      if (peer.in.is_empty() || (!takes_all && !peer.arrived.empty())) break;
      peer.current = std::make_shared<Incoming>();
      peer.current->source = peer.rank;
    }
    Incoming& message = *peer.current;
    std::size_t moved = 0;
    if (!message.has_head()) {
      moved = pull_head(peer, message);
      if (message.has_head()) peer.arrived.push_back(peer.current);
    } else {
      if (message.target == Incoming::Target::kNone) {
        if (!takes_all) break;
        begin_own(message);
      }
      moved = pull_payload(peer, message);
    }
    if (moved == 0) break;
    has_moved = true;
    left -= std::min(left, moved);
    if (message.is_complete()) peer.current.reset();
  }
  if (has_moved) wake(peer);
  return has_moved;
}

std::size_t Messenger::pull_head(Peer& peer, Incoming& message) {
  std::size_t moved = 0;
  if (message.frame_bytes < sizeof(Frame)) {
    moved = peer.in.take(reinterpret_cast<char*>(&message.frame) + message.frame_bytes,
                         sizeof(Frame) - message.frame_bytes);
    message.frame_bytes += moved;
    if (message.frame_bytes == sizeof(Frame)) message.head.resize(message.frame.head_bytes);
  } else {
    moved = peer.in.take(message.head.data() + message.head_bytes, message.head.size() - message.head_bytes);
    message.head_bytes += moved;
  }
  return moved;
}

std::size_t Messenger::pull_payload(Peer& peer, Incoming& message) {
  const auto take = [&](char* to, std::size_t bytes) { return peer.in.take(to, bytes); };
  const std::size_t moved = message.target == Incoming::Target::kNowhere
                                ? take(nullptr, message.frame.payload_bytes - message.payload_bytes)
                                : message.pieces.advance(take);
  message.payload_bytes += moved;
  if (moved > 0) message.moved_s = monotonic_s();
  return moved;
}

void Messenger::begin_own(Incoming& message) {
  message.own.reset(new char[message.frame.payload_bytes]);
  message.pieces = Pieces();
  message.pieces.add({message.own.get(), message.frame.payload_bytes});
  message.target = Incoming::Target::kOwn;
}

// ---- sleeping, and peers that go ------------------------------------------------------------------------

// Note [asleep]: who is about to sleep stores a word and then looks at the rings once more; who has changed a ring looks
// at that word afterwards: all in sequential order, so one of them sees the other.
void Messenger::sleep(bool takes_all, double seconds) {
  std::atomic<std::uint32_t>* bell;
  std::uint32_t rung;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_usable();
    RankBlock& mine = segment_->block(rank_);
    bell = &mine.bell;
    rung = bell->load();
    mine.waits_for.store(1, std::memory_order_seq_cst);
    if (seconds <= 0 || move_all(takes_all)) return;
  }
  futex_wait(*bell, rung, seconds);  // harmless where another thread has unmapped it meanwhile
}

void Messenger::wake(const Peer& peer) {
  RankBlock& block = segment_->block(peer.rank);
  std::uint64_t is_asleep = block.waits_for.load(std::memory_order_seq_cst);
  if (is_asleep == 0 || !block.waits_for.compare_exchange_strong(is_asleep, 0)) return;
  block.bell.fetch_add(1);
  futex_wake(block.bell);
}

void Messenger::look_after(Peer& peer, bool looks_at_lock) {
  if (peer.verdict.empty()) {
    peer.verdict = verdict_on(peer, looks_at_lock);
    if (peer.verdict.empty()) return;
    for (const auto& message : peer.outbox) {
      message->failure = peer.verdict;
      message->has_failed.store(true);
    }
    peer.outbox.clear();
  }
  // what it had put into the ring before is good
  if (!peer.is_reported && peer.in.is_empty()) report(peer);
}

std::string Messenger::verdict_on(const Peer& peer, bool looks_at_lock) const {
  const RankBlock& block = segment_->block(peer.rank);
  const std::string name = name_of_(peer.rank);
  const std::string who = name + " (process " + std::to_string(block.pid.load()) + ") ";
  const bool is_dead = looks_at_lock && !segment_->is_alive(peer.rank);  // asked first: its presence is final then
  if (block.presence.load(std::memory_order_acquire) == Presence::kClosed) {
    const AbortRecord& record = record_of(peer.rank);
    return record.is_posted() ? name + " aborted: " + record.why() : who + "has closed its messenger";
  }
  return is_dead ? who + "died" : "";
}

// Make the last message of a peer that has gone, and fail the one of which a part has not come.
void Messenger::report(Peer& peer) {
  if (peer.current) {
    peer.current->failure = peer.verdict;
    peer.current.reset();
  }
  auto notice = std::make_shared<Incoming>();
  notice->source = peer.rank;
  notice->reason = notice->failure = peer.verdict;
  peer.arrived.push_back(std::move(notice));
  peer.is_reported = true;
}

}  // namespace singa_lite
