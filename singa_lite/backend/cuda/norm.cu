// SPDX-License-Identifier: Apache-2.0
// Batch normalisation for norm.py. x is (N, channels, area); a channel has count = N * area elements.
//
// A channel that one block can take is done in one kernel, which reads it a second time from the cache. A longer one
// is cut into pieces of `span` elements, a block each: moments of every piece, the pieces joined in their order, then
// the result. Variances are sums of squared distances from the piece's own mean, so a large mean costs no digits.

// A part of a channel, its elements numbered through batch and area. Each thread takes every blockDim.x-th and steps
// from one to the next without dividing.
struct Part {
  Int channels, area, channel, first, end;

  __device__ A length() const { return A(end - first); }
};

struct Walk {
  Int number, end, at, step_at, skip;
  int place, step_place, area;

  __device__ explicit Walk(const Part& part)
      : number(part.first + threadIdx.x), end(part.end), skip((part.channels - 1) * part.area), area(int(part.area)) {
    const Int image = number / part.area, images = Int(blockDim.x) / part.area;
    place = int(number - image * part.area);
    step_place = int(blockDim.x - images * part.area);
    at = (image * part.channels + part.channel) * part.area + place;
    step_at = images * part.channels * part.area + step_place;
  }
  __device__ void next() {
    number += blockDim.x;
    place += step_place;
    at += step_at;
    if (place >= area) {
      place -= area;
      at += skip;
    }
  }
};

#define EACH_OF(walk, part) _Pragma("unroll 4") for (Walk walk(part); walk.number < walk.end; walk.next())

// blocks of a grid that has ceil(count / span) pieces of every channel
__device__ inline Part piece_of_block(Int channels, Int area, Int count, Int span) {
  const Int pieces = (count + span - 1) / span, first = blockIdx.x % pieces * span;
  return Part{channels, area, blockIdx.x / pieces, first, first + span < count ? first + span : count};
}

struct Pair {
  A a, b;
};

// ---- forward ----------------------------------------------------------------------------------------------------

// Mean and sum of squared distances from it.
__device__ inline Pair moments(const T* __restrict__ x, const Part& part) {
  A total = 0, squares = 0;
  EACH_OF(walk, part) total += widen(x[walk.at]);
  const A mean = over_block<Add>(total) / part.length();
  EACH_OF(walk, part) {
    const A distance = widen(x[walk.at]) - mean;
    squares += distance * distance;
  }
  return Pair{mean, over_block<Add>(squares)};
}

// What one thread writes once the moments of a channel are known; returns {mean, inverse_std * scale}.
__device__ inline Pair finish(Pair of, Int c, Int count, const T* scale, T* mean, T* inverse_std, T* running_mean,
                              T* running_var, double momentum, double eps, bool is_writer) {
  const A var = of.b / A(count), inverse = A(1) / sqrt(A(var + A(eps))), share = A(momentum);
  if (is_writer) {
    const A unbiased = var * (A(count) / A(count > 1 ? count - 1 : 1));
    mean[c] = narrow<T>(of.a);
    inverse_std[c] = narrow<T>(inverse);
    running_mean[c] = narrow<T>(A((1 - share) * widen(running_mean[c]) + share * of.a));
    running_var[c] = narrow<T>(A((1 - share) * widen(running_var[c]) + share * unbiased));
  }
  return Pair{of.a, A(inverse * widen(scale[c]))};
}

// y = (x - form.a) * form.b + bias
__device__ inline void normalise(const T* __restrict__ x, Pair form, const T* bias, T* __restrict__ y, const Part& part) {
  const A shift = widen(bias[part.channel]);
  EACH_OF(walk, part) y[walk.at] = narrow<T>(A((widen(x[walk.at]) - form.a) * form.b + shift));
}

KERNEL __launch_bounds__(1024) batchnorm_2d_train(const T* x, const T* scale, const T* bias, T* y, T* mean, T* inverse_std,
                                                  T* running_mean, T* running_var, Int channels, Int area, Int count,
                                                  double momentum, double eps) {
  const Part part{channels, area, blockIdx.x, 0, count};
  const Pair form = finish(moments(x, part), part.channel, count, scale, mean, inverse_std, running_mean, running_var,
                           momentum, eps, threadIdx.x == 0);
  normalise(x, form, bias, y, part);
}

KERNEL batchnorm_2d_moments(const T* x, Pair* pieces, Int channels, Int area, Int count, Int span) {
  const Pair found = moments(x, piece_of_block(channels, area, count, span));
  if (threadIdx.x == 0) pieces[blockIdx.x] = found;
}

