// SPDX-License-Identifier: Apache-2.0
#include "comm/combine.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "common/half.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define SINGA_LITE_X86 1
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")  // out may be exactly one source, which hinders no element
#else
#define INDEPENDENT
#endif

namespace singa_lite {
namespace {

constexpr std::size_t kBlock = 2048;  // elements folded at once, so that partial sums stay in the L1 cache

// Integer sums wrap around, in unsigned arithmetic, where that is defined.
template <class T>
ALWAYS_INLINE T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return T(U(a) + U(b));
  } else {
    return a + b;
  }
}

struct Sum {
  template <class T>
  ALWAYS_INLINE T operator()(T a, T b, T) const { return add(a, b); }
};
struct Mean {  // the last step of a mean
  template <class T>
  ALWAYS_INLINE T operator()(T a, T b, T divisor) const { return add(a, b) / divisor; }
};
struct Max {  // a != a keeps a NaN on the left; a NaN on the right fails the comparison
  template <class T>
  ALWAYS_INLINE T operator()(T a, T b, T) const { return (a >= b) | (a != a) ? a : b; }
};
struct Min {
  template <class T>
  ALWAYS_INLINE T operator()(T a, T b, T) const { return (a <= b) | (a != a) ? a : b; }
};

template <class T>
using Step = void (*)(const T*, const T*, T*, T, std::size_t);

// One loop, compiled for several instruction sets.
#define DEFINE_STEP(NAME, TARGET)                                                     \
  template <class T, class F>                                                         \
  TARGET void NAME(const T* a, const T* b, T* out, T divisor, std::size_t count) {    \
    INDEPENDENT                                                                       \
    for (std::size_t i = 0; i < count; ++i) out[i] = F()(a[i], b[i], divisor);        \
  }
DEFINE_STEP(step_baseline, )
#ifdef SINGA_LITE_X86
DEFINE_STEP(step_avx2, __attribute__((target("avx2"))))
DEFINE_STEP(step_avx512, __attribute__((target("avx512f,avx512dq,avx512vl,prefer-vector-width=512"))))
#endif
#undef DEFINE_STEP

template <class T, class F>
Step<T> best_step() {
#ifdef SINGA_LITE_X86
  static const Step<T> best = [] {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      return Step<T>(step_avx512<T, F>);
    return Step<T>(__builtin_cpu_supports("avx2") ? step_avx2<T, F> : step_baseline<T, F>);
  }();
  return best;
#else
  return step_baseline<T, F>;
#endif
}

template <class T>
Step<T> step_of(ReduceOp op, bool is_last) {
  switch (op) {
    case ReduceOp::kMax: return best_step<T, Max>();
    case ReduceOp::kMin: return best_step<T, Min>();
    case ReduceOp::kMean: return is_last ? best_step<T, Mean>() : best_step<T, Sum>();
    default: return best_step<T, Sum>();
  }
}

template <class T>
void combine_typed(ReduceOp op, const void* const* sources, std::size_t num_sources, void* out,
                   std::size_t count) {
  T* to = static_cast<T*>(out);
  const auto source = [&](std::size_t s) { return static_cast<const T*>(sources[s]); };
  const T divisor = T(num_sources);
  const Step<T> middle = step_of<T>(op, false), last = step_of<T>(op, true);
  if (num_sources == 1) {
    if (to != source(0) && count) std::memcpy(to, source(0), count * sizeof(T));
    return;
  }
  if (num_sources == 2) return last(source(0), source(1), to, divisor, count);
  alignas(64) T partial[kBlock];
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t n = std::min(kBlock, count - at);
    middle(source(0) + at, source(1) + at, partial, divisor, n);
    for (std::size_t s = 2; s + 1 < num_sources; ++s) middle(partial, source(s) + at, partial, divisor, n);
    last(partial, source(num_sources - 1) + at, to + at, divisor, n);
  }
}

void combine_narrow(DType wire, ReduceOp op, const void* const* sources, std::size_t num_sources, void* out,
                    std::size_t count, bool widen, float scale) {
  alignas(64) float partial[kBlock], next[kBlock];
  alignas(64) std::uint16_t rounded[kBlock];
  const auto source = [&](std::size_t s) { return static_cast<const std::uint16_t*>(sources[s]); };
  const Step<float> middle = step_of<float>(op, false), last = step_of<float>(op, true);
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t n = std::min(kBlock, count - at);
    from_wire(wire, source(0) + at, partial, n);
    for (std::size_t s = 1; s < num_sources; ++s) {
      from_wire(wire, source(s) + at, next, n);
      (s + 1 < num_sources ? middle : last)(partial, next, partial, float(num_sources), n);
    }
    if (widen) {
      to_wire(wire, partial, rounded, n);
      from_wire(wire, rounded, static_cast<float*>(out) + at, n, scale);
    } else {
      to_wire(wire, partial, static_cast<std::uint16_t*>(out) + at, n);
    }
  }
}

}  // namespace

// Blocks of kBlock stay in the L1 cache, so scaling costs no pass over memory.
void to_wire(DType wire, const float* from, void* to, std::size_t count, float scale) {
  const auto convert = wire == DType::kFloat16 ? float_to_half : float_to_bfloat16;
  std::uint16_t* out = static_cast<std::uint16_t*>(to);
  if (scale == 1) return convert(from, out, count);
  alignas(64) float scaled[kBlock];
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t n = std::min(kBlock, count - at);
    for (std::size_t i = 0; i < n; ++i) scaled[i] = from[at + i] * scale;
    convert(scaled, out + at, n);
  }
}

void from_wire(DType wire, const void* from, float* to, std::size_t count, float scale) {
  const auto convert = wire == DType::kFloat16 ? half_to_float : bfloat16_to_float;
  const std::uint16_t* in = static_cast<const std::uint16_t*>(from);
  if (scale == 1) return convert(in, to, count);
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t n = std::min(kBlock, count - at);
    convert(in + at, to + at, n);
    for (std::size_t i = 0; i < n; ++i) to[at + i] /= scale;
  }
}

void combine(DType dtype, ReduceOp op, const void* const* sources, std::size_t num_sources, void* out,
             std::size_t count, bool widen, float scale) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16: return combine_narrow(dtype, op, sources, num_sources, out, count, widen, scale);
    case DType::kFloat32: return combine_typed<float>(op, sources, num_sources, out, count);
    case DType::kFloat64: return combine_typed<double>(op, sources, num_sources, out, count);
    case DType::kInt32: return combine_typed<std::int32_t>(op, sources, num_sources, out, count);
    case DType::kInt64: return combine_typed<std::int64_t>(op, sources, num_sources, out, count);
    case DType::kUInt8: throw std::logic_error("combine: uint8 is only moved");
  }
}

}  // namespace singa_lite
