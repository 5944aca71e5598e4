// SPDX-License-Identifier: Apache-2.0
// Products of two narrow matrices, for message.py; sums in a fixed order, so all ranks with a GPU have the same bits.

// One block, as each row waits for those before it. A thread reads and writes the same columns of all rows.
KERNEL orthonormal_rows(const T* p, T* out, Int rows, Int n, double dropped) {
  for (Int number = 0; number < rows; ++number) {
    T* row = out + number * n;
    A before = 0, after = 0, factors[32];
    EACH_OF_ROW(i, n) {
      row[i] = p[number * n + i];
      before += widen(row[i]) * widen(row[i]);
    }
    before = over_block<Add>(before);
    for (int pass = 0; pass < (number ? 2 : 0); ++pass) {
      for (Int k = 0; k < number; ++k) {
        A sum = 0;
        EACH_OF_ROW(i, n) sum += widen(out[k * n + i]) * widen(row[i]);
        factors[k] = over_block<Add>(sum);
      }
      EACH_OF_ROW(i, n) {
        A total = 0;
        for (Int k = 0; k < number; ++k) total += factors[k] * widen(out[k * n + i]);
        row[i] = narrow<T>(A(widen(row[i]) - total));
      }
    }
    EACH_OF_ROW(i, n) after += widen(row[i]) * widen(row[i]);
    after = over_block<Add>(after);
    // NaN stays
    EACH_OF_ROW(i, n) row[i] = narrow<T>(after > A(dropped) * before ? A(widen(row[i]) / sqrt(after)) : A(widen(row[i]) * A(0)));
  }
}

// out holds what a row becomes whose length is 0 or not finite
KERNEL unit_rows(const T* q, T* out, Int n) {
  q += blockIdx.x * n;
  out += blockIdx.x * n;
  A square = 0;
  EACH_OF_ROW(i, n) square += widen(q[i]) * widen(q[i]);
  square = over_block<Add>(square);
  if (square > A(0) && square - square == A(0))
    EACH_OF_ROW(i, n) out[i] = narrow<T>(A(widen(q[i]) / sqrt(square)));
}

__device__ inline A element_of(const T* p, const T* q, Int i, Int rank, Int rows, Int columns) {
  A sum = widen(p[i / columns]) * widen(q[i % columns]);
  for (Int k = 1; k < rank; ++k) sum += widen(p[k * rows + i / columns]) * widen(q[k * columns + i % columns]);
  return sum;
}

KERNEL low_rank_sum(const T* p, const T* q, T* out, Int rank, Int rows, Int columns) {
  EACH(i, rows * columns) out[i] = narrow<T>(element_of(p, q, i, rank, rows, columns));
}

KERNEL low_rank_rest(const T* m, const T* p, const T* q, T* out, Int rank, Int rows, Int columns) {
  EACH(i, rows * columns) {
    const A rest = widen(m[i]) - element_of(p, q, i, rank, rows, columns);
    out[i] = narrow<T>(rest - rest == A(0) ? rest : A(0));
  }
}
