// SPDX-License-Identifier: Apache-2.0
#include "kernels/select.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "check.h"

using namespace singa_lite;

namespace {

constexpr std::size_t kSampled = 300007;  // enough for a bound from a sample

using Positions = std::vector<std::uint32_t>;

// NaN above infinity, as the header says: compared by (is NaN, |value|), then by index.
Positions sorted_top_k(const Floats& x, std::size_t k) {
  Positions order(x.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    if (std::isnan(x[a]) != std::isnan(x[b])) return bool(std::isnan(x[a]));
    return !std::isnan(x[a]) && std::abs(x[a]) > std::abs(x[b]);
  });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

void test_top_k(const Floats& x, std::size_t k) {
  const Positions got = top_k(x.data(), x.size(), k), expected = sorted_top_k(x, k);
  CHECK_EQUAL(got.size(), k);
  for (std::size_t i = 0; i < k; ++i) CHECK_EQUAL(got[i], expected[i]);
}

void test_threshold(const Floats& x, float threshold) {
  Positions expected;
  for (std::size_t i = 0; i < x.size(); ++i)
    if (std::isnan(x[i]) || std::abs(x[i]) >= threshold) expected.push_back(std::uint32_t(i));
  const Positions got = threshold_select(x.data(), x.size(), threshold);
  CHECK_EQUAL(threshold_count(x.data(), x.size(), threshold), expected.size());
  CHECK_EQUAL(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK_EQUAL(got[i], expected[i]);
}

void test_values(const Floats& x) {
  const std::size_t n = x.size();
  for (std::size_t k : {std::size_t(0), std::size_t(1), n / 100, n / 2, n - 1, n})
    if (k <= n) test_top_k(x, k);
  for (float threshold : {-1.0f, 0.0f, 0.5f, 0.999f, 2.0f, kInfF}) test_threshold(x, threshold);
}

// Some equal, both zeros, denormals, infinities, NaNs of both signs and several payloads.
Floats awkward(std::size_t n, std::size_t offset) {
  Floats x = random_floats(n, 21, offset);
  Random random(22);
  const std::uint32_t nans[] = {0x7fc00000u, 0xffc00001u, 0x7f800001u, 0xffffffffu};
  for (std::size_t i = 0; i < n; ++i) switch (random.below(12)) {
      case 0: x[i] = 0.5f; break;
      case 1: x[i] = -0.5f; break;
      case 2: x[i] = i % 2 ? 0.0f : -0.0f; break;
      case 3: x[i] = i % 3 ? 1e-42f : kInfF; break;
      case 4: std::memcpy(&x[i], &nans[i % 4], sizeof(float)); break;
    }
  return x;
}

void test_large() {
  test_values(random_floats(kSampled, 23, 1));
  Floats equal(kSampled, 1, 0.25f);
  test_top_k(equal, kSampled / 100);
  // the sample sees only the indices divisible by the stride: here they alone are large, or small
  const std::size_t stride = 64;
  for (float special : {100.0f, 0.0f}) {
    Floats x = random_floats(kSampled, 24);
    for (std::size_t i = 0; i < x.size(); i += stride) x[i] = special;
    test_top_k(x, kSampled / 100);
    test_top_k(x, 3 * kSampled / 4);
  }
  Floats zeros(kSampled, 0, 0.0f);
  zeros[kSampled - 1] = 1.0f;
  test_top_k(zeros, 1);
  test_top_k(zeros, 1000);
}

template <class Index>
void test_gather_and_scatter(std::size_t n, std::size_t offset) {
  const Floats x = random_floats(n, 25, offset);
  const Positions positions = top_k(x.data(), n, n / 3);
  const std::size_t k = positions.size();
  Array<Index> indices(k, offset);
  Floats values(k, offset, kNanF), flat(n, offset, 1.0f), filled(n, offset, 1.0f);
  gather(positions, x.data(), indices.data(), values.data());
  CHECK(scatter_add(indices.data(), values.data(), k, flat.data(), n));
  CHECK(scatter_fill(indices.data(), -7.0f, k, filled.data(), n));
  std::size_t at = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const bool is_taken = at < k && positions[at] == i;
    CHECK_NEAR(flat[i], is_taken ? 1.0f + x[i] : 1.0f, 0);
    CHECK_NEAR(filled[i], is_taken ? -7.0f : 1.0f, 0);
    at += is_taken ? 1 : 0;
  }
  for (Index outside : {Index(-1), Index(n), std::numeric_limits<Index>::min(), std::numeric_limits<Index>::max()}) {
    if (k == 0) break;
    indices[k - 1] = outside;
    CHECK(!scatter_add(indices.data(), values.data(), k, filled.data(), n));
    CHECK(!scatter_fill(indices.data(), 3.0f, k, filled.data(), n));
    CHECK_NEAR(filled[std::size_t(positions[0])], -7, 0);
  }
}

}  // namespace

int main() {
  for_threads([] {
    for (std::size_t n : kSizes)
      for (std::size_t offset : {0, 1}) {
        test_values(random_floats(n, 20, offset));
        test_values(awkward(n, offset));
        test_gather_and_scatter<std::int32_t>(n, offset);
        test_gather_and_scatter<std::int64_t>(n, offset);
      }
  });
  set_threads(2);
  test_large();
}
