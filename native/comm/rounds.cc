// SPDX-License-Identifier: Apache-2.0
// Engine, first part: moving data, see Note [rounds]. Nothing here waits.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "comm/combine.h"
#include "comm/engine.h"
#include "comm/names.h"
#include "common/error.h"

namespace singa_lite {
namespace {

constexpr std::size_t kDirectBytes = 32 << 10;  // up to here every rank adds everything itself: one wait less
constexpr std::size_t kReduceBytes = 8 << 10;   // reduced at once, so that the results are copied from the L1 cache

// A call and its name, in the words that show where the name differs from that of `other`.
std::string describe(const Fingerprint& call, std::string_view name, const Fingerprint& other,
                     std::string_view other_name) {
  const Kind kind = Kind(call.kind);
  std::string text = std::string(name_of(kind)) + " #" + std::to_string(call.sequence) + " '" +
                     shortened(name, other_name) + "' ";
  if (call.name_hash != other.name_hash && name == other_name)
    text += "(" + std::to_string(call.name_bytes) + " bytes, which differ after byte " + std::to_string(name.size()) +
            ") ";
  if (ReduceOp(call.op) != ReduceOp::kNone) text += std::string(name_of(ReduceOp(call.op))) + " ";
  text += std::string(name_of(DType(call.dtype))) + "[" + std::to_string(call.count) + "]";
  if (call.wire != call.dtype) text += std::string(" as ") + name_of(DType(call.wire));
  if (call.scale_bits != other.scale_bits) {
    float scale;
    std::memcpy(&scale, &call.scale_bits, sizeof scale);
    char shown[32];
    std::snprintf(shown, sizeof shown, " scaled by %.9g", double(scale));
    text += shown;
  }
  if (kind == Kind::kBroadcast || kind == Kind::kReduce) text += " root " + std::to_string(call.root);
  return text;
}

// memcpy forbids null even for no bytes, and an empty array may have no memory.
void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

}  // namespace

void Engine::split_into_rounds(Op& op) const {
  const std::size_t element = bytes_of(op.request.wire), count = op.request.count;
  std::size_t slot_bytes = slots_.chunk_bytes();
  if (has_blocks(op.request.kind)) slot_bytes = slot_bytes / std::size_t(size_) / kLine * kLine;
  op.round_elements = slot_bytes / element;
  op.num_rounds = std::max<std::uint64_t>(1, (count + op.round_elements - 1) / op.round_elements);
  op.is_two_shot =
      op.request.kind == Kind::kAllReduce && size_ > 1 && count * element > kDirectBytes;
}

std::size_t Engine::elements_in(const Op& op, std::uint64_t round) const {
  const std::size_t at = std::size_t(round - op.first_round) * op.round_elements;
  return std::min(op.round_elements, op.request.count - at);
}

Engine::Piece Engine::piece_of(std::size_t count, DType wire, int rank) const {
  const std::size_t line = kLine / bytes_of(wire), ranks = std::size_t(size_);
  const std::size_t share = ((count + ranks - 1) / ranks + line - 1) / line * line;
  const std::size_t begin = std::min(count, share * std::size_t(rank));
  return {begin, std::min(share, count - begin)};
}

// Point the cursor at a collective that still has rounds for it; false if none has been started.
bool Engine::advance_cursor(Cursor& cursor, bool only_two_shot) {
  for (;;) {
    if (cursor.op && cursor.round < cursor.op->first_round + cursor.op->num_rounds &&
        (!only_two_shot || cursor.op->is_two_shot))
      return true;
    if (cursor.sequence == issued_.load(std::memory_order_acquire)) {
      cursor.op.reset();
      return false;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    cursor.sequence = std::max(cursor.sequence, first_sequence_);
    if (cursor.sequence == issued_.load(std::memory_order_relaxed)) continue;
    cursor.op = in_flight_[std::size_t(cursor.sequence - first_sequence_)];
    cursor.round = cursor.op->first_round;
    ++cursor.sequence;
  }
}

// The last round that a rank can have posted: nobody is further ahead than the slots that this rank has freed.
std::uint64_t Engine::furthest() const { return own_[std::size_t(Progress::kConsumed)] + kSlots; }

bool Engine::reached(Progress counter, std::uint64_t value) {
  std::uint64_t& known = all_reached_[std::size_t(counter)];
  if (known >= value) return true;
  std::uint64_t least = own_[std::size_t(counter)], most = 0;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const std::uint64_t its = segment_->block(r).counters[std::size_t(counter)].load(std::memory_order_acquire);
    least = std::min(least, its);
    most = std::max(most, its);
  }
  const std::uint64_t limit = furthest();
  if (most > limit)
    throw CommError("rank " + name_of_rank(rank_) + ": a rank's place in the shared memory is damaged: it says round " +
                    std::to_string(most) + " where at most " + std::to_string(limit) + " is possible");
  known = least;
  return known >= value;
}

// Consuming comes first: what was posted is still in the cache, and it frees a slot.
bool Engine::step() { return try_consume() || try_reduce() || try_post(); }

bool Engine::try_post() {
  if (!advance_cursor(post_)) return false;
  const std::uint64_t round = post_.round;
  if (round >= kSlots && !reached(Progress::kConsumed, round + 1 - kSlots)) return false;
  post(*post_.op, round);
  ++post_.round;
  advance(Progress::kPosted, round + 1);
  return true;
}

bool Engine::try_reduce() {
  if (!advance_cursor(reduce_, true)) return false;
  Op& op = *reduce_.op;
  const std::uint64_t round = reduce_.round;
  if (!reached(Progress::kPosted, round + 1)) return false;
  if (!op.is_checked) check_descriptors(op, false);
  reduce_piece(op, round);
  ++reduce_.round;
  advance(Progress::kReduced, round + 1);
  return true;
}

bool Engine::try_consume() {
  if (!advance_cursor(consume_)) return false;
  Op& op = *consume_.op;
  const std::uint64_t round = consume_.round;
  if (!reached(op.is_two_shot ? Progress::kReduced : Progress::kPosted, round + 1)) return false;
  if (!op.is_checked) check_descriptors(op, false);
  consume(op, round);
  ++consume_.round;
  advance(Progress::kConsumed, round + 1);
  if (consume_.round == op.first_round + op.num_rounds) {
    const std::shared_ptr<Op> ended = consume_.op;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      in_flight_.pop_front();
      ++first_sequence_;
    }
    finish(*ended);
  }
  return true;
}

