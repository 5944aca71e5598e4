// SPDX-License-Identifier: Apache-2.0
// Waiting for a peer that is about to come: how long to spin before sleeping, the same for all that waits here.
#pragma once

#include <sched.h>

#include <algorithm>

#include "comm/segment.h"

namespace singa_lite {

constexpr double kSpinS = 100e-6;     // a peer in the same collective is ready sooner; a sleep costs 5 to 50 us to end
constexpr double kYieldAfterS = 8e-6;  // then the peer may be waiting for this very core, see Note [one core]
constexpr int kSpinsPerClock = 32;
constexpr int kYields = 20;           // with more ranks than cores, this often before sleeping

// Note [one core]: on a busy machine the scheduler may put two ranks on one core; a rank that spins there only
// delays its peer: 4 KB then took 0.12 ms a call. Giving the core away costs 0.3 us if no other thread is ready.

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

class Spin {
 public:
  // `may_spin`: every process has a core of its own.
  explicit Spin(bool may_spin) : may_spin_(may_spin) {}

  // Something was moved.
  void restart() { spins_ = 0; }

  // Let a moment pass; false, having done nothing, when it is time to sleep.
  bool once() {
    if (spins_++ == 0) idle_since_s_ = monotonic_s();
    if (may_spin_) {
      relax();
      if (spins_ % kSpinsPerClock != 0) return true;
      const double idle_s = monotonic_s() - idle_since_s_;
      if (idle_s > kYieldAfterS) sched_yield();
      if (idle_s < kSpinS) return true;
    } else if (spins_ < kYields) {
      sched_yield();
      return true;
    }
    // the next one looks at the clock again
    spins_ = std::max(spins_, kSpinsPerClock + 1) / kSpinsPerClock * kSpinsPerClock + kSpinsPerClock - 1;
    return false;
  }

  bool has_looked_at_the_clock() const { return spins_ > kSpinsPerClock; }

 private:
  const bool may_spin_;
  int spins_ = 0;
  double idle_since_s_ = 0;
};

}  // namespace singa_lite
