// SPDX-License-Identifier: Apache-2.0
// Copies between one flat array and many.
#pragma once

#include <cstddef>
#include <vector>

namespace singa_lite {

struct CopyPart {
  const float* from;
  float* to;
  std::size_t count;
};

void copy_parts(const std::vector<CopyPart>& parts);

}  // namespace singa_lite
