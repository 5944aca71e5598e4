// SPDX-License-Identifier: Apache-2.0
// Element-by-element kernels of elementwise.py without a line in formulas.h; n elements of out. launch.py puts
// functions.cuh and formulas.h before this.

BINARY(add_relu, A, a, b, where(widen(narrow<T>(A(a + b))) < 0, A(0), a + b))  // add, then relu, each with its rounding
BINARY_THEN(add_gelu, A, a, b, a + b, Real, x, x * normal_cdf(x))  // add, and GELU of the sum, each with its rounding

KERNEL fill(T* to, Int n, Number<double> number) {
  const T value = narrow<T>(number.get());
  EACH(i, n) to[i] = value;
}

KERNEL clip(const T* from, T* to, Int n, double min, double max, Int has_min, Int has_max) {
  const A low = widen(narrow<T>(min)), high = widen(narrow<T>(max));
  EACH(i, n) {
    const A x = widen(from[i]);
    const A y = has_min && x < low ? low : x;
    to[i] = narrow<T>(has_max && y > high ? high : y);
  }
}

KERNEL clip_backward(const T* dy, const T* from, T* dx, Int n, double min, double max, Int has_min, Int has_max) {
  const A low = widen(narrow<T>(min)), high = widen(narrow<T>(max));
  EACH(i, n) {
    const A x = widen(from[i]);
    dx[i] = (!has_min || x >= low) && (!has_max || x <= high) ? dy[i] : narrow<T>(A(0));
  }
}
