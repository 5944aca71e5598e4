// SPDX-License-Identifier: Apache-2.0
#include "kernels/widen.h"

#include "kernels/clones.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && !defined(SINGA_LITE_SANITIZE)
#define SINGA_LITE_AVX512_BF16 1
#include <immintrin.h>
#endif

namespace singa_lite {
namespace widen_loops {

CLONES void widen(const Bfloat16* from, std::int64_t from_step, float* to, std::int64_t to_step, std::int64_t rows,
                  std::int64_t count) {
  for (std::int64_t row = 0; row < rows; ++row, from += from_step, to += to_step)
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) to[i] = from[i];
}

CLONES void narrow(const float* from, std::int64_t from_step, Bfloat16* to, std::int64_t to_step, std::int64_t rows,
                   std::int64_t count) {
  for (std::int64_t row = 0; row < rows; ++row, from += from_step, to += to_step)
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) to[i].bits = Bfloat16::rounded(from[i]);
}

#ifdef SINGA_LITE_AVX512_BF16

bool has_instruction() {
  static const bool has = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  return has;
}

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

// The first `count` <= 16 elements, those of `taken`.
TARGET ALWAYS_INLINE void narrow_vector(const float* from, Bfloat16* to, int count, __mmask16 taken) {
  constexpr int kSubnormal = 0x20;
  const __m512 x = _mm512_maskz_loadu_ps(taken, from);
  if (__builtin_expect(_mm512_fpclass_ps_mask(x, kSubnormal) != 0, 0)) {
    for (int i = 0; i < count; ++i) to[i].bits = Bfloat16::rounded(from[i]);
  } else {
    _mm256_mask_storeu_epi16(to, taken, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }
}

// The same by AVX512_BF16, in half the time; see Note [bfloat16] about subnormal numbers.
TARGET void narrow_by_instruction(const float* from, std::int64_t from_step, Bfloat16* to, std::int64_t to_step,
                                  std::int64_t rows, std::int64_t count) {
  for (std::int64_t row = 0; row < rows; ++row, from += from_step, to += to_step) {
    std::int64_t i = 0;
    for (; i + 16 <= count; i += 16) narrow_vector(from + i, to + i, 16, 0xffff);
    if (i < count) narrow_vector(from + i, to + i, int(count - i), __mmask16((1u << (count - i)) - 1));
  }
}

#endif

}  // namespace widen_loops

void widen(const Bfloat16* from, float* to, std::size_t count) { widen_rows(from, 0, to, 0, 1, std::int64_t(count)); }
void narrow(const float* from, Bfloat16* to, std::size_t count) { narrow_rows(from, 0, to, 0, 1, std::int64_t(count)); }

void widen_rows(const Bfloat16* from, std::int64_t from_step, float* to, std::int64_t to_step, std::int64_t rows,
                std::int64_t count) {
  widen_loops::widen(from, from_step, to, to_step, rows, count);
}

void narrow_rows(const float* from, std::int64_t from_step, Bfloat16* to, std::int64_t to_step, std::int64_t rows,
                 std::int64_t count) {
#ifdef SINGA_LITE_AVX512_BF16
  if (widen_loops::has_instruction()) {
    return widen_loops::narrow_by_instruction(from, from_step, to, to_step, rows, count);
  }
#endif
  widen_loops::narrow(from, from_step, to, to_step, rows, count);
}

}  // namespace singa_lite
