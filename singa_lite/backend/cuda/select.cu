// SPDX-License-Identifier: Apache-2.0
// Selection for select.py. T is the type of values, U of indices or counts. A value's magnitude is its bits
// without the sign, which order as |v| does; all NaN share the largest.
//
// Note [exact top-K]: the K-th largest magnitude is found from its highest bits down, 11 at a time: a kernel counts
// how many elements that agree with the bits found so far have each value of the next ones, and its last block
// decides. Then what is larger, and of what is equal the lowest indices, is kept in the order of indices: blocks
// count what they keep, the last of them sums up what comes before each, and a second kernel writes. Integers alone
// are added atomically, so the result does not depend on the order of threads.

const int kDigitBits = 11, kDigits = 1 << kDigitBits;
typedef MagnitudeOf<T>::type Magnitude;

__device__ inline Magnitude magnitude(Half v) {
  const unsigned bits = v.bits & 0x7fff;
  return bits > 0x7c00 ? 0x7fff : bits;
}
__device__ inline Magnitude magnitude(float v) {
  const unsigned bits = __float_as_uint(v) & 0x7fffffff;
  return bits > 0x7f800000 ? 0x7fffffff : bits;
}
__device__ inline Magnitude magnitude(double v) {
  const Bits bits = static_cast<Bits>(__double_as_longlong(v)) & 0x7fffffffffffffff;
  return static_cast<Magnitude>(bits > 0x7ff0000000000000 ? 0x7fffffffffffffff : bits);
}

struct Search {
  Bits border;  // the bits of the K-th largest magnitude found so far
  Bits need;    // how many of the elements that agree with them are among the K
};

// One digit of the border, see Note [exact top-K]; digits must be zeros before and is after.
KERNEL find_digit(const T* values, Int n, Int k, Int is_first, Int shift, Bits* digits, Search* search, unsigned* block_counter) {
  __shared__ unsigned counts[kDigits];
  for (int digit = threadIdx.x; digit < kDigits; digit += blockDim.x) counts[digit] = 0;
  const Bits border = is_first ? 0 : search->border, need = is_first ? static_cast<Bits>(k) : search->need;
  __syncthreads();
  BATCHES(n) {
    Bits found[4];
    IN_BATCH(i, n) found[u] = magnitude(values[i]) >> shift;
    IN_BATCH(i, n) if (found[u] >> kDigitBits == border) atomicAdd(&counts[found[u] % kDigits], 1u);
  }
  __syncthreads();
  for (int digit = threadIdx.x; digit < kDigits; digit += blockDim.x)
    if (counts[digit]) atomicAdd(&digits[digit], static_cast<Bits>(counts[digit]));
  if (!is_last_block(block_counter)) return;
  // the threads share the digits from the largest down
  const int each = kDigits / blockDim.x, largest = kDigits - 1 - threadIdx.x * each;
  volatile Bits* seen = digits;
  Bits mine = 0, total;
  for (int i = 0; i < each; ++i) mine += seen[largest - i];
  Bits above = before_in_block(mine, &total);
  if (above < need && need <= above + mine) {
    int digit = largest;
    for (; above + seen[digit] < need; --digit) above += seen[digit];
    search->border = border << kDigitBits | digit;
    search->need = need - above;
  }
  __syncthreads();
  for (int digit = threadIdx.x; digit < kDigits; digit += blockDim.x) digits[digit] = 0;
}

// ---- keeping ------------------------------------------------------------------------------------------------------

const Bits kLarger = 1ull << 32;  // counts of larger and of equal elements in one number; n < 2 ** 32

struct AboveBorder {
  Bits border, need;
  __device__ Bits of(T v) const {
    const Bits bits = magnitude(v);
    return bits > border ? kLarger : bits == border;
  }
};
struct AtLeast {
  Magnitude threshold;
  Bits need = 0;  // none is equal
  __device__ Bits of(T v) const { return magnitude(v) < threshold ? 0 : kLarger; }  // so NaN is kept
};
__device__ inline AtLeast at_least(const Number<double>& threshold) {
  return AtLeast{magnitude(narrow<T>(static_cast<A>(threshold.get())))};
}

