// SPDX-License-Identifier: Apache-2.0
#include "kernels/widen.h"

#include "kernels/clones.h"

namespace singa_lite {
namespace widen_loops {

CLONES void widen(const Bfloat16* from, float* to, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) to[i] = from[i];
}

CLONES void narrow(const float* from, Bfloat16* to, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) to[i].bits = Bfloat16::rounded(from[i]);
}

}  // namespace widen_loops

void widen(const Bfloat16* from, float* to, std::size_t count) { widen_loops::widen(from, to, count); }
void narrow(const float* from, Bfloat16* to, std::size_t count) { widen_loops::narrow(from, to, count); }

}  // namespace singa_lite
