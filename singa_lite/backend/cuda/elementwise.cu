// SPDX-License-Identifier: Apache-2.0
// Element-by-element kernels of elementwise.py; n elements of out.

#define UNARY(name, type, value)                                             \
  KERNEL name(const T* from, T* to, Int n) {                                 \
    BATCHES(n) {                                                             \
      type xs[4];                                                            \
      IN_BATCH(i, n) xs[u] = static_cast<type>(widen(from[i]));              \
      IN_BATCH(i, n) {                                                       \
        const type x = xs[u];                                                \
        to[i] = narrow<T>(value);                                            \
      }                                                                      \
    }                                                                        \
  }

UNARY(relu, A, x < 0 ? A(0) : x)  // NaN stays NaN
UNARY(sigmoid, Real, Real(0.5) * (tanh(Real(0.5) * x) + 1))  // 1 / (1 + exp(-x)) overflows
UNARY(tanh_, Real, tanh(x))
UNARY(exp_, Real, exp(x))
UNARY(log_, Real, log(x))
UNARY(sqrt_, Real, sqrt(x))
UNARY(abs_, A, x < 0 ? A(-x) : A(x + 0))  // -0 + 0 is 0
UNARY(negative, A, A(-x))
UNARY(sign, A, x > 0 ? A(1) : x < 0 ? A(-1) : x)
UNARY(ceil_, Real, ceil(x))
UNARY(floor_, Real, floor(x))
UNARY(square, A, x * x)

#define SLOPE(name, value)                                            \
  KERNEL name(const T* from_dy, const T* from_y, T* dx, Int n) {      \
    BATCHES(n) {                                                      \
      A dys[4], ys[4];                                                \
      IN_BATCH(i, n) dys[u] = widen(from_dy[i]), ys[u] = widen(from_y[i]); \
      IN_BATCH(i, n) {                                                \
        const A dy = dys[u], y = ys[u];                               \
        dx[i] = narrow<T>(value);                                     \
      }                                                               \
    }                                                                 \
  }

SLOPE(relu_backward, dy * A(y > 0))
SLOPE(sigmoid_backward, dy * y * (1 - y))
SLOPE(tanh_backward, dy * (1 - y * y))

KERNEL fill(T* to, Int n, double value) {
  EACH(i, n) to[i] = narrow<T>(value);
}

KERNEL clip(const T* from, T* to, Int n, double min, double max, Int has_min, Int has_max) {
  const A low = widen(narrow<T>(min)), high = widen(narrow<T>(max));
  EACH(i, n) {
    const A x = widen(from[i]);
    to[i] = narrow<T>(has_min && x < low ? low : has_max && x > high ? high : x);
  }
}

KERNEL clip_backward(const T* dy, const T* from, T* dx, Int n, double min, double max, Int has_min, Int has_max) {
  const A low = widen(narrow<T>(min)), high = widen(narrow<T>(max));
  EACH(i, n) {
    const A x = widen(from[i]);
    dx[i] = narrow<T>(widen(dy[i]) * A((!has_min || x >= low) && (!has_max || x <= high)));
  }
}

// ---- two inputs that broadcast -----------------------------------------------------------------------------------

#define BINARY(name, type, value)                                                 \
  KERNEL name(const T* from_a, const T* from_b, T* to, Int n, Broadcast axes) {   \
    BATCHES(n) {                                                                  \
      type as[4], bs[4];                                                          \
      IN_BATCH(i, n) {                                                            \
        PLACES(axes, i, n, place_a, place_b);                                     \
        as[u] = static_cast<type>(widen(from_a[place_a]));                        \
        bs[u] = static_cast<type>(widen(from_b[place_b]));                        \
      }                                                                           \
      IN_BATCH(i, n) {                                                            \
        const type a = as[u], b = bs[u];                                          \
        to[i] = narrow<T>(value);                                                 \
      }                                                                           \
    }                                                                             \
  }

BINARY(add, A, a + b)
BINARY(add_relu, A, widen(narrow<T>(A(a + b))) < 0 ? A(0) : a + b)  // add, then relu, each with its rounding
BINARY(sub, A, a - b)
BINARY(mul, A, a * b)
BINARY(div_, A, a / b)
BINARY(pow_, Real, pow(a, b))

// b is 0 where a ** b is 1 also at a = 0, though a ** -1 is inf there
#define POW_BACKWARD(name, value)                                                                 \
  KERNEL name(const T* from_dy, const T* from_a, const T* from_b, T* to, Int n, Broadcast axes) { \
    EACH(i, n) {                                                                                  \
      PLACES(axes, i, n, place_a, place_b);                                                       \
      const Real dy = static_cast<Real>(widen(from_dy[i]));                                       \
      const Real a = static_cast<Real>(widen(from_a[place_a]));                                   \
      const Real b = static_cast<Real>(widen(from_b[place_b]));                                   \
      to[i] = narrow<T>(dy * (value));                                                            \
    }                                                                                             \
  }

POW_BACKWARD(pow_backward_base, b == 0 ? Real(0) : b * pow(a, b - 1))
POW_BACKWARD(pow_backward_exponent, a == 0 ? Real(0) : b * log(a))  // b is y = a ** exponent
