// SPDX-License-Identifier: Apache-2.0
// Softmax and the losses of loss.py; U is the type of labels. One block a row.

// ---- softmax of rows of n elements, `step` apart ----------------------------------------------------------------

__device__ inline Int first_of_row(Int n, Int step) { return blockIdx.x / step * n * step + blockIdx.x % step; }

KERNEL softmax(const T* x, T* y, Int n, Int step) {
  x += first_of_row(n, step);
  y += first_of_row(n, step);
  A largest = widen(x[0]), total = 0;
  EACH_OF_ROW(i, n) largest = larger(largest, A(widen(x[i * step])));
  largest = over_block<Larger>(largest);
  EACH_OF_ROW(i, n) total += exp(widen(x[i * step]) - largest);
  total = over_block<Add>(total);
  EACH_OF_ROW(i, n) y[i * step] = narrow<T>(A(exp(widen(x[i * step]) - largest) / total));
}

KERNEL softmax_backward(const T* dy, const T* y, T* dx, Int n, Int step) {
  const Int first = first_of_row(n, step);
  A total = 0;
  EACH_OF_ROW(i, n) total += widen(dy[first + i * step]) * widen(y[first + i * step]);
  total = over_block<Add>(total);
  EACH_OF_ROW(i, n) {
    const Int at = first + i * step;
    dx[at] = narrow<T>(A(widen(y[at]) * (widen(dy[at]) - total)));
  }
}

// ---- attention: softmax of rows of n scores, which are multiplied by scale --------------------------------------

// the threads that have a row: a block, or a warp, which waits for no others
struct Block {
  Int row = blockIdx.x, first = threadIdx.x, step = blockDim.x;
  template <class Op> __device__ A join(A value) const { return over_block<Op>(value); }
};
struct Warp {
  Int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, first = threadIdx.x % 32, step = 32;
  template <class Op> __device__ A join(A value) const { return over_warp<Op>(value); }
};

// A row of scores, of which a thread of the team has every so many; the first kHeld of these are read once, and held.
enum { kHeld = 16 };

template <class Team> struct Scores {
  Team team;
  const T* row;
  Int seen;
  A scale, largest, total, held[kHeld];  // of probabilities the numerators, see probability()

  // queries: 0, or how many rows there are of each causal sample, the first with the number start; each sees elements
  // up to its own number
  __device__ Scores(const T* scores, Int n, double factor, Int queries, Int start)
      : row(scores + team.row * n), seen(n), scale(factor), largest(widen(row[0])), total(0) {
    if (queries && start + team.row % queries + 1 < n) seen = start + team.row % queries + 1;
    hold(row, seen, held);
    each(seen, [&](Int i, Int e) { largest = larger(largest, e < kHeld ? held[e] : A(widen(row[i]))); });
    largest = team.template join<Larger>(largest);
    each(seen, [&](Int i, Int e) {
      const A power = exp(((e < kHeld ? held[e] : A(widen(row[i]))) - largest) * scale);
      if (e < kHeld) held[e] = power;
      total += power;
    });
    total = team.template join<Add>(total);
  }
  // Calls use(i, e) for this thread's elements among the first n: held[e] is one's place, if e is below kHeld.
  template <class Use> __device__ void each(Int n, const Use& use) const {
    Int i = team.first;
    _Pragma("unroll") for (int e = 0; e < kHeld; ++e, i += team.step) if (i < n) use(i, Int(e));
    for (; i < n; i += team.step) use(i, Int(kHeld));
  }
  // Reads the first kHeld of this thread's elements, all before one is used; one that is not among the first n is
  // undefined.
  __device__ void hold(const T* from, Int n, A* values) const {
    Int i = team.first;
    _Pragma("unroll") for (int e = 0; e < kHeld; ++e, i += team.step) values[e] = widen(from[i < n ? i : 0]);
  }
  __device__ A probability(Int i, Int e) const {
    return i >= seen ? A(0) : (e < kHeld ? held[e] : exp((widen(row[i]) - largest) * scale)) / total;
  }
};

template <class Team>
__device__ void probabilities(const T* scores, T* y, Int rows, Int n, double scale, Int queries, Int start) {
  const Team team;
  if (team.row >= rows) return;
  const Scores<Team> row(scores, n, scale, queries, start);
  y += team.row * n;
  row.each(n, [&](Int i, Int e) { y[i] = narrow<T>(row.probability(i, e)); });
}

template <class Team>
__device__ void gradients(const T* scores, const T* dy, T* y, T* dx, Int rows, Int n, double scale, Int queries,
                          Int start) {
  const Team team;
  if (team.row >= rows) return;
  const Scores<Team> row(scores, n, scale, queries, start);
  dy += team.row * n;
  y += team.row * n;
  dx += team.row * n;
  A total = 0, held[kHeld];
  row.hold(dy, row.seen, held);
  row.each(n, [&](Int i, Int e) {
    const A probability = row.probability(i, e);
    y[i] = narrow<T>(probability);
    if (i < row.seen) total += probability * (e < kHeld ? held[e] : A(widen(dy[i])));
  });
  total = team.template join<Add>(total);
  row.each(n, [&](Int i, Int e) {
    const A grad = i >= row.seen ? A(0) : e < kHeld ? held[e] : A(widen(dy[i]));
    dx[i] = narrow<T>(i >= row.seen ? A(0) : A(A(scale) * row.probability(i, e) * (grad - total)));
  });
}

