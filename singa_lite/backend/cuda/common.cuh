// SPDX-License-Identifier: Apache-2.0
// What all kernel files share. launch.py puts it before each of them, with the element types T and U of a call
// between the two; A is the type in which T is computed, see Note [kernel form] in ../base.py, Total that in which many
// of A are added up, and Real a type with functions like exp. Needs no header, so it compiles wherever NVRTC runs. Arrays are row-major. cupy compiles with
// -ftz=true: arithmetic takes float32 numbers below 2^-126 for 0; moving and selecting does not.

typedef long long Int;
typedef unsigned long long Bits;
typedef unsigned char Byte;

struct Half {
  unsigned short bits;
};

#ifdef __CUDACC__
__device__ inline float half_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ inline unsigned short float_to_half(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ inline unsigned short double_to_half(double value) {
  unsigned short bits;
  asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(value));
  return bits;
}
#endif  // otherwise its compiler defines them, as the stand-in of the tests does

// The upper half of a float. By integers, as instructions for it came with compute capability 8.0 and 9.0.
struct Bfloat16 {
  unsigned short bits;
};

// to nearest even; NaN stays one
__device__ inline Bfloat16 float_to_bfloat16(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return Bfloat16{static_cast<unsigned short>(bits >> 16 | 0x40u)};
  return Bfloat16{static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}
// A float that is not exact gets an odd last bit, towards 0: so the second rounding is right, as if it were the only one.
__device__ inline Bfloat16 double_to_bfloat16(double value) {
  const float near = static_cast<float>(value);
  unsigned bits = __float_as_uint(near);
  if (near - near == 0 && near != value) bits = (fabs(static_cast<double>(near)) > fabs(value) ? bits - 1 : bits) | 1;
  return float_to_bfloat16(__uint_as_float(bits));
}

// Neighbouring elements that a thread reads or writes at once, at best 16 bytes.
template <class V, int count> struct alignas(sizeof(V) * count < 16 ? sizeof(V) * count : 16) Pack {
  V values[count];
};
typedef Pack<Bits, 2> Sixteen;  // bytes, to copy

// ---- types ----------------------------------------------------------------------------------------------------

template <class V> struct WideOf { typedef V type; };
template <> struct WideOf<Half> { typedef float type; };
template <> struct WideOf<Bfloat16> { typedef float type; };
template <class V> struct RealOf { typedef double type; };  // for functions of integers
template <> struct RealOf<Half> { typedef float type; };
template <> struct RealOf<Bfloat16> { typedef float type; };
template <> struct RealOf<float> { typedef float type; };
template <class V> struct TotalOf { typedef V type; };
template <> struct TotalOf<float> { typedef double type; };
template <class V> struct MagnitudeOf { typedef Int type; };
template <> struct MagnitudeOf<Half> { typedef int type; };
template <> struct MagnitudeOf<float> { typedef int type; };

template <class V> __device__ inline V widen(V value) { return value; }
__device__ inline float widen(Half value) { return half_to_float(value.bits); }
__device__ inline float widen(Bfloat16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }

template <class V, class W> struct Narrow {
  static __device__ V of(W value) { return static_cast<V>(value); }
};
template <class W> struct Narrow<Half, W> {
  static __device__ Half of(W value) { return Half{double_to_half(static_cast<double>(value))}; }
};
template <> struct Narrow<Half, float> {
  static __device__ Half of(float value) { return Half{float_to_half(value)}; }
};
template <class W> struct Narrow<Bfloat16, W> {
  static __device__ Bfloat16 of(W value) { return double_to_bfloat16(static_cast<double>(value)); }
};
template <> struct Narrow<Bfloat16, float> {
  static __device__ Bfloat16 of(float value) { return float_to_bfloat16(value); }
};
template <class V, class W> __device__ inline V narrow(W value) { return Narrow<V, W>::of(value); }

template <class V, class W> struct Convert {
  static __device__ V of(W value) { return narrow<V>(widen(value)); }
};
template <class V> struct Convert<V, V> {
  static __device__ V of(V value) { return value; }
};

template <class V> __device__ inline bool is_nan(V value) { return value != value; }
// NaN wins, as in numpy
template <class V> __device__ inline V larger(V a, V b) { return b > a || is_nan(b) ? b : a; }

// A number that changes from step to step: given by value, or where a captured graph finds it (launch.py).
template <class V> struct Number {
  const V* at;
  V value;
  __device__ V get() const { return at ? *at : value; }
};

// ---- random streams -------------------------------------------------------------------------------------------

// Philox 4x32-10: a call's stream is (seed, counter): the seed is the key, the counter the upper half of Philox's
// counter, the lower half counts groups of four draws. So a number depends on nothing else, the size of the launch
// included.
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

// ---- offsets --------------------------------------------------------------------------------------------------

// Offsets of the two elements that give one element of out: axes from the innermost, joined where
// they can be; strides in elements, 0 where an axis is repeated.
struct Broadcast {
  Int ndim, shape[8], a[8], b[8];
};

template <class Index> __device__ void find_offsets(const Broadcast& axes, Index i, Int* a, Int* b) {
  *a = *b = 0;
  for (int axis = 0; axis < axes.ndim - 1; ++axis) {
    const Index size = static_cast<Index>(axes.shape[axis]), rest = i / size;
    *a += (i - rest * size) * axes.a[axis];
    *b += (i - rest * size) * axes.b[axis];
    i = rest;
  }
  *a += i * axes.a[axes.ndim - 1];
  *b += i * axes.b[axes.ndim - 1];
}

// division of 32 bits is several times faster
#define OFFSETS(axes, i, n, a, b) \
  Int a, b;                      \
  n <= 0x7fffffff ? find_offsets(axes, static_cast<unsigned>(i), &a, &b) : find_offsets(axes, i, &a, &b)

// ---- loops and blocks -----------------------------------------------------------------------------------------

#define KERNEL extern "C" __global__ void
#define GRID (static_cast<Int>(gridDim.x) * blockDim.x)
#define EACH(i, n) \
  for (Int i = blockIdx.x * static_cast<Int>(blockDim.x) + threadIdx.x; i < (n); i += GRID)

// The same, four elements of a thread at a time, a grid apart: IN_BATCH names each of them and its number u. Reading
// all four before one is written keeps enough bytes on their way to fill the memory's bandwidth.
#define BATCHES(n) for (Int first = blockIdx.x * static_cast<Int>(blockDim.x) + threadIdx.x; first < (n); first += 4 * GRID)
#define IN_BATCH(i, n)                                      \
  _Pragma("unroll") for (int u = 0; u < 4; ++u)             \
    if (const Int i = first + u * GRID; i < (n))

// The entry of a list that this block works for: each has the number of its first block, ascending.
template <class E> __device__ const E& entry_of_block(const E* entries, Int count) {
  Int low = 0, high = count - 1;
  while (low < high) {
    const Int middle = (low + high + 1) / 2;
    if (entries[middle].first_block <= blockIdx.x) low = middle;
    else high = middle - 1;
  }
  return entries[low];
}

// The elements of a row of n that are this thread's, where a block has a row.
#define EACH_OF_ROW(i, n) for (Int i = threadIdx.x; i < (n); i += blockDim.x)

struct Add {
  template <class V> static __device__ V of(V a, V b) { return a + b; }
};
struct Larger {
  template <class V> static __device__ V of(V a, V b) { return larger(a, b); }
};

// The values of all threads of a warp joined by Op, for every thread.
template <class Op, class V> __device__ V over_warp(V value) {
  for (int distance = 16; distance; distance /= 2) value = Op::of(value, __shfl_xor_sync(0xffffffff, value, distance));
  return value;
}

// The same of a block, which is whole warps.
template <class Op, class V> __device__ V over_block(V value) {
  __shared__ V parts[32];
  value = over_warp<Op>(value);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[0];
  for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) value = Op::of(value, parts[warp]);
  __syncthreads();  // parts may be written again
  return value;
}

