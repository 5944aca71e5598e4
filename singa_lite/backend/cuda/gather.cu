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

// A block for each position and group of columns looks through all indices, so every sum has one order.
KERNEL gather_backward(const T* dy, const U* indices, T* dx, Int size, Int count, Int after, Int* faults) {
  __shared__ Int found[256];
  const Int groups = (after + blockDim.x - 1) / blockDim.x, row = blockIdx.x / groups, position = row % size;
  const Int column = blockIdx.x % groups * blockDim.x + threadIdx.x;
  const T* from = dy + row / size * count * after + column;
  Total total = 0;
  for (Int start = 0; start < count; start += blockDim.x) {
    const Int i = start + threadIdx.x;
    const bool is_here = i < count && index_of(indices, i, size, faults) == position;
    Int here;
    const Int place = before_in_block(Int(is_here), &here);
    if (is_here) found[place] = i;
    __syncthreads();
    if (column < after)
      for (Int k = 0; k < here; ++k) total += widen(from[found[k] * after]);
    __syncthreads();
  }
  if (column < after) dx[row * after + column] = narrow<T>(total);
}
