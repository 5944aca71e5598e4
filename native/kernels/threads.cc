// SPDX-License-Identifier: Apache-2.0
#include "kernels/threads.h"

#include <atomic>
#include <mutex>

#ifdef _OPENMP
#include <omp.h>
#endif

#ifdef __unix__
#include <pthread.h>
#endif

namespace singa_lite {
namespace {

std::atomic<bool> has_pool{false};        // this process, or one it was forked from, ran a parallel region
std::atomic<bool> stays_on_one{false};    // see Note [fork]

void in_child() {
  if (has_pool.load()) stays_on_one.store(true);
}

}  // namespace

int num_threads() {
#ifdef _OPENMP
  if (stays_on_one.load(std::memory_order_relaxed)) {
    if (omp_get_max_threads() != 1) omp_set_num_threads(1);  // for oneDNN, and again after someone raised it
    return 1;
  }
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

void set_num_threads(int threads) {
#ifdef _OPENMP
  omp_set_num_threads(threads);
#else
  (void)threads;
#endif
}

void note_parallel_region(int threads) {
  if (threads <= 1) return;
  if (!has_pool.load(std::memory_order_relaxed)) {
    static std::once_flag once;
#ifdef __unix__
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, &in_child); });
#endif
    has_pool.store(true);
  }
#ifdef _OPENMP
  thread_local int most = 1;  // of the calling thread's regions
  if (threads <= most) return;
  most = threads;
  const SignalsBlocked blocked;
#pragma omp parallel num_threads(threads)
  if (omp_get_thread_num() != 0) block_signals();  // threads that another library's region has started, see Note [signals]
#endif
}

}  // namespace singa_lite
