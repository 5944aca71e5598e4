// SPDX-License-Identifier: Apache-2.0
// Batch normalization of images with their channels last, for batch_norm.py: x is (rows, channels), where a row is a
// pixel. A thread has the channels of one load of 16 bytes, and every so-many-th row of them; the threads side by side
// read neighbouring channels. What the rows of a thread add up to in float32 is joined in float64, always in the same
// order, so a call gives the same bits every time.

const int kPack = 16 / sizeof(T);
typedef Pack<T, kPack> Load;

// The part of a thread: `wide` threads, a power of two up to 32, are side by side, in `groups` blocks for all channels;
// the other blocks take other rows.
struct Part {
  Int channels, column, row, step;
  __device__ Part(Int channels, Int wide) : channels(channels) {
    const Int groups = (channels / kPack + wide - 1) / wide, chunk = blockIdx.x / groups;
    const Int tall = blockDim.x / wide;
    column = (blockIdx.x % groups * wide + threadIdx.x % wide) * kPack;
    row = chunk * tall + threadIdx.x / wide;
    step = gridDim.x / groups * tall;
  }
  __device__ bool has_channels() const { return column < channels; }
};

// Four rows at once, so that enough bytes are on their way: IN_ROWS names each and its number u.
#define ROW_BATCHES(part, rows) for (Int first = part.row; first < (rows); first += 4 * part.step)
#define IN_ROWS(r, part, rows)                  \
  _Pragma("unroll") for (int u = 0; u < 4; ++u) \
    if (const Int r = first + u * part.step; r < (rows))
#define EACH_CHANNEL(k) _Pragma("unroll") for (int k = 0; k < kPack; ++k)

__device__ inline Load load(const T* x, const Part& part, Int row) {
  return *reinterpret_cast<const Load*>(x + row * part.channels + part.column);
}
__device__ inline void store(const Load& pack, T* x, const Part& part, Int row) {
  *reinterpret_cast<Load*>(x + row * part.channels + part.column) = pack;
}

// Adds what the threads of a block have for the same channel, and writes it to sums: (blocks that share channels, 2,
// channels).
__device__ inline void add_up(const double values[2][kPack], const Part& part, Int wide, double* sums) {
  __shared__ double parts[32][32];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const Int chunk = part.row / (blockDim.x / wide);
  for (int which = 0; which < 2; ++which)
    for (int k = 0; k < kPack; ++k) {
      double value = values[which][k];
      for (int distance = int(wide); distance < 32; distance *= 2) value += __shfl_xor_sync(0xffffffff, value, distance);
      parts[warp][threadIdx.x % 32] = value;
      __syncthreads();
      if (threadIdx.x < wide && part.has_channels()) {
        for (int other = 1; other < warps; ++other) value += parts[other][threadIdx.x];
        sums[(2 * chunk + which) * part.channels + part.column + k] = value;
      }
      __syncthreads();
    }
}

// Sums of x and of its squares. A thread adds up distances from its first value, or the squares of a channel whose mean
// is far from 0 would hide its variance: 1 / standard deviation is right to 1e-6 for means up to 1e5 of these.
KERNEL batch_norm_sums(const T* x, double* sums, Int rows, Int channels, Int wide) {
  const Part part(channels, wide);
  double values[2][kPack] = {};
  if (part.has_channels() && part.row < rows) {
    A shift[kPack], sum[kPack] = {}, squares[kPack] = {};
    const Load start = load(x, part, part.row);
    EACH_CHANNEL(k) shift[k] = widen(start.values[k]);
    Int count = 0;
    ROW_BATCHES(part, rows) {
      Load packs[4];
      IN_ROWS(r, part, rows) packs[u] = load(x, part, r);
      IN_ROWS(r, part, rows) {
        ++count;
        EACH_CHANNEL(k) {
          const A distance = widen(packs[u].values[k]) - shift[k];
          sum[k] += distance;
          squares[k] += distance * distance;
        }
      }
    }
    EACH_CHANNEL(k) {
      const double origin = shift[k], of_distances = sum[k];
      values[0][k] = of_distances + origin * double(count);
      values[1][k] = squares[k] + origin * (2 * of_distances + origin * double(count));
    }
  }
  add_up(values, part, wide, sums);
}

// A thread's channels of a norm: y = (x - mean) scale + bias, where scale has 1 / standard deviation in it. Without a
// bias that is 0.
struct Norm {
  A means[kPack], scales[kPack], biases[kPack];
  __device__ Norm(const Part& part, const A* scale, const A* bias, const A* mean, const A* inverse_std) {
    EACH_CHANNEL(k) {
      const Int c = part.column + k;
      means[k] = mean[c];
      scales[k] = inverse_std[c] * scale[c];
      biases[k] = bias ? bias[c] : 0;
    }
  }
  __device__ A of(A distance, int k) const { return distance * scales[k] + biases[k]; }
};

// What passes the ReLU behind a norm, where there is one: the gradient of y, if that is above 0.
__device__ inline A passed(bool has_relu, A grad, A y) { return has_relu && !(y > 0) ? A(0) : grad; }

