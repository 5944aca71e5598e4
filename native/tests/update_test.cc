// SPDX-License-Identifier: Apache-2.0
#include "kernels/update.h"

#include "check.h"

using namespace singa_lite;

namespace {

void test_sgd(std::size_t n, std::size_t offset, const SgdStep& s, bool has_velocity) {
  const Floats grad = random_floats(n, 31, offset), before = random_floats(n, 32, offset);
  Floats param = random_floats(n, 32, offset), velocity = random_floats(n, 33, offset);
  const Floats old = random_floats(n, 33, offset);
  sgd_update({{grad.data(), param.data(), {has_velocity ? velocity.data() : nullptr, nullptr}, n}}, s);
  for (std::size_t i = 0; i < n; ++i) {
    double slope = double(grad[i]) + double(s.weight_decay) * before[i], v = old[i];
    if (has_velocity && s.momentum != 0) {
      v = double(s.momentum) * old[i] + (1 - double(s.dampening)) * slope;
      slope = s.nesterov ? slope + double(s.momentum) * v : v;
    }
    CHECK_NEAR(velocity[i], v, 1e-6);
    CHECK_NEAR(param[i], before[i] - double(s.lr) * slope, 1e-6);
  }
}

void test_adam(std::size_t n, std::size_t offset, float weight_decay) {
  const AdamStep s{0.9f, 0.99f, 1e-8f, weight_decay, 0.01f / (1 - 0.9f), 1 / (1 - 0.99f)};
  const Floats grad = random_floats(n, 34, offset), before = random_floats(n, 35, offset);
  Floats param = random_floats(n, 35, offset), m(n, offset, 0.5f), v(n, offset, 0.25f);
  adam_update({{grad.data(), param.data(), {m.data(), v.data()}, n}}, s);
  for (std::size_t i = 0; i < n; ++i) {
    const double slope = double(grad[i]) + double(weight_decay) * before[i];
    const double m_after = double(s.beta_1) * 0.5 + (1 - double(s.beta_1)) * slope;
    const double v_after = double(s.beta_2) * 0.25 + (1 - double(s.beta_2)) * slope * slope;
    CHECK_NEAR(m[i], m_after, 1e-6);
    CHECK_NEAR(v[i], v_after, 1e-6);
    CHECK_NEAR(param[i], before[i] - double(s.scale_m) * m_after / (std::sqrt(v_after * double(s.scale_v)) + 1e-8), 1e-6);
  }
}

void test_size(std::size_t n, std::size_t offset) {
  test_sgd(n, offset, {0.1f, 0, 0, 0, false}, false);
  test_sgd(n, offset, {0.1f, 0, 0, 0.01f, false}, true);
  test_sgd(n, offset, {0.1f, 0.9f, 0, 0.01f, false}, false);
  test_sgd(n, offset, {0.1f, 0.9f, 0.3f, 0.01f, false}, true);
  test_sgd(n, offset, {0.1f, 0.9f, 0, 0.01f, true}, true);
  test_adam(n, offset, 0);
  test_adam(n, offset, 0.01f);
}

}  // namespace

int main() {
  for_threads([] {
    for (std::size_t n : kSizes)
      for (std::size_t offset : {0, 1}) test_size(n, offset);
    test_size(kLargeSize, 1);
  });
}
