// SPDX-License-Identifier: Apache-2.0
#include "kernels/conv.h"

#include <vector>

#include "check.h"

using namespace singa_lite;

namespace {

Conv make_conv(std::int64_t batch, std::int64_t channels, std::int64_t outputs, std::int64_t height, std::int64_t width,
               std::int64_t kernel, std::int64_t stride, std::int64_t padding, std::int64_t dilation, std::int64_t groups) {
  // the two axes differ where they can
  Conv c{batch, channels, height, width, outputs, 0, 0, {kernel, kernel > 1 ? kernel - 1 : 1}, {stride, stride},
         {padding, padding / 2}, {dilation, 1}, groups};
  c.out_height = (height + 2 * c.padding[0] - c.dilation[0] * (c.kernel[0] - 1) - 1) / stride + 1;
  c.out_width = (width + 2 * c.padding[1] - c.dilation[1] * (c.kernel[1] - 1) - 1) / stride + 1;
  return c;
}

// Call body(offset in y, in x, in w) for every product of the convolution.
template <class Body>
void for_products(const Conv& c, const Body& body) {
  const std::int64_t in_group = c.channels / c.groups, out_group = c.outputs / c.groups;
  std::size_t y = 0;
  for (std::int64_t n = 0; n < c.batch; ++n)
    for (std::int64_t o = 0; o < c.outputs; ++o)
      for (std::int64_t i = 0; i < c.out_height; ++i)
        for (std::int64_t j = 0; j < c.out_width; ++j, ++y)
          for (std::int64_t k = 0; k < in_group * c.kernel[0] * c.kernel[1]; ++k) {
            const std::int64_t channel = o / out_group * in_group + k / (c.kernel[0] * c.kernel[1]);
            const std::int64_t row = i * c.stride[0] - c.padding[0] + k / c.kernel[1] % c.kernel[0] * c.dilation[0];
            const std::int64_t column = j * c.stride[1] - c.padding[1] + k % c.kernel[1] * c.dilation[1];
            if (row < 0 || row >= c.height || column < 0 || column >= c.width) continue;
            body(y, std::size_t(((n * c.channels + channel) * c.height + row) * c.width + column),
                 std::size_t(o * in_group * c.kernel[0] * c.kernel[1] + k));
          }
}

void compare(const char* what, const Floats& got, const std::vector<double>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (!is_near(got[i], expected[i], 2e-4)) FAIL("%s[%zu] is %.9g, expected %.9g", what, i, got[i], expected[i]);
}

void test_conv(const Conv& c, bool has_bias) {
  const std::size_t plane = std::size_t(c.out_height * c.out_width), offset = 1;
  const Floats x = random_floats(std::size_t(c.batch * c.channels * c.height * c.width), 81, offset),
               w = random_floats(std::size_t(c.outputs * c.channels / c.groups * c.kernel[0] * c.kernel[1]), 82, offset),
               b = random_floats(std::size_t(c.outputs), 83, offset),
               dy = random_floats(std::size_t(c.batch * c.outputs) * plane, 84, offset);
  Floats y(dy.size(), offset, kNanF), dx(x.size(), offset, kNanF), dw(w.size(), offset, kNanF), db(b.size(), offset, kNanF);
  const bool is_done = conv_forward(c, x.data(), w.data(), has_bias ? b.data() : nullptr, y.data()) &&
                       conv_backward_data(c, dy.data(), w.data(), dx.data()) &&
                       conv_backward_weight(c, dy.data(), x.data(), dw.data(), has_bias ? db.data() : nullptr);
#ifdef SINGA_LITE_ONEDNN
  CHECK(is_done);
#else
  CHECK(!is_done);
  return;
#endif
  std::vector<double> y_sums(y.size(), 0), dx_sums(dx.size(), 0), dw_sums(dw.size(), 0), db_sums(db.size(), 0);
  for (std::size_t i = 0; i < y.size(); ++i) {
    const std::size_t output = i / plane % std::size_t(c.outputs);
    y_sums[i] = has_bias ? b[output] : 0;
    db_sums[output] += dy[i];
  }
  for_products(c, [&](std::size_t at_y, std::size_t at_x, std::size_t at_w) {
    y_sums[at_y] += double(x[at_x]) * w[at_w];
    dx_sums[at_x] += double(dy[at_y]) * w[at_w];
    dw_sums[at_w] += double(dy[at_y]) * x[at_x];
  });
  compare("y", y, y_sums);
  compare("dx", dx, dx_sums);
  compare("dw", dw, dw_sums);
  if (has_bias) compare("db", db, db_sums);
}

}  // namespace

int main() {
  for_threads([] {
    for (bool has_bias : {false, true}) {
      test_conv(make_conv(1, 1, 1, 1, 1, 1, 1, 0, 1, 1), has_bias);
      test_conv(make_conv(3, 1, 20, 28, 28, 5, 1, 0, 1, 1), has_bias);  // channels last
      test_conv(make_conv(2, 20, 50, 12, 12, 5, 1, 0, 1, 1), has_bias);
      test_conv(make_conv(2, 3, 64, 17, 19, 7, 2, 3, 1, 1), has_bias);   // few channels: plain
      test_conv(make_conv(2, 16, 32, 9, 11, 3, 1, 1, 1, 1), has_bias);   // full blocks
      test_conv(make_conv(2, 7, 5, 9, 11, 3, 2, 1, 2, 1), has_bias);     // dilation
      test_conv(make_conv(2, 6, 9, 10, 7, 3, 1, 2, 2, 3), has_bias);     // groups
      test_conv(make_conv(2, 8, 8, 9, 9, 3, 1, 1, 1, 8), has_bias);      // depthwise
      test_conv(make_conv(2, 16, 24, 5, 5, 1, 1, 0, 1, 1), has_bias);    // pointwise
      test_conv(make_conv(1, 4, 4, 3, 3, 3, 3, 2, 1, 1), has_bias);      // stride and padding beyond the image
    }
  });
}
