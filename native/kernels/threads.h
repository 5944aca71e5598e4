// SPDX-License-Identifier: Apache-2.0
// How many threads a kernel may use, and the loop that splits its work among them.
//
// Note [fork]: GNU OpenMP hangs in a child forked after a parallel region, because the child waits for threads that
// only its parent has. Such a child computes on one thread, oneDNN's primitives included.
#pragma once

#include <algorithm>
#include <cstddef>

#include "common/signals.h"

namespace singa_lite {

// Threads for the next parallel region of the calling thread: omp_get_max_threads(), or 1, see Note [fork].
int num_threads();

// Let parallel regions of the calling thread have so many, >= 1.
void set_num_threads(int threads);

// Say that a region of more than one thread is about to run: from now on forked children stay on one.
void note_parallel_region(int threads);

// Elements below which one more thread costs more than it saves: waking a thread takes about as long as reading so many.
constexpr std::size_t kGrain = 16384;

// Call body(begin, end) for parts of 0 .. count; cost is how many elements one step of the count touches.
template <class Body>
void parallel_for(std::size_t count, std::size_t cost, const Body& body) {
  const std::size_t most = std::max<std::size_t>(1, count * std::max<std::size_t>(cost, 1) / kGrain);
  const int threads = int(std::min({std::size_t(num_threads()), most, std::max<std::size_t>(count, 1)}));
  if (threads <= 1) {
    if (count) body(std::size_t(0), count);
    return;
  }
  note_parallel_region(threads);
  const SignalsBlocked blocked;  // threads that the region starts inherit it
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads)
#endif
  for (int part = 0; part < threads; ++part)
    body(count * std::size_t(part) / std::size_t(threads), count * (std::size_t(part) + 1) / std::size_t(threads));
}

}  // namespace singa_lite
