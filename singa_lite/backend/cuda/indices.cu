// SPDX-License-Identifier: Apache-2.0
// Ascending indices as few bits for message.py, see Note [Elias-Fano] in ../cpu/indices.py. T is the type of indices.

// Bits don't overlap, so adding to words of zeros sets them, in any order.
KERNEL set_bits(const T* indices, unsigned* words, Int k, Int low_bits, Int num_low_words, Int num_words) {
  EACH(j, k) {
    const Bits index = static_cast<Bits>(indices[j]), high = (index >> low_bits) + j;
    const Int at = j * low_bits;
    if (low_bits > 0) {
      const Bits shifted = (index & ((1ull << low_bits) - 1)) << at % 32;
      atomicAdd(&words[at / 32], static_cast<unsigned>(shifted));
      if (shifted >> 32) atomicAdd(&words[at / 32 + 1], static_cast<unsigned>(shifted >> 32));
    }
    const Int word = num_low_words + static_cast<Int>(high / 32);
    if (word < num_words) atomicAdd(&words[word], 1u << high % 32);
  }
}

// One block: each thread counts the set bits of a span of words, and then writes the indices that begin there.
KERNEL find_bits(const unsigned* words, T* indices, Int k, Int low_bits, Int num_low_words, Int num_words) {
  const Int span = (num_words - num_low_words + blockDim.x - 1) / blockDim.x;
  const Int begin = num_low_words + threadIdx.x * span, end = begin + span < num_words ? begin + span : num_words;
  Bits mine = 0, total;
  for (Int word = begin; word < end; ++word)
    for (unsigned rest = words[word]; rest; rest &= rest - 1) ++mine;
  Int j = static_cast<Int>(before_in_block(mine, &total));
  for (Int word = begin; word < end; ++word)
    for (Int bit = 0; bit < 32 && j < k; ++bit) {
      if (!(words[word] >> bit & 1)) continue;
      const Int high = 32 * (word - num_low_words) + bit - j, at = j * low_bits;
      Bits low = low_bits > 0 ? words[at / 32] : 0;
      if (at % 32 + low_bits > 32) low |= static_cast<Bits>(words[at / 32 + 1]) << 32;
      indices[j++] = static_cast<T>(high << low_bits | static_cast<Int>(low >> at % 32 & ((1ull << low_bits) - 1)));
    }
  // words of a collective that was aborted have any bits
  for (Int rest = static_cast<Int>(total) + threadIdx.x; rest < k; rest += blockDim.x) indices[rest] = 0;
}