// A block a channel. The squared distances from the channel's mean are those from each piece's plus its own.
KERNEL batchnorm_2d_join(const Pair* all, Pair* forms, const T* scale, T* mean, T* inverse_std, T* running_mean,
                         T* running_var, Int count, Int span, double momentum, double eps) {
  const Int number = (count + span - 1) / span;
  const Pair* pieces = all + blockIdx.x * number;
  A total = 0, squares = 0;
  for (Int i = threadIdx.x; i < number; i += blockDim.x)
    total += pieces[i].a * A(i + 1 < number ? span : count - i * span);
  const A centre = over_block<Add>(total) / A(count);
  for (Int i = threadIdx.x; i < number; i += blockDim.x) {
    const A distance = pieces[i].a - centre;
    squares += pieces[i].b + distance * distance * A(i + 1 < number ? span : count - i * span);
  }
  const Pair form = finish(Pair{centre, over_block<Add>(squares)}, blockIdx.x, count, scale, mean, inverse_std,
                           running_mean, running_var, momentum, eps, threadIdx.x == 0);
  if (threadIdx.x == 0) forms[blockIdx.x] = form;
}

KERNEL batchnorm_2d_apply(const T* x, const Pair* forms, const T* bias, T* y, Int channels, Int area, Int count, Int span) {
  const Part part = piece_of_block(channels, area, count, span);
  normalise(x, forms[part.channel], bias, y, part);
}

KERNEL batchnorm_2d_infer(const T* x, const T* scale, const T* bias, const T* mean, const T* var, T* y, Int channels,
                          Int area, Int count, Int span, double eps) {
  const Part part = piece_of_block(channels, area, count, span);
  const Int c = part.channel;
  const Pair form{A(widen(mean[c])), A(widen(scale[c]) / sqrt(A(widen(var[c]) + A(eps))))};
  normalise(x, form, bias, y, part);
}

// ---- backward: dx = scale * inverse_std * (dy - mean(dy) - normal * mean(dy * normal)) ----------------------------

// Sums of dy and of dy * normal.
__device__ inline Pair slopes(const T* __restrict__ dy, const T* __restrict__ x, A mean, A inverse, const Part& part) {
  A total = 0, normal_total = 0;
  EACH_OF(walk, part) {
    const A slope = widen(dy[walk.at]);
    total += slope;
    normal_total += slope * ((widen(x[walk.at]) - mean) * inverse);
  }
  total = over_block<Add>(total);
  return Pair{total, over_block<Add>(normal_total)};
}

__device__ inline void backward(const T* __restrict__ dy, const T* __restrict__ x, A mean, A inverse, A scale, Pair sums,
                                Int count, T* __restrict__ dx, const Part& part) {
  const A slope_mean = sums.a / A(count), normal_mean = sums.b / A(count), factor = scale * inverse;
  EACH_OF(walk, part) {
    const A normal = (widen(x[walk.at]) - mean) * inverse;
    dx[walk.at] = narrow<T>(A((widen(dy[walk.at]) - slope_mean - normal * normal_mean) * factor));
  }
}

KERNEL __launch_bounds__(1024) batchnorm_2d_backward(const T* dy, const T* x, const T* scale, const T* mean,
                                                     const T* inverse_std, T* dx, T* dscale, T* dbias, Int channels,
                                                     Int area, Int count) {
  const Part part{channels, area, blockIdx.x, 0, count};
  const Int c = part.channel;
  const Pair sums = slopes(dy, x, widen(mean[c]), widen(inverse_std[c]), part);
  if (threadIdx.x == 0) {
    dbias[c] = narrow<T>(sums.a);
    dscale[c] = narrow<T>(sums.b);
  }
  backward(dy, x, widen(mean[c]), widen(inverse_std[c]), widen(scale[c]), sums, count, dx, part);
}

KERNEL batchnorm_2d_slopes(const T* dy, const T* x, const T* mean, const T* inverse_std, Pair* pieces, Int channels,
                           Int area, Int count, Int span) {
  const Part part = piece_of_block(channels, area, count, span);
  const Pair found = slopes(dy, x, widen(mean[part.channel]), widen(inverse_std[part.channel]), part);
  if (threadIdx.x == 0) pieces[blockIdx.x] = found;
}

KERNEL batchnorm_2d_slopes_join(const Pair* all, Pair* sums, T* dscale, T* dbias, Int number) {
  const Pair* pieces = all + blockIdx.x * number;
  A total = 0, normal_total = 0;
  for (Int i = threadIdx.x; i < number; i += blockDim.x) {
    total += pieces[i].a;
    normal_total += pieces[i].b;
  }
  total = over_block<Add>(total);
  normal_total = over_block<Add>(normal_total);
  if (threadIdx.x != 0) return;
  sums[blockIdx.x] = Pair{total, normal_total};
  dbias[blockIdx.x] = narrow<T>(total);
  dscale[blockIdx.x] = narrow<T>(normal_total);
}

KERNEL batchnorm_2d_backward_apply(const T* dy, const T* x, const T* scale, const T* mean, const T* inverse_std,
                                   const Pair* sums, T* dx, Int channels, Int area, Int count, Int span) {
  const Part part = piece_of_block(channels, area, count, span);
  const Int c = part.channel;
  backward(dy, x, widen(mean[c]), widen(inverse_std[c]), widen(scale[c]), sums[c], count, dx, part);
}
