// SPDX-License-Identifier: Apache-2.0
#include "kernels/conv.h"

#include <vector>

#include "check.h"
#include "common/bfloat16.h"
#include "kernels/layout.h"
#include "kernels/winograd.h"

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

bool run_all(const Conv& c, const void* x, const void* w, const float* b, const void* dy, void* y, void* dx, float* dw,
             float* db) {
  return conv_forward(c, x, w, b, y) && conv_backward_data(c, dy, w, dx) && conv_backward_weight(c, dy, x, dw, db);
}

void test_conv(const Conv& c, bool has_bias, decltype(run_all)* run = run_all) {
  const std::size_t plane = std::size_t(c.out_height * c.out_width), offset = 1;
  const Floats x = random_floats(std::size_t(c.batch * c.channels * c.height * c.width), 81, offset),
               w = random_floats(std::size_t(c.outputs * c.channels / c.groups * c.kernel[0] * c.kernel[1]), 82, offset),
               b = random_floats(std::size_t(c.outputs), 83, offset),
               dy = random_floats(std::size_t(c.batch * c.outputs) * plane, 84, offset);
  Floats y(dy.size(), offset, kNanF), dx(x.size(), offset, kNanF), dw(w.size(), offset, kNanF), db(b.size(), offset, kNanF);
  const bool is_done = run(c, x.data(), w.data(), has_bias ? b.data() : nullptr, dy.data(), y.data(), dx.data(), dw.data(),
                           has_bias ? db.data() : nullptr);
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

#ifdef SINGA_LITE_ONEDNN

bool run_all_by_winograd(const Conv& c, const void* x, const void* w, const float* b, const void* dy, void* y, void* dx,
                         float* dw, float* db) {
  return winograd_forward(c, x, w, b, y) && winograd_backward_data(c, dy, w, dx) &&
         winograd_backward_weight(c, dy, x, dw, db);
}

template <class T>
bool are_equal(const Array<T>& a, const Array<T>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

struct Results {
  Floats y, dx, dw, db;
  explicit Results(const Conv& c)
      : y(std::size_t(c.batch * c.outputs * c.out_height * c.out_width), 0, kNanF),
        dx(std::size_t(c.batch * c.channels * c.height * c.width), 0, kNanF),
        dw(std::size_t(c.outputs * c.channels * 9), 0, kNanF),
        db(std::size_t(c.outputs), 0, kNanF) {}
};

// Images in blocks, and of bfloat16 numbers, must give the bits that plain ones of float give.
void test_winograd(const Conv& c) {
  CHECK(has_winograd(c));
  for (bool has_bias : {false, true}) test_conv(c, has_bias, run_all_by_winograd);
  Conv plain = c;
  plain.relu = true;
  Results expected(c);
  const auto rounded = [](std::size_t count, std::uint64_t seed) {
    Floats made = random_floats(count, seed);
    for (std::size_t i = 0; i < count; ++i) made[i] = Bfloat16(made[i]);
    return made;
  };
  const Floats x = rounded(expected.dx.size(), 91), w = rounded(expected.dw.size(), 92), b = rounded(expected.db.size(), 93),
               dy = rounded(expected.y.size(), 94);
  run_all_by_winograd(plain, x.data(), w.data(), b.data(), dy.data(), expected.y.data(), expected.dx.data(),
                      expected.dw.data(), expected.db.data());
  for (std::size_t i = 0; i < expected.y.size(); ++i) CHECK(expected.y[i] >= 0);

  const Image of_x{c.batch, c.channels, c.height, c.width}, of_y{c.batch, c.outputs, c.out_height, c.out_width};
  for (const auto& [x_block, y_block] : {std::pair<std::int64_t, std::int64_t>{8, 8}, {c.channels, 1}, {1, c.outputs}}) {
    Conv in_blocks = plain;
    in_blocks.x_block = x_block, in_blocks.y_block = y_block;
    Results given(c), got(c);
    reorder(of_x, x.data(), 1, given.dx.data(), x_block);
    reorder(of_y, dy.data(), 1, given.y.data(), y_block);
    Results blocked(c);
    run_all_by_winograd(in_blocks, given.dx.data(), w.data(), b.data(), given.y.data(), blocked.y.data(), blocked.dx.data(),
                        got.dw.data(), got.db.data());
    reorder(of_x, blocked.dx.data(), x_block, got.dx.data(), 1);
    reorder(of_y, blocked.y.data(), y_block, got.y.data(), 1);
    CHECK(are_equal(got.y, expected.y) && are_equal(got.dx, expected.dx));
    CHECK(are_equal(got.dw, expected.dw) && are_equal(got.db, expected.db));
  }

  const auto narrow = [](const Floats& from) {
    Array<Bfloat16> made(from.size());
    for (std::size_t i = 0; i < from.size(); ++i) made[i] = Bfloat16(from[i]);
    return made;
  };
  plain.is_bfloat16 = true;
  const Array<Bfloat16> x16 = narrow(x), w16 = narrow(w), dy16 = narrow(dy);
  Array<Bfloat16> y16(dy.size()), dx16(x.size());
  Results got(c);
  run_all_by_winograd(plain, x16.data(), w16.data(), b.data(), dy16.data(), y16.data(), dx16.data(), got.dw.data(),
                      got.db.data());
  CHECK(are_equal(y16, narrow(expected.y)) && are_equal(dx16, narrow(expected.dx)));
  CHECK(are_equal(got.dw, expected.dw) && are_equal(got.db, expected.db));
}

Conv make_3x3(std::int64_t batch, std::int64_t channels, std::int64_t outputs, std::int64_t height, std::int64_t width,
              std::int64_t rows_around, std::int64_t columns_around) {
  return {batch, channels, height, width, outputs, height + 2 * rows_around - 2, width + 2 * columns_around - 2, {3, 3},
          {1, 1}, {rows_around, columns_around}, {1, 1}, 1};
}

#endif

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
      test_conv(make_conv(2, 256, 384, 5, 5, 3, 2, 1, 1, 1), has_bias);  // dw is put in order by parts of 128 rows
      test_conv(make_conv(1, 512, 512, 4, 4, 3, 1, 1, 1, 2), has_bias);  // and of a group
    }
#ifdef SINGA_LITE_ONEDNN
    test_winograd(make_3x3(2, 64, 64, 8, 8, 1, 1));
    test_winograd(make_3x3(3, 8, 40, 7, 9, 1, 1));    // tiles partly outside
    test_winograd(make_3x3(1, 48, 16, 5, 6, 0, 2));   // paddings that differ
    test_winograd(make_3x3(5, 16, 8, 3, 3, 0, 0));    // one result an image
    test_winograd(make_3x3(1, 8, 8, 1, 1, 1, 2));     // one pixel an image
    test_winograd(make_3x3(3, 8, 16, 32, 33, 1, 1));  // more tiles than three threads transform at a time
    Conv too_large = make_3x3(2, 8, 8, 8, 8, 1, 1);
    too_large.out_width = 9;
    CHECK(!has_winograd(too_large));
    Conv other = make_3x3(2, 16, 16, 9, 9, 1, 1);
    CHECK(has_winograd(other));
    other.groups = 2;
    CHECK(!has_winograd(other));
    other.groups = 1, other.dilation[1] = 2, other.padding[1] = 2;
    CHECK(!has_winograd(other));
    other = make_3x3(2, 16, 16, 9, 9, 1, 1);
    other.stride[0] = 2, other.out_height = 5;
    CHECK(!has_winograd(other));
    CHECK(!has_winograd(make_3x3(2, 12, 16, 9, 9, 1, 1)) && !has_winograd(make_3x3(2, 16, 12, 9, 9, 1, 1)));
#endif
  });
}