// Sums of dy and of dy (x - mean); with `bias`, where the ReLU behind the norm let y pass.
KERNEL batch_norm_gradient_sums(const T* dy, const T* x, const A* scale, const A* bias, const A* mean,
                                const A* inverse_std, double* sums, Int rows, Int channels, Int wide) {
  const Part part(channels, wide);
  double values[2][kPack] = {};
  if (part.has_channels()) {
    const Norm norm(part, scale, bias, mean, inverse_std);
    A sum[kPack] = {}, products[kPack] = {};
    ROW_BATCHES(part, rows) {
      Load grads[4], packs[4];
      IN_ROWS(r, part, rows) grads[u] = load(dy, part, r);
      IN_ROWS(r, part, rows) packs[u] = load(x, part, r);
      IN_ROWS(r, part, rows) EACH_CHANNEL(k) {
        const A distance = widen(packs[u].values[k]) - norm.means[k];
        const A grad = passed(bias, widen(grads[u].values[k]), norm.of(distance, k));
        sum[k] += grad;
        products[k] += grad * distance;
      }
    }
    EACH_CHANNEL(k) {
      values[0][k] = sum[k];
      values[1][k] = products[k];
    }
  }
  add_up(values, part, wide, sums);
}

// The two sums of channel c, of all `chunks`; a block has 8 channels, for each of them 32 threads.
__device__ inline bool sums_of_channel(const double* sums, Int channels, Int chunks, Int* c, double found[2]) {
  __shared__ double parts[2][32][8];
  const int column = threadIdx.x % 8, row = threadIdx.x / 8;
  *c = blockIdx.x * Int(8) + column;
  double mine[2] = {};
  if (*c < channels) {
    _Pragma("unroll 4") for (Int chunk = row; chunk < chunks; chunk += 32)
      for (int which = 0; which < 2; ++which) mine[which] += sums[(2 * chunk + which) * channels + *c];
  }
  for (int which = 0; which < 2; ++which) parts[which][row][column] = mine[which];
  __syncthreads();
  for (int which = 0; which < 2; ++which) {
    found[which] = 0;
    for (int other = 0; other < 32; ++other) found[which] += parts[which][other][column];
  }
  return row == 0 && *c < channels;
}

KERNEL batch_norm_statistics(const double* sums, A* mean, A* inverse_std, A* running_mean, A* running_var, Int rows,
                             Int channels, Int chunks, double momentum, double eps) {
  Int c;
  double found[2];
  if (!sums_of_channel(sums, channels, chunks, &c, found)) return;
  const double average = found[0] / rows, difference = found[1] / rows - average * average;
  const double variance = difference < 0 ? 0 : difference, unbiased = variance * (rows / double(rows > 1 ? rows - 1 : 1));
  mean[c] = A(average);
  inverse_std[c] = A(1 / sqrt(variance + eps));
  running_mean[c] = A((1 - momentum) * running_mean[c] + momentum * average);
  running_var[c] = A((1 - momentum) * running_var[c] + momentum * unbiased);
}

KERNEL batch_norm_parameter_gradients(const double* sums, const A* inverse_std, A* dscale, A* dbias, Int channels,
                                      Int chunks) {
  Int c;
  double found[2];
  if (!sums_of_channel(sums, channels, chunks, &c, found)) return;
  dbias[c] = A(found[0]);
  dscale[c] = A(found[1] * inverse_std[c]);
}

// y = (x - mean) inverse_std scale + bias + residual, if there is one, and the ReLU of that if `relu`.
KERNEL batch_norm_apply(const T* x, const A* scale, const A* bias, const A* mean, const A* inverse_std,
                        const T* residual, T* y, Int rows, Int channels, Int wide, Int relu) {
  const Part part(channels, wide);
  if (!part.has_channels()) return;
  const Norm norm(part, scale, bias, mean, inverse_std);
  ROW_BATCHES(part, rows) {
    Load packs[4], others[4];
    IN_ROWS(r, part, rows) packs[u] = load(x, part, r);
    if (residual) IN_ROWS(r, part, rows) others[u] = load(residual, part, r);
    IN_ROWS(r, part, rows) {
      EACH_CHANNEL(k) {
        A value = norm.of(widen(packs[u].values[k]) - norm.means[k], k);
        if (residual) value += widen(others[u].values[k]);
        packs[u].values[k] = narrow<T>(relu ? larger(A(0), value) : value);
      }
      store(packs[u], y, part, r);
    }
  }
}

// dx = scale inverse_std (dy - (dbias + (x - mean) inverse_std dscale) / rows), dy as in batch_norm_gradient_sums.
KERNEL batch_norm_backward(const T* dy, const T* x, const A* scale, const A* bias, const A* mean,
                           const A* inverse_std, const A* dscale, const A* dbias, T* dx, Int rows, Int channels,
                           Int wide) {
  const Part part(channels, wide);
  if (!part.has_channels()) return;
  const Norm norm(part, scale, bias, mean, inverse_std);
  A product_means[kPack], grad_means[kPack];
  EACH_CHANNEL(k) {
    const Int c = part.column + k;
    product_means[k] = A(inverse_std[c] * dscale[c] / A(rows));
    grad_means[k] = dbias[c] / A(rows);
  }
  ROW_BATCHES(part, rows) {
    Load grads[4], packs[4];
    IN_ROWS(r, part, rows) grads[u] = load(dy, part, r);
    IN_ROWS(r, part, rows) packs[u] = load(x, part, r);
    IN_ROWS(r, part, rows) {
      EACH_CHANNEL(k) {
        const A distance = widen(packs[u].values[k]) - norm.means[k];
        const A grad = passed(bias, widen(grads[u].values[k]), norm.of(distance, k));
        packs[u].values[k] = narrow<T>(A(norm.scales[k] * (grad - grad_means[k] - distance * product_means[k])));
      }
      store(packs[u], dx, part, r);
    }
  }
}