void Engine::post(const Op& op, std::uint64_t round) {
  const Request& request = op.request;
  const std::size_t element = bytes_of(request.wire), at = std::size_t(round - op.first_round) * op.round_elements;
  const std::size_t count = elements_in(op, round);
  char* slot = slots_.data(rank_, round);
  const char* in = static_cast<const char*>(request.in);
  if (round == op.first_round) {
    Descriptor& descriptor = slots_.descriptor(rank_, round);
    descriptor.fingerprint = op.fingerprint;
    descriptor.called_s = op.called_s;
    descriptor.asks_to_stop = request.asks_to_stop;
    copy(descriptor.name, request.name.data(), std::min(request.name.size(), kNameBytes));
  }
  if (request.is_narrow()) {
    to_wire(request.wire, static_cast<const float*>(request.in) + at, slot, count, request.scale);
  } else if (size_ == 1 || (request.kind == Kind::kBroadcast && rank_ != request.root)) {
    return;
  } else if (has_blocks(request.kind)) {
    for (int r = 0; r < size_; ++r)
      if (r != rank_)
        copy(slot + std::size_t(r) * op.round_elements * element,
                    in + (std::size_t(r) * request.count + at) * element, count * element);
  } else {
    const Piece mine = op.is_two_shot ? piece_of(count, request.wire, rank_) : Piece{count, 0};  // nobody else reads it
    const std::size_t after = mine.begin + mine.count;
    copy(slot, in + at * element, mine.begin * element);
    copy(slot + after * element, in + (at + after) * element, (count - after) * element);
  }
}

// See Note [two-shot].
void Engine::reduce_piece(const Op& op, std::uint64_t round) {
  const Request& request = op.request;
  const std::size_t element = bytes_of(request.wire), mine = std::size_t(rank_);
  const Piece piece = piece_of(elements_in(op, round), request.wire, rank_);
  const std::size_t at = std::size_t(round - op.first_round) * op.round_elements + piece.begin;
  for (std::size_t done = 0, n; done < piece.count; done += n) {
    n = std::min(piece.count - done, kReduceBytes / element);
    const std::size_t offset = (piece.begin + done) * element;
    for (int r = 0; r < size_; ++r) sources_[std::size_t(r)] = slots_.data(r, round) + offset;
    char* out = slots_.data(rank_, round) + offset;
    if (!request.is_narrow()) {
      sources_[mine] = static_cast<const char*>(request.in) + (at + done) * element;
      out = static_cast<char*>(request.out) + (at + done) * element;
    }
    combine(request.wire, request.op, sources_.data(), sources_.size(), out, n);
    for (int r = 0; r < size_; ++r)
      if (r != rank_) copy(slots_.data(r, round) + offset, out, n * element);
  }
}

