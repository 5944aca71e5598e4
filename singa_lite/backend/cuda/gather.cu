// SPDX-License-Identifier: Apache-2.0
// gather and its gradient, for move.py: x is (before, size, after), y (before, count, after), U the type of indices.

// An index, or -1 if it is out of range, which the host is told of.
__device__ inline Int index_of(const U* indices, Int i, Int size, Int* faults) {
  const Int index = static_cast<Int>(widen(indices[i]));
  if (index >= 0 && index < size) return index;
  faults[1] = index;
  faults[2] = size;
  faults[0] = 2;
  return -1;
}

KERNEL gather(const T* x, const U* indices, T* y, Int n, Int size, Int count, Int after, Int* faults) {
  EACH(i, n) {
    const Int row = i / after, index = index_of(indices, row % count, size, faults);
    y[i] = index < 0 ? narrow<T>(A(0)) : x[(row / count * size + index) * after + i % after];
  }
}

enum { kEach = 8 };

// Adds to total, in order, an element of each of `count` rows; several are read before one is added.
__device__ inline Total add_rows(const T* from, const Int* rows, Int count, Int after, Total total) {
  Int k = 0;
  for (; k + kEach <= count; k += kEach) {
    A values[kEach];
    _Pragma("unroll") for (int e = 0; e < kEach; ++e) values[e] = widen(from[rows[k + e] * after]);
    _Pragma("unroll") for (int e = 0; e < kEach; ++e) total += values[e];
  }
  for (; k < count; ++k) total += widen(from[rows[k] * after]);
  return total;
}

// A block for each position and group of columns looks through all indices, kEach of a thread at a time, so every sum
// has one order.
KERNEL gather_backward(const T* dy, const U* indices, T* dx, Int size, Int count, Int after, Int* faults) {
  __shared__ Int found[256 * kEach];
  const Int groups = (after + blockDim.x - 1) / blockDim.x, row = blockIdx.x / groups, position = row % size;
  const Int column = blockIdx.x % groups * blockDim.x + threadIdx.x;
  const T* from = dy + row / size * count * after + column;
  Total total = 0;
  for (Int start = 0; start < count; start += blockDim.x * kEach) {
    const Int first = start + threadIdx.x * kEach;
    unsigned is_here[kEach], num_here = 0, all;
    _Pragma("unroll") for (int e = 0; e < kEach; ++e)
      num_here += is_here[e] = first + e < count && index_of(indices, first + e, size, faults) == position;
    unsigned place = before_in_block(num_here, &all);
    _Pragma("unroll") for (int e = 0; e < kEach; ++e) if (is_here[e]) found[place++] = first + e;
    __syncthreads();
    if (column < after) total = add_rows(from, found, all, after, total);
    __syncthreads();
  }
  if (column < after) dx[row * after + column] = narrow<T>(total);
}
