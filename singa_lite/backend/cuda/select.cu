// SPDX-License-Identifier: Apache-2.0
// Selection for select.py. T is the type of values, U of indices or counts. A value's magnitude is its bits
// without the sign, which order as |v| does; all NaN share the largest.
//
// Note [exact top-K]: the K-th largest magnitude, the border, is found from its highest bits down, 11 at a time: a
// kernel counts how many elements that agree with the bits found so far have each value of the next ones, and its last
// block decides. Then what is larger, and of what is equal the lowest indices, is kept in the order of indices: blocks
// count what they keep, the last of them sums up what comes before each, and a second kernel writes. Integers alone
// are added atomically, so the result does not depend on the order of threads.
//
// Note [candidates]: after the first 11 bits few elements may still be among the K. While a block counts the values of
// the next bits, it lists these candidates of its part, in order, and the later kernels read them alone. A block that
// finds more of them than its list has room for reads its whole part again in later kernels, with the same result.

const int kDigitBits = 11, kDigits = 1 << kDigitBits;
typedef MagnitudeOf<T>::type Magnitude;  // -1 for no element, so it is never kept

__device__ inline Magnitude magnitude(Half v) {
  const Magnitude bits = v.bits & 0x7fff;
  return bits > 0x7c00 ? 0x7fff : bits;
}
__device__ inline Magnitude magnitude(float v) {
  const Magnitude bits = __float_as_uint(v) & 0x7fffffff;
  return bits > 0x7f800000 ? 0x7fffffff : bits;
}
__device__ inline Magnitude magnitude(double v) {
  const Int bits = __double_as_longlong(v) & 0x7fffffffffffffff;
  return static_cast<Magnitude>(bits > 0x7ff0000000000000 ? 0x7fffffffffffffff : bits);
}

// ---- parts --------------------------------------------------------------------------------------------------------

// How many neighbours a thread takes at a time: enough bytes on their way, and few sums over the block.
enum { kEach = sizeof(T) < 8 ? 16 : 8, kPack = 16 / sizeof(T) };
#define OF_EACH(e) _Pragma("unroll") for (int e = 0; e < kEach; ++e)

// The elements that a block looks at: those from begin to end, or those whose indices a list has there.
struct Part {
  const T* values;
  const unsigned* list;
  bool is_listed;
  Int begin, end;

  __device__ Int index(Int at) const { return is_listed ? list[at] : at; }
  // Magnitudes of kEach elements from `at` on, -1 where there is none; all are read before one is looked at.
  __device__ void read(Int at, Magnitude* found) const {
    T seen[kEach];
    if (!is_listed && at >= 0 && at + kEach <= end) {
      const Pack<T, kEach> pack = *reinterpret_cast<const Pack<T, kEach>*>(values + at);
      OF_EACH(e) seen[e] = pack.values[e];
    } else if (at < end && end > 0) {
      unsigned indices[kEach];
      OF_EACH(e) indices[e] = at + e < 0 ? 0 : at + e < end ? at + e : end - 1;
      if (is_listed) OF_EACH(e) indices[e] = list[indices[e]];
      OF_EACH(e) seen[e] = values[indices[e]];
    }
    OF_EACH(e) found[e] = at + e >= 0 && at + e < end ? magnitude(seen[e]) : -1;
  }
};

// The threads of a block go through a part together; `at` is the first of a thread's kEach neighbours.
#define TILES(at, part) \
  for (Int at = (part).begin + threadIdx.x * kEach; at - threadIdx.x * kEach < (part).end; at += blockDim.x * kEach)

// `span` elements of each block, a multiple of kEach. All parts begin where packs may, so the first perhaps before
// element 0.
__device__ inline Part part_of_block(const T* values, Int n, Int span) {
  const Int begin = blockIdx.x * span - static_cast<Int>(reinterpret_cast<Bits>(values) / sizeof(T) % kPack);
  return Part{values, nullptr, false, begin, begin + span < n ? begin + span : n};
}

// A block's list of candidates: how many its part has, then the indices of the first `capacity` of them.
struct Candidates {
  unsigned* count;
  Int capacity;

  // the part of the block, or its candidates alone if they are listed and all are
  __device__ Part of(Part part, bool are_listed = true) const {
    part.list = count + 1;
    part.is_listed = are_listed && *count <= capacity;
    if (part.is_listed) part.begin = 0, part.end = *count;
    return part;
  }
};
__device__ inline Candidates candidates_of_block(unsigned* lists, Int span) {
  return Candidates{lists + blockIdx.x * (1 + span / 8), span / 8};
}
__device__ inline Part candidates_or_part(const T* values, Int n, Int span, unsigned* lists) {
  return candidates_of_block(lists, span).of(part_of_block(values, n, span));
}

// ---- keeping ------------------------------------------------------------------------------------------------------

const Bits kLarger = 1ull << 32;  // counts of larger and of equal elements in one number; n < 2 ** 32

struct Search {
  Int border;  // the bits of the K-th largest magnitude found so far, and zeros behind them
  Int need;    // how many of the elements that agree with them are among the K
};

struct AboveBorder {
  Magnitude border;
  Bits need;
  __device__ Bits of(Magnitude v) const { return v > border ? kLarger : v == border; }
};
struct AtLeast {
  Magnitude threshold;
  Bits need = 0;  // none is equal
  __device__ Bits of(Magnitude v) const { return v < threshold ? 0 : kLarger; }  // so NaN is kept
};
__device__ inline AboveBorder above_border(const Search* search) {
  return AboveBorder{static_cast<Magnitude>(search->border), static_cast<Bits>(search->need)};
}
__device__ inline AtLeast at_least(const Number<double>& threshold) {
  return AtLeast{magnitude(narrow<T>(static_cast<A>(threshold.get())))};
}

