// SPDX-License-Identifier: Apache-2.0
// Sums and maxima over axes, for move.py: every element of out, of type U, reduces `length` elements of x. Long ones are split
// into `splits` pieces, whose results a second kernel joins in their order, so the same call gives the same bits.

struct Axes {
  Int ndim, shape[8], stride[8];
};

__device__ inline Int offset_of(const Axes& axes, Int i) {
  Int offset = 0;
  for (int axis = 0; axis < axes.ndim - 1; ++axis) {
    const Int rest = i / axes.shape[axis];
    offset += (i - rest * axes.shape[axis]) * axes.stride[axis];
    i = rest;
  }
  return offset + i * axes.stride[axes.ndim - 1];
}

// the first of the values to reduce is neutral to a maximum, 0 to a sum
template <class Op> struct Start {
  template <class V, class W> static __device__ V of(W) { return 0; }
};
template <> struct Start<Larger> {
  template <class V, class W> static __device__ V of(W first) { return first; }
};

// Join elements begin, begin + step, ... before end of a row by Op. float32 is added up in runs of at most 64 values, and
// the runs in float64: the error does not grow with the length.
template <class Op, class From>
__device__ Total reduce_strided(const From* row, const Axes& reduced, Int begin, Int end, Int step) {
  typedef typename WideOf<From>::type Wide;
  const Wide first = widen(*row);
  Total total = Start<Op>::template of<Total>(first);
  for (Int start = begin; start < end; start += 64 * step) {
    const Int stop = start + 64 * step < end ? start + 64 * step : end;
    Wide run = Start<Op>::template of<Wide>(first);
    for (Int i = start; i < stop; i += step) run = Op::of(run, Wide(widen(row[offset_of(reduced, i)])));
    total = Op::of(total, Total(run));
  }
  return total;
}

// A block an element of out and piece: for axes whose elements are contiguous.
template <class Op, class From, class To>
__device__ void reduce_rows(const From* x, To* y, Int outs, Int length, Int splits, double divisor, const Axes& kept,
                            const Axes& reduced) {
  const Int out = blockIdx.x % outs, piece = blockIdx.x / outs, span = (length + splits - 1) / splits;
  const Int end = (piece + 1) * span < length ? (piece + 1) * span : length;
  const From* row = x + offset_of(kept, out);
  const Total value = over_block<Op>(reduce_strided<Op>(row, reduced, piece * span + threadIdx.x, end, blockDim.x));
  if (threadIdx.x == 0) y[blockIdx.x] = narrow<To>(static_cast<Total>(value / static_cast<Total>(divisor)));
}

// 32 elements of out a block, side by side in memory, and 8 pieces of their columns.
template <class Op, class From, class To>
__device__ void reduce_columns(const From* x, To* y, Int outs, Int length, Int splits, double divisor, const Axes& kept,
                               const Axes& reduced) {
  __shared__ Total parts[8][32];
  const unsigned lane = threadIdx.x % 32, row = threadIdx.x / 32;
  const Int groups = (outs + 31) / 32, piece = blockIdx.x / groups, span = (length + splits - 1) / splits;
  const Int out = blockIdx.x % groups * 32 + lane, end = (piece + 1) * span < length ? (piece + 1) * span : length;
  if (out < outs) parts[row][lane] = reduce_strided<Op>(x + offset_of(kept, out), reduced, piece * span + row, end, 8);
  __syncthreads();
  if (row == 0 && out < outs) {
    Total value = parts[0][lane];
    for (int other = 1; other < 8; ++other) value = Op::of(value, parts[other][lane]);
    y[piece * outs + out] = narrow<To>(static_cast<Total>(value / static_cast<Total>(divisor)));
  }
}

#define REDUCTION(name, how, Op, From, To)                                                                            \
  KERNEL name(const From* x, To* y, Int outs, Int length, Int splits, double divisor, Axes kept, Axes reduced) {      \
    how<Op>(x, y, outs, length, splits, divisor, kept, reduced);                                                      \
  }
// in one go; in pieces; the pieces joined
REDUCTION(sum_rows, reduce_rows, Add, T, U)
REDUCTION(sum_rows_pieces, reduce_rows, Add, T, Total)
REDUCTION(sum_columns, reduce_columns, Add, T, U)
REDUCTION(sum_columns_pieces, reduce_columns, Add, T, Total)
REDUCTION(sum_joined, reduce_columns, Add, Total, U)
REDUCTION(max_rows, reduce_rows, Larger, T, U)
REDUCTION(max_rows_pieces, reduce_rows, Larger, T, Total)
REDUCTION(max_columns, reduce_columns, Larger, T, U)
REDUCTION(max_columns_pieces, reduce_columns, Larger, T, Total)
REDUCTION(max_joined, reduce_columns, Larger, Total, U)
