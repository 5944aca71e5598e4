// SPDX-License-Identifier: Apache-2.0
// Optimizer steps, in place on parameter and state.
#pragma once

#include <cstddef>

namespace singa_lite {

struct SgdStep {
  float lr, momentum, dampening, weight_decay;
  bool nesterov;
};

// velocity may be null: no momentum.
void sgd_update(const float* grad, float* param, float* velocity, std::size_t count, const SgdStep& step);

struct AdamStep {
  float beta_1, beta_2, eps, weight_decay;
  float scale_m;  // lr / (1 - beta_1^step)
  float scale_v;  // 1 / (1 - beta_2^step)
};

void adam_update(const float* grad, float* param, float* m, float* v, std::size_t count, const AdamStep& step);

}  // namespace singa_lite
