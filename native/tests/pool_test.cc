// SPDX-License-Identifier: Apache-2.0
#include "kernels/pool.h"

#include <vector>

#include "check.h"

using namespace singa_lite;

namespace {

Pool make_pool(std::int64_t planes, std::int64_t height, std::int64_t width, std::int64_t kernel_h, std::int64_t kernel_w,
               std::int64_t stride_h, std::int64_t stride_w, std::int64_t padding_h, std::int64_t padding_w) {
  Pool p{planes, height, width, 0, 0, {kernel_h, kernel_w}, {stride_h, stride_w}, {padding_h, padding_w}, false};
  p.out_height = (height + 2 * padding_h - kernel_h) / stride_h + 1;
  p.out_width = (width + 2 * padding_w - kernel_w) / stride_w + 1;
  return p;
}

// Call body(output, input or -1 in the padding, number in the window) for every cell of every window.
template <class Body>
void for_cells(const Pool& p, const Body& body) {
  std::size_t out = 0;
  for (std::int64_t plane = 0; plane < p.planes; ++plane)
    for (std::int64_t i = 0; i < p.out_height; ++i)
      for (std::int64_t j = 0; j < p.out_width; ++j, ++out)
        for (std::int64_t number = 0; number < p.kernel[0] * p.kernel[1]; ++number) {
          const std::int64_t r = i * p.stride[0] - p.padding[0] + number / p.kernel[1];
          const std::int64_t c = j * p.stride[1] - p.padding[1] + number % p.kernel[1];
          const bool is_inside = r >= 0 && r < p.height && c >= 0 && c < p.width;
          body(out, is_inside ? (plane * p.height + r) * p.width + c : -1, number);
        }
}

std::size_t inputs(const Pool& p) { return std::size_t(p.planes * p.height * p.width); }
std::size_t outputs(const Pool& p) { return std::size_t(p.planes * p.out_height * p.out_width); }

template <class Index>
void test_max(const Pool& p, const Floats& x, std::size_t offset) {
  const Floats dy = random_floats(outputs(p), 62, offset);
  Floats y(outputs(p), offset, 77.0f), dx(inputs(p), offset, 77.0f);
  Array<Index> indices(outputs(p), offset, Index(99));
  max_pool(p, x.data(), y.data(), indices.data());
  max_pool_backward(p, dy.data(), indices.data(), dx.data());

  std::vector<double> best(outputs(p), -double(kInfF)), grads(inputs(p), 0);
  for_cells(p, [&](std::size_t out, std::int64_t in, std::int64_t) {
    if (in >= 0 && (x[std::size_t(in)] > best[out] || std::isnan(x[std::size_t(in)]))) best[out] = x[std::size_t(in)];
  });
  std::vector<std::int64_t> first(outputs(p), -1);  // the first cell that holds the maximum
  for_cells(p, [&](std::size_t out, std::int64_t in, std::int64_t number) {
    if (in >= 0 && first[out] < 0 && double(x[std::size_t(in)]) == best[out]) first[out] = number;
    if (in >= 0 && number == std::int64_t(indices[out])) grads[std::size_t(in)] += dy[out];
  });
  for (std::size_t o = 0; o < y.size(); ++o) {
    CHECK_NEAR(y[o], best[o], 0);
    CHECK(std::int64_t(indices[o]) >= 0 && std::int64_t(indices[o]) < p.kernel[0] * p.kernel[1]);
    if (std::isfinite(best[o])) CHECK_EQUAL(indices[o], first[o]);
  }
  for (std::size_t i = 0; i < dx.size(); ++i) CHECK_NEAR(dx[i], grads[i], 1e-6);
}

void test_avg(Pool p, const Floats& x, std::size_t offset) {
  const Floats dy = random_floats(outputs(p), 63, offset);
  for (bool count_include_pad : {false, true}) {
    p.count_include_pad = count_include_pad;
    Floats y(outputs(p), offset, kNanF), dx(inputs(p), offset, kNanF);
    avg_pool(p, x.data(), y.data());
    avg_pool_backward(p, dy.data(), dx.data());
    std::vector<double> sums(outputs(p), 0), counts(outputs(p), 0), grads(inputs(p), 0);
    for_cells(p, [&](std::size_t out, std::int64_t in, std::int64_t) {
      if (in >= 0) sums[out] += x[std::size_t(in)];
      if (in >= 0 || count_include_pad) ++counts[out];
    });
    for_cells(p, [&](std::size_t out, std::int64_t in, std::int64_t) {
      if (in >= 0) grads[std::size_t(in)] += dy[out] / counts[out];
    });
    for (std::size_t o = 0; o < y.size(); ++o) CHECK_NEAR(y[o], sums[o] / counts[o], 1e-5);
    for (std::size_t i = 0; i < dx.size(); ++i) CHECK_NEAR(dx[i], grads[i], 1e-5);
  }
}

void test_pool(const Pool& p) {
  for (std::size_t offset : {0, 1}) {
    const Floats x = random_floats(inputs(p), 61, offset);
    test_max<std::uint8_t>(p, x, offset);
    test_max<std::int32_t>(p, x, offset);
    test_avg(p, x, offset);
    Floats few = random_floats(inputs(p), 64, offset);  // equals, infinities and NaNs
    for (std::size_t i = 0; i < few.size(); ++i) few[i] = i % 13 == 0 ? kNanF : i % 5 == 0 ? -kInfF : few[i] < 0 ? 1 : 2;
    test_max<std::uint8_t>(p, few, offset);
    test_max<std::int32_t>(p, few, offset);
    test_max<std::int32_t>(p, Floats(inputs(p), offset, -kInfF), offset);
  }
}

}  // namespace

int main() {
  for_threads([] {
    for (std::int64_t width = 2; width <= 21; ++width)  // the four at a time of 2x2, and what is left of them
      for (std::int64_t height : {2, 3, 5}) test_pool(make_pool(3, height, width, 2, 2, 2, 2, 0, 0));
    test_pool(make_pool(0, 4, 4, 2, 2, 2, 2, 0, 0));
    test_pool(make_pool(0, 4, 4, 3, 3, 2, 2, 1, 1));
    test_pool(make_pool(50, 24, 24, 2, 2, 2, 2, 0, 0));
    test_pool(make_pool(4, 9, 11, 3, 3, 2, 2, 1, 1));
    test_pool(make_pool(40, 17, 19, 3, 3, 1, 1, 1, 1));
    test_pool(make_pool(2, 9, 8, 2, 2, 2, 2, 1, 1));
    test_pool(make_pool(2, 9, 8, 2, 3, 3, 1, 0, 2));
    test_pool(make_pool(2, 7, 7, 7, 7, 1, 1, 0, 0));
    test_pool(make_pool(2, 1, 1, 1, 1, 1, 1, 0, 0));
    test_pool(make_pool(1, 3, 3, 5, 4, 4, 2, 4, 3));
    test_pool(make_pool(1, 20, 20, 16, 16, 3, 5, 15, 15));
    test_pool(make_pool(3, 10, 10, 2, 2, 5, 7, 0, 0));  // gaps between the windows
    test_pool(make_pool(2, 3, 600, 3, 3, 1, 1, 1, 1));
    test_pool(make_pool(2, 3, 1031, 2, 5, 1, 2, 1, 2));
  });
}
