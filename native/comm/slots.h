// SPDX-License-Identifier: Apache-2.0
// The staging slots of the collectives in a Segment: for every rank kSlots, each a Descriptor and chunk_bytes of data.
//
// Rank r alone writes slots r, but for what others reduce there, see Note [two-shot] in engine.h.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "comm/segment.h"

namespace singa_lite {

constexpr std::size_t kSlots = 2;  // rounds a rank may be ahead; with 4 of 64 KB: 1 MB equal, 16 MB 1.8 instead of 1.4 ms
constexpr std::size_t kChunkBytes = 256 << 10;    // 1 MB by 2 ranks: 0.052 ms; with 128 KB the same, with 64 KB 0.055

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// A collective as its rank calls it; must be equal on all ranks, byte by byte.
struct Fingerprint {
  std::uint64_t sequence, count, name_hash;
  std::uint8_t kind, op, dtype, wire;
  std::int32_t root;
  std::uint32_t name_bytes;
  std::uint32_t scale_bits;  // of a float, by which values are multiplied on the wire
};
static_assert(sizeof(Fingerprint) == 40 && std::has_unique_object_representations_v<Fingerprint>);

constexpr std::size_t kNameBytes = 17 * kLine - sizeof(Fingerprint) - sizeof(double) - sizeof(std::uint64_t);

// Stands in the slot of a collective's first round. Of a longer name the beginning is there, for errors.
struct Descriptor {
  Fingerprint fingerprint;
  double called_s;  // when its rank made the call, by the clock that all processes of a host share
  std::uint64_t asks_to_stop;  // 1 if its rank does; not compared
  char name[kNameBytes];
};
static_assert(sizeof(Descriptor) % kLine == 0);

class Slots {
 public:
  explicit Slots(const Segment& segment) : chunk_bytes_(chunk_bytes_for(segment.size())), base_(segment.payload()) {}

  // How much of a segment they take in a world of `size` ranks.
  static Payload payload(int size) {
    return {std::size_t(size) * kSlots * (sizeof(Descriptor) + chunk_bytes_for(size))};
  }

  Descriptor& descriptor(int rank, std::uint64_t round) const {
    return *reinterpret_cast<Descriptor*>(slot(rank, round));
  }
  char* data(int rank, std::uint64_t round) const { return slot(rank, round) + sizeof(Descriptor); }
  std::size_t chunk_bytes() const { return chunk_bytes_; }

 private:
  static std::size_t chunk_bytes_for(int size) {
    const std::size_t share = kMaxSegmentBytes / (std::size_t(std::max(size, 1)) * kSlots) - sizeof(Descriptor);
    return std::min(kChunkBytes, share / kLine * kLine);
  }
  char* slot(int rank, std::uint64_t round) const {
    return base_ + (std::size_t(rank) * kSlots + round % kSlots) * (sizeof(Descriptor) + chunk_bytes_);
  }

  std::size_t chunk_bytes_;
  char* base_;
};

}  // namespace singa_lite
