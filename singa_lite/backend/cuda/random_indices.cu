// SPDX-License-Identifier: Apache-2.0
// A random choice of indices for random.py; T is their integer type.

// See permuted in ../cpu/random.py, whose numbers these are.
__device__ inline Bits mix(Bits word) {
  word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9ull;
  word = (word ^ word >> 27) * 0x94D049BB133111EBull;
  return word ^ word >> 31;
}

KERNEL random_indices(T* indices, Int k, Int n, Int half, Number<Bits> seed, Number<Bits> counter) {
  const Bits golden = 0x9E3779B97F4A7C15ull, mask = (1ull << half) - 1, start = seed.get() ^ counter.get() * golden;
  Bits keys[4];
  for (int round = 0; round < 4; ++round) keys[round] = mix(start + (round + 1) * golden);
  EACH(i, k) {
    Bits index = i;
    do {
      Bits left = index >> half, right = index & mask;
      for (int round = 0; round < 4; ++round) {
        const Bits next = left ^ (mix(right ^ keys[round]) & mask);
        left = right;
        right = next;
      }
      index = left << half | right;
    } while (index >= static_cast<Bits>(n));
    indices[i] = static_cast<T>(index);
  }
}