void Engine::consume(const Op& op, std::uint64_t round) {
  const Request& request = op.request;
  const std::size_t element = bytes_of(request.wire), at = std::size_t(round - op.first_round) * op.round_elements;
  const std::size_t count = elements_in(op, round);
  char* out = static_cast<char*>(request.out);
  const char* in = static_cast<const char*>(request.in);
  switch (request.kind) {
    case Kind::kAllReduce:
      return op.is_two_shot ? consume_two_shot(op, round, at, count) : consume_one_shot(op, round, at, count);
    case Kind::kReduce:
    case Kind::kReduceScatter:
      if (request.kind == Kind::kReduceScatter || rank_ == request.root) consume_one_shot(op, round, at, count);
      return;
    case Kind::kBroadcast:
      if (rank_ != request.root)
        copy(out + at * element, slots_.data(request.root, round), count * element);
      return;
    case Kind::kAllGather:
      for (int r = 0; r < size_; ++r)
        copy(out + (std::size_t(r) * request.count + at) * element,
                    r == rank_ ? in + at * element : slots_.data(r, round), count * element);
      return;
    case Kind::kAllToAll: {
      const std::size_t mine = std::size_t(rank_);  // the piece of every slot that is for this rank
      for (int r = 0; r < size_; ++r)
        copy(out + (std::size_t(r) * request.count + at) * element,
             r == rank_ ? in + (mine * request.count + at) * element
                        : slots_.data(r, round) + mine * op.round_elements * element,
             count * element);
      return;
    }
  }
}

void Engine::consume_one_shot(const Op& op, std::uint64_t round, std::size_t at, std::size_t count) {
  const Request& request = op.request;
  const std::size_t element = bytes_of(request.wire), mine = std::size_t(rank_);
  const bool is_scatter = request.kind == Kind::kReduceScatter;
  const std::size_t skip = is_scatter ? mine * op.round_elements * element : 0;
  for (int r = 0; r < size_; ++r) sources_[std::size_t(r)] = slots_.data(r, round) + skip;
  if (!request.is_narrow())  // our own part is nearer in the caller's array
    sources_[mine] = static_cast<const char*>(request.in) + ((is_scatter ? mine * request.count : 0) + at) * element;
  void* out = static_cast<char*>(request.out) + at * bytes_of(request.dtype);
  combine(request.wire, request.op, sources_.data(), sources_.size(), out, count, request.is_narrow(), request.scale);
}

void Engine::consume_two_shot(const Op& op, std::uint64_t round, std::size_t at, std::size_t count) {
  const std::size_t element = bytes_of(op.request.wire);
  const char* slot = slots_.data(rank_, round);
  if (op.request.is_narrow())
    return from_wire(op.request.wire, slot, static_cast<float*>(op.request.out) + at, count, op.request.scale);
  const Piece mine = piece_of(count, op.request.wire, rank_);  // already in the caller's array
  const std::size_t after = mine.begin + mine.count;
  char* out = static_cast<char*>(op.request.out);
  copy(out + at * element, slot, mine.begin * element);
  copy(out + (at + after) * element, slot + after * element, (count - after) * element);
}

// Every rank sees a disagreement by itself: it compares its own descriptor with each of the others'.
void Engine::check_descriptors(Op& op, bool only_arrived) {
  for (int r = 0; r < size_; ++r) {
    const std::uint64_t posted =
        segment_->block(r).counters[std::size_t(Progress::kPosted)].load(std::memory_order_acquire);
    if (only_arrived && (posted <= op.first_round || posted > furthest())) continue;  // reached() reports the latter
    const Descriptor& other = slots_.descriptor(r, op.first_round);
    if (r == rank_ || std::memcmp(&other.fingerprint, &op.fingerprint, sizeof(Fingerprint)) == 0) continue;
    const std::string_view mine = std::string_view(op.request.name).substr(0, kNameBytes);
    const std::string_view theirs(other.name, std::min<std::size_t>(other.fingerprint.name_bytes, kNameBytes));
    throw CommError(label(op) + ": the ranks disagree: rank " + name_of_rank(rank_) + " calls " +
                    describe(op.fingerprint, mine, other.fingerprint, theirs) + ", rank " + name_of_rank(r) +
                    " calls " + describe(other.fingerprint, theirs, op.fingerprint, mine) +
                    "; all ranks must make the same calls in the same order");
  }
  if (only_arrived) return;
  op.is_checked = true;
  for (int r = 0; r < size_; ++r) {
    const Descriptor& other = slots_.descriptor(r, op.first_round);
    op.all_called_s = std::max(op.all_called_s, other.called_s);
    op.is_asked_to_stop |= other.asks_to_stop != 0;
  }
  if (is_recording_) record_.all_there(rank_, op.fingerprint.sequence, op.all_called_s);
}

}  // namespace singa_lite
