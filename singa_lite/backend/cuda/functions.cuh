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

// Neighbouring elements that a thread reads and writes at once, 16 bytes of T: one by one, those of 16 bits take two to
// three times as long. A part of fewer, behind the last whole pack or where addresses and axes do not permit, has Width<1>.
enum { kPack = 16 / sizeof(T) };

template <int count> struct Width {
  static constexpr int value = count;
};
template <class Address> __device__ inline bool is_aligned(Address address) {
  return reinterpret_cast<Bits>(address) % 16 == 0;
}

// kPack values from an address, or the one there repeated, where step is 0
template <class V, class W> __device__ inline void take(const W* from, Int step, V* values) {
  if (step == 0) {
    const V value = static_cast<V>(widen(*from));
    for (int k = 0; k < kPack; ++k) values[k] = value;
    return;
  }
  const Pack<W, kPack> pack = *reinterpret_cast<const Pack<W, kPack>*>(from);
  for (int k = 0; k < kPack; ++k) values[k] = static_cast<V>(widen(pack.values[k]));
}

// Calls use(number of the first element, Width, values) for all n.
template <class V, class Use> __device__ void each_value(const T* from, Int n, bool in_packs, const Use& use) {
  const Int packs = in_packs && is_aligned(from) ? n / kPack : 0, rest = n - packs * kPack;
  EACH(pack, packs) {
    V xs[kPack];
    take(from + pack * kPack, 1, xs);
    use(pack * kPack, Width<kPack>(), xs);
  }
  BATCHES(rest) {
    V xs[4];
    IN_BATCH(i, rest) xs[u] = static_cast<V>(widen(from[packs * kPack + i]));
    IN_BATCH(i, rest) use(packs * kPack + i, Width<1>(), xs + u);
  }
}

// The same of pairs. A pack is within the innermost axis, along which neither, or one of them only, is repeated.
template <class V, class Use>
__device__ void each_pair(const T* from_a, const U* from_b, Int n, const Broadcast& axes, bool in_packs, const Use& use) {
  const Int step_a = axes.a[0], step_b = axes.b[0];
  const bool are_runs = (axes.ndim == 1 || axes.shape[0] % kPack == 0) && step_a <= 1 && step_b <= 1;
  const bool are_aligned = (step_a == 0 || is_aligned(from_a)) && (step_b == 0 || is_aligned(from_b));
  const Int packs = in_packs && are_runs && are_aligned ? n / kPack : 0, rest = n - packs * kPack;
  EACH(pack, packs) {
    const Int first = pack * kPack;
    OFFSETS(axes, first, n, offset_a, offset_b);
    V as[kPack], bs[kPack];
    take(from_a + offset_a, step_a, as);
    take(from_b + offset_b, step_b, bs);
    use(first, Width<kPack>(), as, bs);
  }
  BATCHES(rest) {
    V as[4], bs[4];
    IN_BATCH(i, rest) {
      OFFSETS(axes, packs * kPack + i, n, offset_a, offset_b);
      as[u] = static_cast<V>(widen(from_a[offset_a]));
      bs[u] = static_cast<V>(widen(from_b[offset_b]));
    }
    IN_BATCH(i, rest) use(packs * kPack + i, Width<1>(), as + u, bs + u);
  }
}

// What becomes of the values: `count` neighbours of out, from the element number `first` on.
template <class F> struct Mapped {
  F formula;
  T* to;
  template <int count, class... Values> __device__ void operator()(Int first, Width<count>, const Values*... values) const {
    Pack<T, count> made;
    for (int k = 0; k < count; ++k) made.values[k] = narrow<T>(formula(values[k]...));
    *reinterpret_cast<Pack<T, count>*>(to + first) = made;
  }
};
// formula of a and b, which is kept too, rounded, and behind of that
template <class V, class R, class F, class G> struct MappedTwice {
  F formula;
  G behind;
  T *to, *kept;
  template <int count> __device__ void operator()(Int first, Width<count>, const V* as, const V* bs) const {
    Pack<T, count> made, found;
    for (int k = 0; k < count; ++k) {
      made.values[k] = narrow<T>(formula(as[k], bs[k]));
      found.values[k] = narrow<T>(behind(static_cast<R>(widen(made.values[k]))));
    }
    *reinterpret_cast<Pack<T, count>*>(kept + first) = made;
    *reinterpret_cast<Pack<T, count>*>(to + first) = found;
  }
};

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
    const Mapped<name##_value> use{with_numbers<name##_value, type>(numbers), to};         \
    each_value<type>(from, n, is_aligned(to), use);                                        \
  }

#define BINARY(name, type, a, b, value, ...)                                               \
  FORMULA(name, type, (type a, type b), value, ##__VA_ARGS__)                              \
  KERNEL name##_formula(const T* first, const U* second, T* to, Int n, Broadcast axes, Numbers numbers) { \
    const Mapped<name##_value> use{with_numbers<name##_value, type>(numbers), to};         \
    each_pair<type>(first, second, n, axes, is_aligned(to), use);                          \
  }

// value of a and b, which is kept too, rounded, and ``then`` of it as x
#define BINARY_THEN(name, type, a, b, value, result, x, then)                              \
  FORMULA(name, type, (type a, type b), value)                                             \
  FORMULA(name##_then, result, (result x), then)                                           \
  KERNEL name##_formula(const T* from_a, const U* from_b, T* to, T* kept, Int n, Broadcast axes) { \
    const MappedTwice<type, result, name##_value, name##_then_value> use{{}, {}, to, kept}; \
    each_pair<type>(from_a, from_b, n, axes, is_aligned(to) && is_aligned(kept), use);     \
  }

#define TERNARY(name, type, c, a, b, value, ...)                                           \
  FORMULA(name, type, (type c, type a, type b), value, ##__VA_ARGS__)                      \
  KERNEL name##_formula(const T* first, const T* second, const T* third, T* to, Int n, Broadcast axes, Numbers numbers) { \
    map_three<type>(with_numbers<name##_value, type>(numbers), first, second, third, to, n, axes); \
  }
