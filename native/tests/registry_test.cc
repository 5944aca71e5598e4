// SPDX-License-Identifier: Apache-2.0
// Registered kernels on arrays with nothing behind them, called as a binding calls them.
#include "kernels/registry.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "check.h"

using namespace singa_lite;

namespace {

template <class T>
View view_of(Array<T>& array, const Shape& shape, char type) {
  View view{array.data(), type, shape, Shape(shape.size()), true, true};
  std::int64_t bytes = sizeof(T);
  for (std::size_t axis = shape.size(); axis-- > 0; bytes *= shape[axis]) view.strides[axis] = bytes;
  return view;
}

void run(const char* name, Call call) {
  const Step step = registered_kernels().at(name)(call);
  if (!step) FAIL("%s did not take the call", name);
  CHECK(step());
}

void test_gather(std::size_t size, std::size_t count, std::size_t after) {
  Random random(3);
  Floats x = random_floats(2 * size * after, 1), y(2 * count * after, 0, kNanF), dx(2 * size * after, 0, kNanF);
  Array<std::int32_t> ids(count);
  for (std::size_t i = 0; i < count; ++i) ids[i] = std::int32_t(random.below(size));
  const auto p = std::int64_t(size), c = std::int64_t(count), a = std::int64_t(after);
  run("gather", {{view_of(x, {2, p, a}, 'f'), view_of(ids, {c}, 'i')}, {view_of(y, {2, c, a}, 'f')}, {{"axis", {1}}}});
  run("gather_backward",
      {{view_of(y, {2, c, a}, 'f'), view_of(ids, {c}, 'i')}, {view_of(dx, {2, p, a}, 'f')}, {{"axis", {1}}}});
  std::vector<double> uses(size);
  for (std::size_t i = 0; i < count; ++i) uses[std::size_t(ids[i])] += 1;
  for (std::size_t i = 0; i < y.size(); ++i) {
    const std::size_t position = std::size_t(ids[i / after % count]);
    CHECK_NEAR(y[i], x[(i / after / count * size + position) * after + i % after], 0);
  }
  for (std::size_t i = 0; i < dx.size(); ++i) CHECK_NEAR(dx[i], x[i] * uses[i / after % size], 1e-5);
  if (count == 0) return;
  ids[count - 1] = std::int32_t(size);  // out of range
  const Step step = registered_kernels().at("gather")(
      {{view_of(x, {2, p, a}, 'f'), view_of(ids, {c}, 'i')}, {view_of(y, {2, c, a}, 'f')}, {{"axis", {1}}}});
  CHECK(step && !step());
}

void test_layer_norm(std::size_t rows, std::size_t columns) {
  Floats x = random_floats(rows * columns, 1), dy = random_floats(rows * columns, 2), scale = random_floats(columns, 3);
  Floats bias = random_floats(columns, 4), y(rows * columns, 0, kNanF), mean(rows), factor(rows);
  Floats dx(rows * columns, 0, kNanF), dscale(columns, 0, kNanF), dbias(columns, 0, kNanF);
  const auto r = std::int64_t(rows), c = std::int64_t(columns);
  const View xs = view_of(x, {r, c}, 'f'), scales = view_of(scale, {c}, 'f');
  const View means = view_of(mean, {r}, 'f'), factors = view_of(factor, {r}, 'f');
  run("layer_norm",
      {{xs, scales, view_of(bias, {c}, 'f')}, {view_of(y, {r, c}, 'f'), means, factors}, {{"eps", {1e-3}}}});
  run("layer_norm_backward",
      {{view_of(dy, {r, c}, 'f'), xs, scales, means, factors},
       {view_of(dx, {r, c}, 'f'), view_of(dscale, {c}, 'f'), view_of(dbias, {c}, 'f')}, {}});
  for (std::size_t i = 0; i < columns; ++i) {
    double sum = 0, product = 0;
    for (std::size_t row = 0; row < rows; ++row) {
      sum += dy[row * columns + i];
      product += dy[row * columns + i] * (double(x[row * columns + i]) - mean[row]) * factor[row];
    }
    CHECK_NEAR(dbias[i], sum, 1e-4);
    CHECK_NEAR(dscale[i], product, 1e-4);
  }
  for (std::size_t row = 0; row < rows; ++row) {
    double total = 0;
    for (std::size_t i = 0; i < columns; ++i) total += x[row * columns + i];
    CHECK_NEAR(mean[row], total / double(columns), 1e-6);
    double along = 0;  // a row's gradient is at right angles to (1, ..., 1)
    for (std::size_t i = 0; i < columns; ++i) along += dx[row * columns + i];
    CHECK_NEAR(along, 0, 1e-4 * double(columns));
  }
}

void test_transpose(std::int64_t rows, std::int64_t columns) {
  Floats x = random_floats(std::size_t(2 * rows * columns), 1), y(x.size(), 0, kNanF);
  run("transpose",
      {{view_of(x, {2, rows, columns}, 'f')}, {view_of(y, {2, columns, rows}, 'f')}, {{"axes", {0, 2, 1}}}});
  for (std::int64_t i = 0; i < 2 * rows * columns; ++i) {
    const std::int64_t matrix = i / (rows * columns), row = i / columns % rows, column = i % columns;
    CHECK_NEAR(y[std::size_t((matrix * columns + column) * rows + row)], x[std::size_t(i)], 0);
  }
}

// Along the middle one of three axes.
void test_softmax(std::int64_t before, std::int64_t count, std::int64_t after) {
  const auto size = std::size_t(before * count * after), step = std::size_t(after);
  Floats x = random_floats(size, 1), dy = random_floats(size, 2), y(size, 0, kNanF), dx(size, 0, kNanF);
  for (std::size_t i = 0; i < size; ++i) x[i] *= 30;
  const Shape shape{before, count, after};
  const View of_y = view_of(y, shape, 'f');
  run("softmax", {{view_of(x, shape, 'f')}, {of_y}, {{"axis", {1}}}});
  run("softmax_backward", {{view_of(dy, shape, 'f'), of_y}, {view_of(dx, shape, 'f')}, {{"axis", {-2}}}});
  for (std::size_t i = 0; i < size; ++i) {
    const std::size_t first = i / (std::size_t(count) * step) * std::size_t(count) * step + i % step;
    double most = x[first], total = 0, product = 0;
    for (std::size_t k = 0; k < std::size_t(count); ++k) most = std::max(most, double(x[first + k * step]));
    for (std::size_t k = 0; k < std::size_t(count); ++k) {
      total += std::exp(x[first + k * step] - most);
      product += double(dy[first + k * step]) * y[first + k * step];
    }
    CHECK_NEAR(y[i], std::exp(x[i] - most) / total, 1e-6);
    CHECK_NEAR(dx[i], y[i] * (dy[i] - product), 1e-6);
  }
}

void test_mse(std::size_t size) {
  Floats x = random_floats(size, 1), t = random_floats(size, 2), loss(1), dy(1, 0, 3.0f), dx(size, 0, kNanF);
  const Shape shape{std::int64_t(size)};
  const View xs = view_of(x, shape, 'f'), ts = view_of(t, shape, 'f');
  run("mse_loss", {{xs, ts}, {view_of(loss, {1}, 'f')}, {}});
  run("mse_loss_backward", {{view_of(dy, {1}, 'f'), xs, ts}, {view_of(dx, shape, 'f')}, {}});
  double total = 0;
  for (std::size_t i = 0; i < size; ++i) {
    total += (double(x[i]) - t[i]) * (double(x[i]) - t[i]);
    CHECK_NEAR(dx[i], 6 * (double(x[i]) - t[i]) / double(size), 1e-6);
  }
  CHECK_NEAR(loss[0], total / double(size), 1e-6);
}

// Rows of y are averages of those of v, by the softmax of scores, and gradients of v add up to those of y.
void test_attention(std::int64_t heads, std::int64_t length, std::int64_t d, bool is_causal) {
  const std::int64_t width = heads * d;
  Floats qkv = random_floats(std::size_t(2 * length * 3 * width), 1), y(std::size_t(2 * length * width), 0, kNanF);
  Floats dy = random_floats(y.size(), 2), dqkv(qkv.size(), 0, kNanF);
  const View x = view_of(qkv, {2, length, 3 * width}, 'f'), ys = view_of(y, {2, length, width}, 'f');
  const std::map<std::string, std::vector<double>> options{{"num_heads", {double(heads)}}, {"causal", {double(is_causal)}}};
  run("attention", {{x}, {ys}, options});
  run("attention_backward",
      {{view_of(dy, {2, length, width}, 'f'), x}, {view_of(dqkv, {2, length, 3 * width}, 'f')}, options});
  for (std::int64_t row = 0; row < 2 * heads * length; ++row) {
    const std::int64_t query = row % length, head = row / length % heads, batch = row / length / heads;
    double total = 0, dot = 0, expected = 0;
    for (std::int64_t key = 0; key < (is_causal ? query + 1 : length); ++key) {
      const float* const keys = &qkv[std::size_t(((batch * length + key) * 3 + 1) * width + head * d)];
      const float* const queries = &qkv[std::size_t((batch * length + query) * 3 * width + head * d)];
      double score = 0;
      for (std::int64_t i = 0; i < d; ++i) score += double(queries[i]) * keys[i];
      const double weight = std::exp(score / std::sqrt(double(d)));
      total += weight;
      expected += weight * keys[width];
    }
    CHECK_NEAR(y[std::size_t((batch * length + query) * width + head * d)], expected / total, 1e-4);
    for (std::int64_t i = 0; i < d; ++i) dot += dqkv[std::size_t((batch * length + query) * 3 * width + head * d + i)];
    CHECK(dot == dot);
  }
  for (std::int64_t i = 0; i < width; ++i) {  // the weights of a query add up to 1: so do what the values get of dy
    double got = 0, given = 0;
    for (std::int64_t at = 0; at < 2 * length; ++at) {
      got += dqkv[std::size_t(at * 3 * width + 2 * width + i)];
      given += dy[std::size_t(at * width + i)];
    }
    CHECK_NEAR(got, given, 1e-3);
  }
}

#ifdef SINGA_LITE_ONEDNN
// A GRU of one layer against its formulas; all kinds of stacks touch no memory but their own.
void test_recurrent(const char* mode, std::int64_t gates, std::int64_t kept, std::int64_t hidden, std::int64_t layers,
                    bool is_bidirectional) {
  const std::int64_t steps = 4, batch = 3, input = 5, directions = is_bidirectional ? 2 : 1, rows = gates * hidden;
  const std::int64_t cells = layers * directions, width = directions * hidden;
  const std::int64_t matrices = directions * rows * (input + hidden + (layers - 1) * (width + hidden));
  const auto of = [](std::int64_t count, std::uint64_t seed) { return random_floats(std::size_t(count), seed); };
  Floats x = of(steps * batch * input, 1), w = of(matrices + 2 * cells * rows, 2), h = of(cells * batch * hidden, 3);
  Floats c = of(cells * batch * hidden, 4), dy = of(steps * batch * width, 5), y(dy.size()), last_h(h.size());
  Floats last_c(c.size()), dx(x.size()), dw(w.size()), dh(h.size()), dc(c.size());
  Array<unsigned char> reserve(std::size_t(4 * (cells * steps * batch * (rows + kept * hidden) +
                                                (layers - 1) * steps * batch * width)));
  const Shape of_state{cells, batch, hidden}, of_x{steps, batch, input}, of_y{steps, batch, width};
  const View state = view_of(h, of_state, 'f'), cell = view_of(c, of_state, 'f');
  const View in = view_of(x, of_x, 'f'), weights = view_of(w, {std::int64_t(w.size())}, 'f');
  const View space = view_of(reserve, {std::int64_t(reserve.size())}, 'B');
  Call call{{in, weights, state}, {view_of(y, of_y, 'f'), view_of(last_h, of_state, 'f')}, {}, {}};
  call.attributes = {{"mode", {}}, {"lengths", {}}, {"hidden_size", {double(hidden)}}, {"num_layers", {double(layers)}},
                     {"bidirectional", {double(is_bidirectional)}}, {"bias", {1}}};
  call.words = {{"mode", mode}, {"lengths", ""}};
  Call back{{view_of(dy, of_y, 'f'), state}, {view_of(dw, {std::int64_t(w.size())}, 'f'), view_of(dh, of_state, 'f')},
            call.attributes, call.words};
  const bool is_lstm = gates == 4;
  if (is_lstm) call.inputs.push_back(cell), call.outputs.push_back(view_of(last_c, of_state, 'f')), back.inputs.push_back(cell);
  if (is_lstm) back.outputs.push_back(view_of(dc, of_state, 'f'));
  run("recurrent", call);  // without a reserve
  Floats alone(y.size());
  std::copy_n(y.data(), y.size(), alone.data());
  call.outputs.push_back(space);
  run("recurrent", call);
  for (std::size_t i = 0; i < y.size(); ++i) CHECK_NEAR(y[i], alone[i], 0);
  back.inputs.insert(back.inputs.end(), {in, weights, state});
  if (is_lstm) back.inputs.push_back(cell);
  back.inputs.push_back(view_of(y, of_y, 'f'));
  back.outputs.insert(back.outputs.end(), {space, view_of(dx, of_x, 'f')});
  run("recurrent_backward", back);
  for (std::size_t i = 0; i < dw.size(); ++i) CHECK(std::isfinite(dw[i]));
  if (std::string(mode) != "gru" || cells != 1) return;
  const auto sum_of = [&](std::size_t row, const float* at, std::size_t count, std::size_t start) {
    double sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += double(w[start + row * count + i]) * at[i];
    return sum;
  };
  const auto n = std::size_t(hidden), all = std::size_t(rows), in_size = std::size_t(input), biases = std::size_t(matrices);
  for (std::size_t b = 0; b < std::size_t(batch); ++b)
    for (std::size_t j = 0; j < n; ++j) {  // the first step
      const float *const xs = &x[b * in_size], *const hs = &h[b * n];
      const auto gate = [&](std::size_t row) {
        const double sum = sum_of(row, xs, in_size, 0) + w[biases + row];
        return 1 / (1 + std::exp(-sum - sum_of(row, hs, n, all * in_size) - w[biases + all + row]));
      };
      const double of_h = sum_of(2 * n + j, hs, n, all * in_size) + w[biases + all + 2 * n + j];
      const double candidate = std::tanh(sum_of(2 * n + j, xs, in_size, 0) + w[biases + 2 * n + j] + gate(j) * of_h);
      CHECK_NEAR(y[b * n + j], (1 - gate(n + j)) * candidate + gate(n + j) * hs[j], 1e-5);
    }
}
#endif

}  // namespace

