// SPDX-License-Identifier: Apache-2.0
// Kernels of move.py from arrays of T to arrays of U.

KERNEL cast(const T* from, U* to, Int n) {
  BATCHES(n) {
    U values[4];
    IN_BATCH(i, n) values[u] = Convert<U, T>::of(from[i]);
    IN_BATCH(i, n) to[i] = values[u];
  }
}

// Transposes every (rows, columns) matrix, a block a tile: both sides are touched in whole lines.
KERNEL flip(const T* from, U* to, Int rows, Int columns) {
  constexpr int kTile = 32;
  __shared__ T tile[kTile][kTile + 1];
  const Int across = (columns + kTile - 1) / kTile, tiles = (rows + kTile - 1) / kTile * across;
  const Int matrix = blockIdx.x / tiles * rows * columns;
  const Int top = blockIdx.x % tiles / across * kTile, left = blockIdx.x % across * kTile;
  const int lane = threadIdx.x % kTile, first = threadIdx.x / kTile, step = blockDim.x / kTile;
  for (int i = first; i < kTile; i += step)
    if (top + i < rows && left + lane < columns) tile[i][lane] = from[matrix + (top + i) * columns + left + lane];
  __syncthreads();
  for (int i = first; i < kTile; i += step)
    if (left + i < columns && top + lane < rows)
      to[matrix + (left + i) * rows + top + lane] = Convert<U, T>::of(tile[lane][i]);
}

// a relation as a sum of: 1 if it holds for a < b, 2 for a == b, 4 for a > b
KERNEL compare(const T* from_a, const T* from_b, U* to, Int n, Broadcast axes, Int relation) {
  EACH(i, n) {
    OFFSETS(axes, i, n, offset_a, offset_b);
    const A a = widen(from_a[offset_a]), b = widen(from_b[offset_b]);
    const Int found = a < b ? 1 : a == b ? 2 : a > b ? 4 : 0;
    to[i] = narrow<U>(static_cast<float>((found & relation) != 0));
  }
}

// ---- many arrays as columns of one ------------------------------------------------------------------------------

const Int kPartElements = 2048;  // of one block

// A (rows, length) array that is columns start .. start + length of a (rows, width) one.
struct Part {
  Bits address;
  Int length, start, first_block;
};
struct Parts {
  Int count, rows, width;
  Part parts[120];  // arguments of a kernel end at 4 KB
};

template <bool kIsJoin> __device__ void move_parts(const T* joined_from, U* joined_to, const Parts& parts) {
  const Part part = entry_of_block(parts.parts, parts.count);
  const Int begin = (blockIdx.x - part.first_block) * kPartElements, n = parts.rows * part.length;
  for (Int i = begin + threadIdx.x; i < begin + kPartElements && i < n; i += blockDim.x) {
    const Int row = parts.rows == 1 ? 0 : i / part.length, column = i - row * part.length;
    const Int offset = row * parts.width + part.start + column;
    if (kIsJoin) joined_to[offset] = Convert<U, T>::of(reinterpret_cast<const T*>(part.address)[i]);
    else reinterpret_cast<U*>(part.address)[i] = Convert<U, T>::of(joined_from[offset]);
  }
}

KERNEL join(U* joined, Parts parts) { move_parts<true>(nullptr, joined, parts); }
KERNEL split(const T* joined, Parts parts) { move_parts<false>(joined, nullptr, parts); }
