// SPDX-License-Identifier: Apache-2.0
// Whether this process has been forked since: its threads and locks are its parent's.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace singa_lite {

inline std::atomic<std::uint64_t> fork_count{0};

inline std::uint64_t forks_so_far() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++fork_count; });
  (void)registered;
  return fork_count.load(std::memory_order_relaxed);
}

}  // namespace singa_lite
