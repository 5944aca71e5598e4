// SPDX-License-Identifier: Apache-2.0
// The functions that formulas.h uses and NVRTC does not know, and what a line of it becomes: a kernel of that name with
// _formula behind it, for elementwise.py.

template <class V, class W> __device__ inline auto where(bool condition, V yes, W no) { return condition ? yes : no; }

// with e = exp(-|x|): e / (1 + e), and e / (1 + e)^2, which is 1 + e (2 + e) for fewer roundings
template <class V> __device__ inline V logistic(V x) {
  const V power = exp(x < 0 ? x : -x), largest = x < 0 ? power : V(1);
  return largest - largest * (power / (1 + power));
}
template <class V> __device__ inline V logistic_grad(V x) {
  const V power = exp(x < 0 ? x : -x);
  return power / (1 + power * (2 + power));
}

__device__ inline float normal_cdf(float x) { return normcdff(x); }
__device__ inline double normal_cdf(double x) { return normcdf(x); }
template <class V> __device__ inline V normal_pdf(V x) { return V(0.3989422804014327) * exp(V(-0.5) * x * x); }

template <class V> __device__ inline V floored_quotient(V a, V b) {
  if (b == 0) return 0;
  if (b == -1) return static_cast<V>(0 - static_cast<Bits>(a));  // the lowest integer stays, as in numpy
  return a / b - V(a % b != 0 && (a < 0) != (b < 0));
}
__device__ inline float floored_quotient(float a, float b) { return floor(a / b); }
__device__ inline double floored_quotient(double a, double b) { return floor(a / b); }

// ---- loops ------------------------------------------------------------------------------------------------------

// The attributes of a formula: the members of its struct behind the first one.
struct Numbers {
  double values[4];
};
template <class F, class V> __device__ F with_numbers(const Numbers& numbers) {
  F formula = {};
  V* members = reinterpret_cast<V*>(&formula);
  for (unsigned i = 1; i < sizeof(F) / sizeof(V); ++i) members[i] = static_cast<V>(numbers.values[i - 1]);
  return formula;
}

template <class V, class F> __device__ void map_one(const F& formula, const T* from, T* to, Int n) {
  BATCHES(n) {
    V xs[4];
    IN_BATCH(i, n) xs[u] = static_cast<V>(widen(from[i]));
    IN_BATCH(i, n) to[i] = narrow<T>(formula(xs[u]));
  }
}

template <class V, class F>
__device__ void map_two(const F& formula, const T* from_a, const U* from_b, T* to, Int n, const Broadcast& axes) {
  BATCHES(n) {
    V as[4], bs[4];
    IN_BATCH(i, n) {
      OFFSETS(axes, i, n, offset_a, offset_b);
      as[u] = static_cast<V>(widen(from_a[offset_a]));
      bs[u] = static_cast<V>(widen(from_b[offset_b]));
    }
    IN_BATCH(i, n) to[i] = narrow<T>(formula(as[u], bs[u]));
  }
}

// the first has the shape of the result
template <class V, class F>
__device__ void map_three(const F& formula, const T* from_c, const T* from_a, const T* from_b, T* to, Int n,
                          const Broadcast& axes) {
  EACH(i, n) {
    OFFSETS(axes, i, n, offset_a, offset_b);
    const V a = static_cast<V>(widen(from_a[offset_a])), b = static_cast<V>(widen(from_b[offset_b]));
    to[i] = narrow<T>(formula(static_cast<V>(widen(from_c[i])), a, b));
  }
}

#define FORMULA(name, type, inputs, value, ...)                                            \
  struct name##_value {                                                                    \
    type unused_, ##__VA_ARGS__;                                                           \
    __device__ type operator() inputs const { return static_cast<type>(value); }           \
  };

#define UNARY(name, type, x, value, ...)                                                   \
  FORMULA(name, type, (type x), value, ##__VA_ARGS__)                                      \
  KERNEL name##_formula(const T* from, T* to, Int n, Numbers numbers) {                    \
    map_one<type>(with_numbers<name##_value, type>(numbers), from, to, n);                 \
  }

#define BINARY(name, type, a, b, value, ...)                                               \
  FORMULA(name, type, (type a, type b), value, ##__VA_ARGS__)                              \
  KERNEL name##_formula(const T* first, const U* second, T* to, Int n, Broadcast axes, Numbers numbers) { \
    map_two<type>(with_numbers<name##_value, type>(numbers), first, second, to, n, axes);  \
  }

// value of a and b, which is kept too, rounded, and ``then`` of it as x
#define BINARY_THEN(name, type, a, b, value, result, x, then)                              \
  FORMULA(name, type, (type a, type b), value)                                             \
  FORMULA(name##_then, result, (result x), then)                                           \
  KERNEL name##_formula(const T* from_a, const U* from_b, T* to, T* kept, Int n, Broadcast axes) { \
    const name##_value formula = {};                                                       \
    const name##_then_value behind = {};                                                   \
    BATCHES(n) {                                                                           \
      T values[4];                                                                         \
      IN_BATCH(i, n) {                                                                     \
        OFFSETS(axes, i, n, offset_a, offset_b);                                           \
        values[u] = narrow<T>(formula(widen(from_a[offset_a]), widen(from_b[offset_b]))); \
      }                                                                                    \
      IN_BATCH(i, n) {                                                                     \
        kept[i] = values[u];                                                               \
        to[i] = narrow<T>(behind(static_cast<result>(widen(values[u]))));                  \
      }                                                                                    \
    }                                                                                      \
  }

#define TERNARY(name, type, c, a, b, value, ...)                                           \
  FORMULA(name, type, (type c, type a, type b), value, ##__VA_ARGS__)                      \
  KERNEL name##_formula(const T* first, const T* second, const T* third, T* to, Int n, Broadcast axes, Numbers numbers) { \
    map_three<type>(with_numbers<name##_value, type>(numbers), first, second, third, to, n, axes); \
  }
