// SPDX-License-Identifier: Apache-2.0
// Optimizer steps, in place on parameter and state: the updates of singa_lite/backend/updates.h, which are registered.
#pragma once

#include <cstddef>
#include <vector>

#include "common/bfloat16.h"

namespace singa_lite {

constexpr std::size_t kMostStates = 2, kMostNumbers = 8;

// One tensor of a step; no two write the same memory.
struct UpdatePart {
  const float* grad;
  float* param;
  float* states[kMostStates];
  std::size_t count;
  Bfloat16* rounded = nullptr;  // a copy of the new param; null: none is wanted
};

// An update, compiled.
struct Update {
  const char* name;
  std::size_t num_states;
  const char* numbers;  // names of its attributes behind weight_decay, separated by ", "
  // Updates count elements from begin on; numbers are weight_decay and those that are named.
  void (*loop)(const UpdatePart& part, std::size_t begin, std::size_t count, const float* numbers);
};
const std::vector<Update>& updates();

void apply(const Update& update, const std::vector<UpdatePart>& parts, const float* numbers);

}  // namespace singa_lite
