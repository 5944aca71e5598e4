// SPDX-License-Identifier: Apache-2.0
// Random numbers for random.py, from the streams of common.cuh: four draws a group.

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

// Where a number is rounded up to high it is largest, the one before it.
KERNEL random_uniform(T* y, Int n, double low, double high, double largest, Number<Bits> seed, Number<Bits> counter) {
  EACH(pair, (n + 1) / 2) {
    Real values[2];
    two_fractions(Stream{seed, counter}, pair, &values[0], &values[1]);
    for (Int i = 2 * pair; i < 2 * pair + 2 && i < n; ++i) {
      Real value = values[i % 2] * Real(high - low) + Real(low);
      y[i] = narrow<T>(value < Real(largest) ? value : Real(largest));
    }
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
