// SPDX-License-Identifier: Apache-2.0
// A random choice of places for random.py; T is their integer type.

// See permuted in ../cpu/random.py, whose numbers these are.
__device__ inline Bits mix(Bits word) {
  word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9ull;
  word = (word ^ word >> 27) * 0x94D049BB133111EBull;
  return word ^ word >> 31;
}

KERNEL random_indices(T* places, Int k, Int n, Int half, Number<Bits> seed, Number<Bits> counter) {
  const Bits golden = 0x9E3779B97F4A7C15ull, mask = (1ull << half) - 1, start = seed.get() ^ counter.get() * golden;
  Bits keys[4];
  for (int turn = 0; turn < 4; ++turn) keys[turn] = mix(start + (turn + 1) * golden);
  EACH(i, k) {
    Bits place = i;
    do {
      Bits left = place >> half, right = place & mask;
      for (int turn = 0; turn < 4; ++turn) {
        const Bits next = left ^ (mix(right ^ keys[turn]) & mask);
        left = right;
        right = next;
      }
      place = left << half | right;
    } while (place >= static_cast<Bits>(n));
    places[i] = static_cast<T>(place);
  }
}