int main() {
#ifdef SINGA_LITE_ONEDNN
  for (const std::int64_t hidden : {1, 7, 40})
    for (const std::int64_t layers : {1, 3})
      for (const bool is_bidirectional : {false, true}) {
        test_recurrent("tanh", 1, 0, hidden, layers, is_bidirectional);
        test_recurrent("relu", 1, 0, hidden, layers, is_bidirectional);
        test_recurrent("lstm", 4, 2, hidden, layers, is_bidirectional);
        test_recurrent("gru", 3, 1, hidden, layers, is_bidirectional);
      }
#endif
  for_threads([] {
    for (const std::size_t after : {1, 3, 16, 700}) {
      test_gather(5, 40, after);
      test_gather(1, 1, after);
      test_gather(9, 0, after);
      test_layer_norm(3, after);
      test_layer_norm(150, after);
      test_softmax(40, std::int64_t(after), 1);
      test_softmax(3, 7, std::int64_t(after));
      for (const bool is_causal : {false, true}) test_attention(3, std::int64_t(after), 5, is_causal);
    }
    for (const std::size_t size : {1, 511, 512, 513, 40000}) test_mse(size);
    for (const std::int64_t size : {1, 15, 16, 17, 130}) {
      test_transpose(size, 33);
      test_transpose(64, size);
    }
  });
}
