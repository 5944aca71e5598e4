// SPDX-License-Identifier: Apache-2.0
// Optimizer steps, in place on parameter and state.
#pragma once

#include <cstddef>
#include <vector>

namespace singa_lite {

// One tensor of a step; no two write the same memory.
struct UpdatePart {
  const float* grad;
  float* param;
  float* state[2];  // what the optimizer keeps: sgd the velocity or null, adam m and v
  std::size_t count;
};

struct SgdStep {
  float lr, momentum, dampening, weight_decay;
  bool nesterov;
};

void sgd_update(const std::vector<UpdatePart>& parts, const SgdStep& step);

struct AdamStep {
  float beta_1, beta_2, eps, weight_decay;
  float scale_m;  // lr / (1 - beta_1^step)
  float scale_v;  // 1 / (1 - beta_2^step)
};

void adam_update(const std::vector<UpdatePart>& parts, const AdamStep& step);

}  // namespace singa_lite
