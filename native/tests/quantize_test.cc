// SPDX-License-Identifier: Apache-2.0
#include "kernels/quantize.h"

#include <algorithm>

#include "check.h"

using namespace singa_lite;

namespace {

using Bytes = Array<std::uint8_t>;

// Value number i's code, read bit by bit.
int code_at(const Bytes& codes, int bits, std::size_t i) {
  int code = 0;
  for (std::size_t bit = i * std::size_t(bits); bit < (i + 1) * std::size_t(bits); ++bit)
    code = 2 * code + (codes[bit / 8] >> (7 - bit % 8) & 1);
  return code;
}

int code_of(int bits, float sum, float threshold) {
  if (bits == 1) return sum > threshold ? 1 : 0;
  return sum >= threshold ? 3 : sum <= -threshold ? 2 : 0;
}

float value_of(int bits, int code, float threshold) {
  if (bits == 1) return code ? 1.0f : -1.0f;
  return code == 3 ? threshold : code == 2 ? -threshold : 0.0f;
}

// Random numbers, and the threshold itself of either sign.
Floats gradients(std::size_t n, std::size_t offset, float threshold) {
  Floats made = random_floats(n, 31, offset);
  for (std::size_t i = 0; i < n; i += 3) made[i] = i % 2 ? threshold : -threshold;
  return made;
}

void test_round(int bits, float threshold, std::size_t n, std::size_t offset) {
  const Floats gradient = gradients(n, offset, threshold);
  Floats residual(n, offset, 0.0f), added(n, offset, 2.0f), values(n, offset, kNanF);
  Bytes codes((n * std::size_t(bits) + 31) / 32 * 4, 0, 0xee);
  CHECK(quantize(bits, threshold, gradient.data(), residual.data(), n, codes.data()));
  dequantize(bits, threshold, false, codes.data(), values.data(), n);
  dequantize(bits, threshold, true, codes.data(), added.data(), n);
  for (std::size_t i = 0; i < n; ++i) {
    const int code = code_of(bits, gradient[i], threshold);
    const float value = value_of(bits, code, threshold);
    CHECK_EQUAL(code_at(codes, bits, i), code);
    CHECK_NEAR(residual[i], gradient[i] - value, 0);
    CHECK_NEAR(values[i], value, 0);
    CHECK_NEAR(added[i], 2.0f + value, 0);
  }
  for (std::size_t i = n; i < codes.size() * 8 / std::size_t(bits); ++i) CHECK_EQUAL(code_at(codes, bits, i), 0);
}

void test_not_finite(int bits, std::size_t n) {
  for (float bad : {kNanF, kInfF, -kInfF, std::numeric_limits<float>::max()}) {
    Floats gradient(n, 0, 1.0f), residual(n, 0, std::numeric_limits<float>::max() / 2);
    Bytes codes((n * std::size_t(bits) + 31) / 32 * 4, 0, 0xee);
    gradient[n - 1] = bad;
    CHECK(!quantize(bits, 0.5f, gradient.data(), residual.data(), n, codes.data()));
    for (std::size_t i = 0; i < n; ++i) CHECK_NEAR(residual[i], std::numeric_limits<float>::max() / 2, 0);
    for (std::size_t i = 0; i < codes.size(); ++i) CHECK_EQUAL(codes[i], 0xee);
  }
}

}  // namespace

int main() {
  for (std::size_t n : kSizes)
    for (std::size_t offset : {0, 1})
      for (int bits : {1, 2}) {
        test_round(bits, 0.5f, n, offset);
        if (n) test_not_finite(bits, n);
      }
}