// Calls use(index, its count, count of all before it) in order for the elements of a tile that the test counts;
// `*before` is the count of all tiles before this one, then of this one too.
template <class Test, class Use>
__device__ void each_counted(const Part& part, Int at, const Magnitude* found, const Test& test, Bits* before,
                             const Use& use) {
  Bits mine = 0, total;
  OF_EACH(e) mine += test.of(found[e]);
  Bits here = *before + before_in_block(mine, &total);
  *before += total;
  if (mine == 0) return;
  OF_EACH(e) if (const Bits counted = test.of(found[e])) {
    use(part.index(at + e), counted, here);
    here += counted;
  }
}

// How many a block keeps of its part, then what all before it keep; total[0] what all keep.
template <class Test>
__device__ void count_kept(const Part& part, const Test& test, Bits* before, U* total, unsigned* block_counter) {
  Bits mine = 0;
  TILES(at, part) {
    Magnitude found[kEach];
    part.read(at, found);
    OF_EACH(e) mine += test.of(found[e]);
  }
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
__device__ void write_kept(const Part& part, const Test& test, const Bits* before, U* indices, T* kept, Int capacity) {
  Bits start = before[blockIdx.x];
  TILES(at, part) {
    Magnitude found[kEach];
    part.read(at, found);
    each_counted(part, at, found, test, &start, [&](Int index, Bits counted, Bits here) {
      const Bits equal = here % kLarger;
      const Int position = static_cast<Int>(here / kLarger + (equal < test.need ? equal : test.need));
      if ((counted >= kLarger || equal < test.need) && position < capacity) {
        indices[position] = static_cast<U>(index);
        kept[position] = part.values[index];
      }
    });
  }
}

// Digit `number` of the border, see Note [exact top-K]: from bit `shift` on, where those from bit `known` on are found.
// digits must be zeros before and is after; lists are those of Note [candidates].
KERNEL find_digit(const T* values, Int n, Int span, Int k, Int number, Int known, Int shift, unsigned* digits,
                  Search* search, unsigned* lists, unsigned* block_counter) {
  __shared__ unsigned counts[kDigits];
  for (int digit = threadIdx.x; digit < kDigits; digit += blockDim.x) counts[digit] = 0;
  const Magnitude border = number ? static_cast<Magnitude>(search->border) : 0;
  const unsigned need = static_cast<unsigned>(number ? search->need : k);
  const Candidates candidates = candidates_of_block(lists, span);
  const Part part = candidates.of(part_of_block(values, n, span), number > 1);
  Bits num_listed = 0;
  __syncthreads();
  TILES(at, part) {
    Magnitude found[kEach];
    part.read(at, found);
    OF_EACH(e) if ((found[e] ^ border) >> known == 0) atomicAdd(&counts[found[e] >> shift & (kDigits - 1)], 1u);
    if (number == 1)
      each_counted(part, at, found, AtLeast{border}, &num_listed, [&](Int index, Bits, Bits here) {
        const Int position = static_cast<Int>(here / kLarger);
        if (position < candidates.capacity) candidates.count[1 + position] = static_cast<unsigned>(index);
      });
  }
  if (number == 1 && threadIdx.x == 0) *candidates.count = static_cast<unsigned>(num_listed / kLarger);
  __syncthreads();
  for (int digit = threadIdx.x; digit < kDigits; digit += blockDim.x)
    if (counts[digit]) atomicAdd(&digits[digit], counts[digit]);
  if (!is_last_block(block_counter)) return;
  // the threads share the digits from the largest down
  const int each = kDigits / blockDim.x, largest = kDigits - 1 - threadIdx.x * each;
  volatile unsigned* seen = digits;
  unsigned mine = 0, total;
  for (int i = 0; i < each; ++i) mine += seen[largest - i];
  unsigned above = before_in_block(mine, &total);
  if (above < need && need <= above + mine) {
    int digit = largest;
    for (; above + seen[digit] < need; --digit) above += seen[digit];
    search->border = border | static_cast<Int>(digit) << shift;
    search->need = need - above;
  }
  __syncthreads();
  for (int digit = threadIdx.x; digit < kDigits; digit += blockDim.x) digits[digit] = 0;
}

KERNEL count_largest(const T* values, Int n, Int span, const Search* search, unsigned* lists, Bits* before,
                     unsigned* block_counter) {
  const Part part = candidates_or_part(values, n, span, lists);
  count_kept(part, above_border(search), before, static_cast<U*>(nullptr), block_counter);
}
KERNEL write_largest(const T* values, Int n, Int span, const Search* search, unsigned* lists, const Bits* before,
                     U* indices, T* kept, Int k) {
  write_kept(candidates_or_part(values, n, span, lists), above_border(search), before, indices, kept, k);
}
KERNEL count_at_least(const T* values, Int n, Int span, Number<double> threshold, Bits* before, U* total,
                      unsigned* block_counter) {
  count_kept(part_of_block(values, n, span), at_least(threshold), before, total, block_counter);
}
KERNEL write_at_least(const T* values, Int n, Int span, Number<double> threshold, const Bits* before, U* indices,
                      T* kept, Int capacity) {
  write_kept(part_of_block(values, n, span), at_least(threshold), before, indices, kept, capacity);
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
