// SPDX-License-Identifier: Apache-2.0
#include "kernels/update.h"

#include <cstring>

#include "check.h"

using namespace singa_lite;

namespace {

const Update& find(const char* name) {
  for (const Update& update : updates())
    if (std::strcmp(update.name, name) == 0) return update;
  std::abort();
}

void test_momentum(std::size_t n, std::size_t offset, float weight_decay) {
  const float numbers[kMostNumbers] = {weight_decay, 0.1f, 0.9f, 0.7f};  // lr, momentum, gain
  const Floats grad = random_floats(n, 31, offset), before = random_floats(n, 32, offset);
  Floats param = random_floats(n, 32, offset), velocity = random_floats(n, 33, offset);
  const Floats old = random_floats(n, 33, offset);
  apply(find("momentum_update"), {{grad.data(), param.data(), {velocity.data()}, n}}, numbers);
  for (std::size_t i = 0; i < n; ++i) {
    const double g = double(grad[i]) + double(weight_decay) * before[i];
    const double v = double(0.9f) * old[i] + double(0.7f) * g;
    CHECK_NEAR(velocity[i], v, 1e-6);
    CHECK_NEAR(param[i], before[i] - double(0.1f) * v, 1e-6);
  }
}

void test_sgd(std::size_t n, std::size_t offset) {
  const float numbers[kMostNumbers] = {0.01f, 0.1f};
  const Floats grad = random_floats(n, 31, offset), before = random_floats(n, 32, offset);
  Floats param = random_floats(n, 32, offset);
  apply(find("sgd_update"), {{grad.data(), param.data(), {}, n}}, numbers);
  for (std::size_t i = 0; i < n; ++i)
    CHECK_NEAR(param[i], before[i] - double(0.1f) * (grad[i] + double(0.01f) * before[i]), 1e-6);
}

void test_adam(std::size_t n, std::size_t offset) {
  const float numbers[kMostNumbers] = {0.01f, 0.1f, 0.1f, 0.01f, 100, 1e-8f};  // rate, two weights, correction, epsilon
  const Floats grad = random_floats(n, 34, offset), before = random_floats(n, 35, offset);
  Floats param = random_floats(n, 35, offset), m(n, offset, 0.5f), v(n, offset, 0.25f);
  apply(find("adam_update"), {{grad.data(), param.data(), {m.data(), v.data()}, n}}, numbers);
  for (std::size_t i = 0; i < n; ++i) {
    const double g = double(grad[i]) + double(0.01f) * before[i];
    const double m_after = 0.5 + double(0.1f) * (g - 0.5), v_after = 0.25 + double(0.01f) * (g * g - 0.25);
    CHECK_NEAR(m[i], m_after, 1e-6);
    CHECK_NEAR(v[i], v_after, 1e-6);
    CHECK_NEAR(param[i], before[i] - double(0.1f) * m_after / (std::sqrt(v_after * 100) + 1e-8), 1e-6);
  }
}

void test_size(std::size_t n, std::size_t offset) {
  test_sgd(n, offset);
  test_momentum(n, offset, 0);
  test_momentum(n, offset, 0.01f);
  test_adam(n, offset);
}

}  // namespace

int main() {
  for_threads([] {
    for (std::size_t n : kSizes)
      for (std::size_t offset : {0, 1}) test_size(n, offset);
    test_size(kLargeSize, 1);
  });
}
