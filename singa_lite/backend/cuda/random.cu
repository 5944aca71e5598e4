// SPDX-License-Identifier: Apache-2.0
// Philox 4x32-10 for random.py. A call's stream is (seed, counter): the seed is the key, the counter the upper half
// of Philox's counter, the lower half counts groups of four draws. So a number depends on nothing else, the size of
// the launch included.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.

struct Stream {
  Number<Bits> seed, counter;
};

__device__ inline void draw(const Stream& stream, Bits group, unsigned words[4]) {
  const Bits seed = stream.seed.get(), counter = stream.counter.get();
  unsigned key[2] = {static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32)};
  unsigned c[4] = {static_cast<unsigned>(group), static_cast<unsigned>(group >> 32), static_cast<unsigned>(counter),
                   static_cast<unsigned>(counter >> 32)};
  for (int round = 0; round < 10; ++round) {
    const Bits first = 0xD2511F53ull * c[0], second = 0xCD9E8D57ull * c[2];
    c[0] = static_cast<unsigned>(second >> 32) ^ c[1] ^ key[0];
    c[1] = static_cast<unsigned>(second);
    c[2] = static_cast<unsigned>(first >> 32) ^ c[3] ^ key[1];
    c[3] = static_cast<unsigned>(first);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  for (int i = 0; i < 4; ++i) words[i] = c[i];
}

// in [0, 1), all bits of the fraction random
__device__ inline float fraction(unsigned word) { return (word >> 8) * 5.9604644775390625e-8f; }
__device__ inline double fraction(unsigned high, unsigned low) {
  return ((static_cast<Bits>(high) << 21) ^ (low >> 11)) * 1.1102230246251565e-16;
}

// one thread a group of four draws, for n elements
#define EACH_DRAW(words, i, n)                                                    \
  unsigned words[4];                                                              \
  EACH(group, (n + 3) / 4)                                                        \
    if (draw(Stream{seed, counter}, group, words), true)                                        \
      for (Int i = group * 4; i < group * 4 + 4 && i < n; ++i)

// float32 draws for every type: the mask of a float16 and a float64 run are the same
KERNEL dropout(const T* x, T* y, bool* mask, Int n, double ratio, Number<Bits> seed, Number<Bits> counter) {
  const A scale = static_cast<A>(1 / (1 - ratio));
  EACH_DRAW(words, i, n) {
    mask[i] = fraction(words[i % 4]) >= static_cast<float>(ratio);
    y[i] = narrow<T>(A(widen(x[i]) * A(mask[i]) * scale));
  }
}

KERNEL dropout_backward(const T* dy, const bool* mask, T* dx, Int n, double ratio) {
  const A scale = static_cast<A>(1 / (1 - ratio));
  EACH(i, n) dx[i] = narrow<T>(A(widen(dy[i]) * A(mask[i]) * scale));
}

KERNEL random_bernoulli(T* y, Int n, double p, Number<Bits> seed, Number<Bits> counter) {
  EACH_DRAW(words, i, n) y[i] = narrow<T>(A(fraction(words[i % 4]) < static_cast<float>(p)));
}

// Numbers in [0, 1) number 2 i and 2 i + 1 of the stream, in the precision of the result.
__device__ inline void two_fractions(const Stream& stream, Int i, float* a, float* b) {
  unsigned words[4];
  draw(stream, i / 2, words);
  *a = fraction(words[i % 2 * 2]);
  *b = fraction(words[i % 2 * 2 + 1]);
}
__device__ inline void two_fractions(const Stream& stream, Int i, double* a, double* b) {
  unsigned words[4];
  draw(stream, i, words);
  *a = fraction(words[0], words[1]);
  *b = fraction(words[2], words[3]);
}

KERNEL random_uniform(T* y, Int n, double low, double high, Number<Bits> seed, Number<Bits> counter) {
  EACH(pair, (n + 1) / 2) {
    Real values[2];
    two_fractions(Stream{seed, counter}, pair, &values[0], &values[1]);
    for (Int i = 2 * pair; i < 2 * pair + 2 && i < n; ++i) y[i] = narrow<T>(Real(values[i % 2] * Real(high - low) + Real(low)));
  }
}

// Two normal numbers from two even ones. Source: Box, Muller, "A Note on the Generation of Random Normal Deviates", 1958.
KERNEL random_normal(T* y, Int n, double mean, double std, Number<Bits> seed, Number<Bits> counter) {
  EACH(pair, (n + 1) / 2) {
    Real radius, angle;
    two_fractions(Stream{seed, counter}, pair, &radius, &angle);
    radius = sqrt(Real(-2) * log(1 - radius));  // of (0, 1]
    angle *= Real(6.283185307179586);
    for (Int i = 2 * pair; i < 2 * pair + 2 && i < n; ++i)
      y[i] = narrow<T>(Real(radius * (i % 2 ? sin(angle) : cos(angle)) * Real(std) + Real(mean)));
  }
}
