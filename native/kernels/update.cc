// SPDX-License-Identifier: Apache-2.0
#include "kernels/update.h"

#include <cmath>

#include "kernels/clones.h"
#include "kernels/parts.h"

namespace singa_lite {
namespace update_loops {

CLONES void sgd_plain(const float* grad, float* param, std::size_t count, float lr, float decay) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) param[i] -= lr * (grad[i] + decay * param[i]);
}

// velocity = keep * velocity + take * slope, then p -= lr (a slope + b velocity)
CLONES void sgd_momentum(const float* grad, float* param, float* velocity, std::size_t count, float lr, float decay,
                         float keep, float take, float a, float b) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) {
    const float slope = grad[i] + decay * param[i];
    const float v = keep * velocity[i] + take * slope;
    velocity[i] = v;
    param[i] -= lr * (a * slope + b * v);
  }
}

CLONES void adam(const float* grad, float* param, float* m, float* v, std::size_t count, AdamStep step) {
  const float take_1 = 1 - step.beta_1, take_2 = 1 - step.beta_2;
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) {
    const float slope = grad[i] + step.weight_decay * param[i];
    m[i] = step.beta_1 * m[i] + take_1 * slope;
    v[i] = step.beta_2 * v[i] + take_2 * (slope * slope);
    param[i] -= step.scale_m * (m[i] / (std::sqrt(v[i] * step.scale_v) + step.eps));
  }
}

}  // namespace update_loops

void sgd_update(const std::vector<UpdatePart>& parts, const SgdStep& step) {
  const float a = step.nesterov ? 1.0f : 0.0f, b = step.nesterov ? step.momentum : 1.0f;
  parallel_for_parts(parts, [&](const UpdatePart& part, std::size_t begin, std::size_t end) {
    const std::size_t size = end - begin;
    const float* g = part.grad + begin;
    float* p = part.param + begin;
    if (!part.state[0] || step.momentum == 0)
      update_loops::sgd_plain(g, p, size, step.lr, step.weight_decay);
    else
      update_loops::sgd_momentum(g, p, part.state[0] + begin, size, step.lr, step.weight_decay, step.momentum,
                                 1 - step.dampening, a, b);
  });
}

void adam_update(const std::vector<UpdatePart>& parts, const AdamStep& step) {
  parallel_for_parts(parts, [&](const UpdatePart& part, std::size_t begin, std::size_t end) {
    update_loops::adam(part.grad + begin, part.param + begin, part.state[0] + begin, part.state[1] + begin,
                       end - begin, step);
  });
}

}  // namespace singa_lite
