// SPDX-License-Identifier: Apache-2.0
// Work on many arrays as if they lay end to end: one parallel region for all, so that small ones cost nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/threads.h"

namespace singa_lite {

// Call body(part, begin, end) for ranges of elements that together are all of every part; Part has a ``count``.
template <class Part, class Body>
void parallel_for_parts(const std::vector<Part>& parts, const Body& body) {
  std::size_t total = 0;
  for (const Part& part : parts) total += part.count;
  parallel_for(total, 1, [&](std::size_t begin, std::size_t end) {
    std::size_t start = 0;  // of the part among all elements
    for (const Part& part : parts) {
      const std::size_t from = std::max(begin, start), to = std::min(end, start + part.count);
      if (from < to) body(part, from - start, to - start);
      start += part.count;
    }
  });
}

}  // namespace singa_lite
