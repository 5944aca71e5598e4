// SPDX-License-Identifier: Apache-2.0
#include "kernels/norm.h"

#include "check.h"

using namespace singa_lite;

namespace {

constexpr double kEps = 1e-5, kMomentum = 0.1;

// Call body(offset of an element) for all of one channel.
template <class Body>
void for_channel(const Norm& n, std::size_t c, const Body& body) {
  for (std::size_t b = 0; b < n.batch; ++b)
    for (std::size_t i = 0; i < n.inner; ++i) {
      const std::size_t blocks = n.channels / n.block;
      body(((b * blocks + c / n.block) * n.inner + i) * n.block + c % n.block);
    }
}

void test_norm(const Norm& n, std::size_t offset, float shift) {
  const std::size_t size = n.batch * n.channels * n.inner;
  Floats x = random_floats(size, 51, offset);
  for (std::size_t i = 0; i < size; ++i) x[i] += shift;
  const Floats dy = random_floats(size, 52, offset), scale = random_floats(n.channels, 53, offset),
               bias = random_floats(n.channels, 54, offset);
  Floats y(size, offset, kNanF), inferred(size, offset, kNanF), dx(size, offset, kNanF);
  Floats mean(n.channels, offset, kNanF), inverse(n.channels, offset, kNanF), running_mean(n.channels, offset, 0.5f),
      running_var(n.channels, offset, 2.0f), dscale(n.channels, offset, kNanF), dbias(n.channels, offset, kNanF);
  batchnorm_train<float>(n, x.data(), scale.data(), bias.data(), nullptr, false, y.data(), mean.data(), inverse.data(),
                  running_mean.data(), running_var.data(), kMomentum, kEps);
  batchnorm_infer(n, x.data(), scale.data(), bias.data(), running_mean.data(), running_var.data(), inferred.data(), kEps);
  batchnorm_backward(n, dy.data(), x.data(), scale.data(), nullptr, mean.data(), inverse.data(), dx.data(), dscale.data(),
                     dbias.data());
  const double count = double(n.batch * n.inner);
  for (std::size_t c = 0; c < n.channels; ++c) {
    double sum = 0, squares = 0, of_dy = 0, of_dyx = 0;
    for_channel(n, c, [&](std::size_t at) { sum += x[at]; });
    const double centre = sum / count;
    for_channel(n, c, [&](std::size_t at) { squares += (x[at] - centre) * (x[at] - centre); });
    const double var = squares / count, std_inverse = 1 / std::sqrt(var + kEps);
    const double tolerance = count == 1 ? 1e-3 : 2e-5 * std::max(1.0f, shift);  // of one element the variance is 0
    for_channel(n, c, [&](std::size_t at) {
      of_dy += dy[at];
      of_dyx += dy[at] * (x[at] - centre) * std_inverse;
      CHECK_NEAR(y[at], (x[at] - centre) * std_inverse * scale[c] + bias[c], tolerance);
      CHECK_NEAR(inferred[at], (x[at] - running_mean[c]) / std::sqrt(running_var[c] + kEps) * scale[c] + bias[c], tolerance);
    });
    for_channel(n, c, [&](std::size_t at) {
      const double normal = (x[at] - centre) * std_inverse;
      const double grad = scale[c] * std_inverse * (dy[at] - of_dy / count - normal * of_dyx / count);
      CHECK_NEAR(dx[at], grad, tolerance * std::max(1.0, std_inverse));
    });
    CHECK_NEAR(mean[c], centre, 1e-6);
    CHECK_NEAR(inverse[c], std_inverse, 1e-4);
    CHECK_NEAR(dbias[c], of_dy, 1e-5 * std::sqrt(count));
    CHECK_NEAR(dscale[c], of_dyx, 2e-5 * std::sqrt(count) * std::max(1.0f, shift));
    CHECK_NEAR(running_mean[c], 0.9 * 0.5 + 0.1 * centre, 1e-6);
    CHECK_NEAR(running_var[c], 0.9 * 2 + 0.1 * (count > 1 ? squares / (count - 1) : 0), 1e-5);
  }
}

}  // namespace

int main() {
  for_threads([] {
    for (std::size_t batch : {1, 2, 5})
      for (std::size_t channels : {1, 3, 16, 40})
        for (std::size_t inner : {1, 7, 16, 121, 1025})
          for (const std::size_t block : {std::size_t(1), std::size_t(8), channels}) {
            if (channels % block != 0) continue;
            test_norm({batch, channels, inner, block}, 0, 0);
            test_norm({batch, channels, inner, block}, 1, 10);
          }
    test_norm({3, 2, 40009}, 1, 0);
    test_norm({0, 0, 0}, 0, 0);
    test_norm({4, 0, 9}, 0, 0);
  });
}
