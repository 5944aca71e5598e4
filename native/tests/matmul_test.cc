// SPDX-License-Identifier: Apache-2.0
#include "kernels/matmul.h"

#include "check.h"

using namespace singa_lite;

namespace {

void test_matmul(const Matmul& p, std::size_t offset) {
  const std::size_t m = std::size_t(p.m), n = std::size_t(p.n), k = std::size_t(p.k), batch = std::size_t(p.batch);
  const Floats a = random_floats(batch * m * k, 91, offset), b = random_floats(batch * k * n, 92, offset);
  Floats y(batch * m * n, offset, kNanF);
  const bool is_done = matmul(p, a.data(), b.data(), y.data());
#ifdef SINGA_LITE_ONEDNN
  CHECK(is_done);
#else
  CHECK(!is_done);
  return;
#endif
  for (std::size_t s = 0; s < batch; ++s)
    for (std::size_t i = 0; i < m; ++i)
      for (std::size_t j = 0; j < n; ++j) {
        double sum = 0;
        for (std::size_t l = 0; l < k; ++l)
          sum += double(a[s * m * k + (p.transpose_a ? l * m + i : i * k + l)]) *
                 b[s * k * n + (p.transpose_b ? j * k + l : l * n + j)];
        CHECK_NEAR(y[(s * m + i) * n + j], sum, 1e-4);
      }
}

}  // namespace

int main() {
  for_threads([] {
    for (bool transpose_a : {false, true})
      for (bool transpose_b : {false, true})
        for (std::int64_t batch : {1, 2, 5})
          for (std::int64_t m : {1, 2, 17, 64})
            for (std::int64_t n : {1, 7, 33})
              for (std::int64_t k : {1, 3, 16, 101})
                test_matmul({batch, m, n, k, transpose_a, transpose_b}, std::size_t(m % 2));
  });
}