// How many a block keeps of its span, then what all before it keep; total[0] what all keep.
template <class Test>
__device__ void count_kept(const T* values, Int n, Int span, const Test& test, Bits* before, U* total, unsigned* block_counter) {
  Bits mine = 0;
  const Int begin = blockIdx.x * span, end = begin + span < n ? begin + span : n;
  for (Int i = begin + threadIdx.x; i < end; i += blockDim.x) mine += test.of(values[i]);
  mine = over_block<Add>(mine);
  if (threadIdx.x == 0) before[blockIdx.x] = mine;
  if (!is_last_block(block_counter)) return;
  volatile Bits* seen = before;
  Bits start = 0;
  for (unsigned first = 0; first < gridDim.x; first += blockDim.x) {
    const unsigned block = first + threadIdx.x;
    Bits sum;
    const Bits position = start + before_in_block(block < gridDim.x ? Bits(seen[block]) : 0, &sum);
    if (block < gridDim.x) seen[block] = position;
    start += sum;
  }
  if (total && threadIdx.x == 0) *total = static_cast<U>(start / kLarger);
}

template <class Test>
__device__ void write_kept(const T* values, Int n, Int span, const Test& test, const Bits* before, U* indices, T* kept, Int capacity) {
  Bits start = before[blockIdx.x];
  const Int begin = blockIdx.x * span, end = begin + span < n ? begin + span : n;
  for (Int first = begin; first < end; first += blockDim.x) {
    const Int i = first + threadIdx.x;
    const Bits found = i < end ? test.of(values[i]) : 0;
    Bits total;
    const Bits here = start + before_in_block(found, &total), equal = here % kLarger;
    const Int position = static_cast<Int>(here / kLarger + (equal < test.need ? equal : test.need));
    if ((found >= kLarger || (found && equal < test.need)) && position < capacity) {
      indices[position] = static_cast<U>(i);
      kept[position] = values[i];
    }
    start += total;
  }
}

KERNEL count_largest(const T* values, Int n, Int span, const Search* search, Bits* before, unsigned* block_counter) {
  count_kept(values, n, span, AboveBorder{search->border, search->need}, before, static_cast<U*>(nullptr), block_counter);
}
KERNEL write_largest(const T* values, Int n, Int span, const Search* search, const Bits* before, U* indices, T* kept, Int k) {
  write_kept(values, n, span, AboveBorder{search->border, search->need}, before, indices, kept, k);
}
KERNEL count_at_least(const T* values, Int n, Int span, Number<double> threshold, Bits* before, U* total,
                      unsigned* block_counter) {
  count_kept(values, n, span, at_least(threshold), before, total, block_counter);
}
KERNEL write_at_least(const T* values, Int n, Int span, Number<double> threshold, const Bits* before, U* indices,
                      T* kept, Int capacity) {
  write_kept(values, n, span, at_least(threshold), before, indices, kept, capacity);
}

// ---- putting back, and scales -------------------------------------------------------------------------------------

// indices are unique, so no two threads write one element
// Indices outside of flat come from a collective that was aborted.
__device__ inline bool is_inside(Int position, Int size) { return position >= 0 && position < size; }

KERNEL scatter_add(const U* indices, const T* values, T* flat, Int n, Int size) {
  EACH(i, n) {
    const Int position = indices[i];
    if (is_inside(position, size)) flat[position] = narrow<T>(A(widen(flat[position]) + widen(values[i])));
  }
}
KERNEL scatter_fill(const U* indices, T* flat, Int n, Int size, double value) {
  EACH(i, n) if (is_inside(indices[i], size)) flat[indices[i]] = narrow<T>(value);
}

KERNEL max_abs(const T* x, T* largest, Int n, A* parts, unsigned* block_counter) {
  A mine = 0, all;
  EACH(i, n) {
    const A v = widen(x[i]);
    mine = larger(mine, v < 0 ? A(-v) : v);
  }
  if (over_grid<Larger>(mine, parts, block_counter, &all) && threadIdx.x == 0) *largest = narrow<T>(all);
}

KERNEL power_of_two_scale(const T* from, T* scale, double limit) {
  const double largest = static_cast<double>(widen(*from));
  if (!(largest > 0) || largest > 1.7976931348623157e308) {  // 0, NaN, infinite
    *scale = narrow<T>(1.0);
    return;
  }
  int exponent;
  frexp(limit / largest, &exponent);
  --exponent;  // floor of the logarithm, but for the rounding of the quotient
  if (ldexp(largest, exponent) > limit) --exponent;
  // exponents beyond +-126 would leave float32's normal range, where scaling is not exact
  *scale = narrow<T>(ldexp(1.0, exponent < -126 ? -126 : exponent > 126 ? 126 : exponent));
}
