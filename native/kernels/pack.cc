// SPDX-License-Identifier: Apache-2.0
#include "kernels/pack.h"

#include <cstring>

#include "kernels/parts.h"

namespace singa_lite {

void copy_parts(const std::vector<CopyPart>& parts) {
  parallel_for_parts(parts, [](const CopyPart& part, std::size_t begin, std::size_t end) {
    std::memcpy(part.to + begin, part.from + begin, (end - begin) * sizeof(float));
  });
}

}  // namespace singa_lite
