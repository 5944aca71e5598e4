// SPDX-License-Identifier: Apache-2.0
// Sums and maxima over axes, for move.py: every element of out reduces `length` elements of x. Long ones are cut
// into `splits` pieces, whose results a second kernel joins in their order, so the same call gives the same bits.

struct Axes {
  Int ndim, shape[8], stride[8];
};

__device__ inline Int place_of(const Axes& axes, Int i) {
  Int place = 0;
  for (int axis = 0; axis < axes.ndim - 1; ++axis) {
    const Int rest = i / axes.shape[axis];
    place += (i - rest * axes.shape[axis]) * axes.stride[axis];
    i = rest;
  }
  return place + i * axes.stride[axes.ndim - 1];
}

// the first of the values to reduce is neutral to a maximum, 0 to a sum
template <class Op> struct Start {
  template <class V> static __device__ A of(const V*) { return 0; }
};
template <> struct Start<Larger> {
  template <class V> static __device__ A of(const V* first) { return widen(*first); }
};

// A block an element of out and piece: for axes whose elements are neighbours.
template <class Op, class From, class To>
__device__ void reduce_rows(const From* x, To* y, Int outs, Int length, Int splits, double divisor, const Axes& kept,
                            const Axes& reduced) {
  const Int out = blockIdx.x % outs, piece = blockIdx.x / outs, span = (length + splits - 1) / splits;
  const Int end = (piece + 1) * span < length ? (piece + 1) * span : length;
  const From* row = x + place_of(kept, out);
  A value = Start<Op>::of(row);
  for (Int i = piece * span + threadIdx.x; i < end; i += blockDim.x) value = Op::of(value, A(widen(row[place_of(reduced, i)])));
  value = over_block<Op>(value);
  if (threadIdx.x == 0) y[blockIdx.x] = narrow<To>(static_cast<A>(value / static_cast<A>(divisor)));
}

// 32 elements of out a block, side by side in memory, and 8 pieces of their columns.
template <class Op, class From, class To>
__device__ void reduce_columns(const From* x, To* y, Int outs, Int length, Int splits, double divisor, const Axes& kept,
                               const Axes& reduced) {
  __shared__ A parts[8][32];
  const unsigned lane = threadIdx.x % 32, row = threadIdx.x / 32;
  const Int groups = (outs + 31) / 32, piece = blockIdx.x / groups, span = (length + splits - 1) / splits;
  const Int out = blockIdx.x % groups * 32 + lane, end = (piece + 1) * span < length ? (piece + 1) * span : length;
  if (out < outs) {
    const From* column = x + place_of(kept, out);
    A value = Start<Op>::of(column);
    for (Int i = piece * span + row; i < end; i += 8) value = Op::of(value, A(widen(column[place_of(reduced, i)])));
    parts[row][lane] = value;
  }
  __syncthreads();
  if (row == 0 && out < outs) {
    A value = parts[0][lane];
    for (int other = 1; other < 8; ++other) value = Op::of(value, parts[other][lane]);
    y[piece * outs + out] = narrow<To>(static_cast<A>(value / static_cast<A>(divisor)));
  }
}

#define REDUCTION(name, how, Op, From, To)                                                                            \
  KERNEL name(const From* x, To* y, Int outs, Int length, Int splits, double divisor, Axes kept, Axes reduced) {      \
    how<Op>(x, y, outs, length, splits, divisor, kept, reduced);                                                      \
  }
// in one go; in pieces; the pieces joined
REDUCTION(sum_rows, reduce_rows, Add, T, T)
REDUCTION(sum_rows_pieces, reduce_rows, Add, T, A)
REDUCTION(sum_columns, reduce_columns, Add, T, T)
REDUCTION(sum_columns_pieces, reduce_columns, Add, T, A)
REDUCTION(sum_joined, reduce_columns, Add, A, T)
REDUCTION(max_rows, reduce_rows, Larger, T, T)
REDUCTION(max_rows_pieces, reduce_rows, Larger, T, A)
REDUCTION(max_columns, reduce_columns, Larger, T, T)
REDUCTION(max_columns_pieces, reduce_columns, Larger, T, A)
REDUCTION(max_joined, reduce_columns, Larger, A, T)