KERNEL attention(const T* scores, T* y, Int rows, Int n, double scale, Int queries, Int start) {
  probabilities<Block>(scores, y, rows, n, scale, queries, start);
}
KERNEL attention_of_warps(const T* scores, T* y, Int rows, Int n, double scale, Int queries, Int start) {
  probabilities<Warp>(scores, y, rows, n, scale, queries, start);
}
// y: the probabilities, dy: the gradient of them, dx: that of the products of queries and keys
KERNEL attention_backward(const T* scores, const T* dy, T* y, T* dx, Int rows, Int n, double scale, Int queries,
                          Int start) {
  gradients<Block>(scores, dy, y, dx, rows, n, scale, queries, start);
}
KERNEL attention_backward_of_warps(const T* scores, const T* dy, T* y, T* dx, Int rows, Int n, double scale,
                                   Int queries, Int start) {
  gradients<Warp>(scores, dy, y, dx, rows, n, scale, queries, start);
}

// ---- labels -----------------------------------------------------------------------------------------------------

// The labels of a row. faults: what kernels found wrong, in memory of the host: {whether, id, number of classes}.
struct Labels {
  const U* labels;
  bool are_rows;
  A total;  // of this row's labels

  __device__ Labels(const U* all, Int is_rows, Int classes, Int* faults) : labels(all), are_rows(is_rows), total(1) {
    if (are_rows) {
      labels += blockIdx.x * classes;
      A mine = 0;
      EACH_OF_ROW(i, classes) mine += static_cast<A>(widen(labels[i]));
      total = over_block<Add>(mine);
      return;
    }
    labels += blockIdx.x;
    const Int id = static_cast<Int>(widen(*labels));
    if (threadIdx.x == 0 && (id < 0 || id >= classes)) {
      faults[1] = id;
      faults[2] = classes;
      faults[0] = 1;
    }
  }
  // rows are divided by their sum, a row of zeros is left
  __device__ A operator[](Int i) const {
    if (!are_rows) return A(static_cast<Int>(widen(*labels)) == i);
    return static_cast<A>(widen(labels[i])) / (total == 0 ? A(1) : total);
  }
};

KERNEL softmax_cross_entropy(const T* x, const U* all_labels, Int is_rows, Int rows, Int n, Int* faults, T* loss, T* y,
                             A* parts, unsigned* block_counter) {
  const Labels labels(all_labels, is_rows, n, faults);
  x += blockIdx.x * n;
  y += blockIdx.x * n;
  A largest = widen(x[0]), total = 0, cost = 0;
  EACH_OF_ROW(i, n) largest = larger(largest, A(widen(x[i])));
  largest = over_block<Larger>(largest);
  EACH_OF_ROW(i, n) total += exp(widen(x[i]) - largest);
  total = over_block<Add>(total);
  EACH_OF_ROW(i, n) {
    const A shifted = widen(x[i]) - largest, label = labels[i];
    y[i] = narrow<T>(A(exp(shifted) / total));
    if (label != 0) cost -= label * (shifted - log(total));  // a logit of -inf must not make 0 * inf
  }
  if (over_grid<Add>(cost, parts, block_counter, &total) && threadIdx.x == 0) *loss = narrow<T>(A(total / A(rows)));
}

KERNEL softmax_cross_entropy_backward(const T* dy, const T* p, const U* all_labels, Int is_rows, Int rows, Int n,
                                      Int* faults, T* dx) {
  const Labels labels(all_labels, is_rows, n, faults);
  const A scale = widen(*dy) / A(rows), share = labels.total == 0 ? A(0) : A(1);
  EACH_OF_ROW(i, n) {
    const Int at = blockIdx.x * n + i;
    dx[at] = narrow<T>(A((widen(p[at]) * share - labels[i]) * scale));
  }
}

KERNEL cross_entropy(const T* p, const U* all_labels, Int is_rows, Int rows, Int n, Int* faults, double smallest, T* loss,
                     A* parts, unsigned* block_counter) {
  const Labels labels(all_labels, is_rows, n, faults);
  A cost = 0, total;
  EACH_OF_ROW(i, n) cost -= labels[i] * log(larger(A(widen(p[blockIdx.x * n + i])), A(smallest)));
  if (over_grid<Add>(cost, parts, block_counter, &total) && threadIdx.x == 0) *loss = narrow<T>(A(total / A(rows)));
}

KERNEL cross_entropy_backward(const T* dy, const T* p, const U* all_labels, Int is_rows, Int rows, Int n, Int* faults,
                              double smallest, T* dx) {
  const Labels labels(all_labels, is_rows, n, faults);
  const A scale = -widen(*dy) / A(rows);
  EACH_OF_ROW(i, n) {
    const Int at = blockIdx.x * n + i;
    dx[at] = narrow<T>(A(labels[i] / larger(A(widen(p[at])), A(smallest)) * scale));
  }
}

// ---- mean squared error -----------------------------------------------------------------------------------------

KERNEL mse_loss(const T* x, const T* t, T* loss, Int n, A* parts, unsigned* block_counter) {
  A cost = 0, total;
  EACH(i, n) {
    const A error = widen(x[i]) - widen(t[i]);
    cost += error * error;
  }
  if (over_grid<Add>(cost, parts, block_counter, &total) && threadIdx.x == 0) *loss = narrow<T>(A(total / A(n)));
}

KERNEL mse_loss_backward(const T* dy, const T* x, const T* t, T* dx, Int n) {
  const A scale = widen(*dy) * (A(2) / A(n));
  EACH(i, n) dx[i] = narrow<T>(A((widen(x[i]) - widen(t[i])) * scale));
}