// Sum of the values of the threads before this one; `total` is that of all.
template <class V> __device__ V before_in_block(V value, V* total) {
  __shared__ V sums[32];
  const V own = value;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (unsigned distance = 1; distance < 32; distance *= 2) {
    const V other = __shfl_up_sync(0xffffffff, value, distance);
    if (lane >= distance) value += other;
  }
  if (lane == 31) sums[warp] = value;
  __syncthreads();
  V start = 0;
  *total = 0;
  for (unsigned other = 0; other < blockDim.x / 32; ++other) {
    if (other == warp) start = *total;
    *total += sums[other];
  }
  __syncthreads();
  return start + value - own;
}

// True in the last block to call it, which then sees what all blocks wrote; `block_counter` is 0 before and after.
__device__ inline bool is_last_block(unsigned* block_counter) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicInc(block_counter, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  __threadfence();
  return is_last;
}

// Join one value of each block, in their order, by Op, to which 0 is neutral; the last block gets true and the result.
template <class Op, class V> __device__ bool over_grid(V value, V* parts, unsigned* block_counter, V* result) {
  value = over_block<Op>(value);
  if (threadIdx.x == 0) parts[blockIdx.x] = value;
  if (!is_last_block(block_counter)) return false;
  const volatile V* seen = parts;  // not from a cache that is older than other blocks' writes
  V mine = 0;
  for (unsigned i = threadIdx.x; i < gridDim.x; i += blockDim.x) mine = Op::of(mine, V(seen[i]));
  *result = over_block<Op>(mine);
  return true;
}
