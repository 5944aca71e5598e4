// SPDX-License-Identifier: Apache-2.0
// Kernels of transformers on bfloat16 arrays with nothing behind them, beside the same kernels on the widened numbers.
#include <vector>

#include "kernels/matmul.h"
#include "kernels/registry.h"

#include "check.h"

using namespace singa_lite;

namespace {

constexpr double kUnit = 0x1p-7;  // two roundings, of the first result and of what it is compared with

// An array in float and in bfloat16: inputs have the same numbers, results are filled by a call each.
struct Pair {
  Array<Bfloat16> narrow;
  Floats wide;
  Shape shape;

  Pair(const Shape& shape, std::uint64_t seed) : narrow(count(shape)), wide(count(shape)), shape(shape) {
    Random random(seed);
    for (std::size_t i = 0; i < wide.size(); ++i) {
      narrow[i] = Bfloat16(random.uniform());
      wide[i] = narrow[i];
    }
  }
  static std::size_t count(const Shape& shape) {
    std::size_t all = 1;
    for (const std::int64_t size : shape) all *= std::size_t(size);
    return all;
  }
  View view(bool is_narrow) {
    View made{is_narrow ? static_cast<void*>(narrow.data()) : wide.data(), is_narrow ? 'E' : 'f', shape,
              Shape(shape.size()), true, true};
    std::int64_t bytes = is_narrow ? 2 : 4;
    for (std::size_t axis = shape.size(); axis-- > 0; bytes *= shape[axis]) made.strides[axis] = bytes;
    return made;
  }
};

// Run a kernel on bfloat16 arrays and on float ones, which give the same to rounding. Letters say which are float in both: 'f'.
void compare(const char* name, std::vector<Pair*> inputs, const char* input_types, std::vector<Pair*> outputs,
             const char* output_types, const std::map<std::string, std::vector<double>>& attributes) {
  std::vector<std::vector<float>> found(outputs.size());
  for (const bool is_narrow : {true, false}) {
    Call call{{}, {}, attributes};
    for (std::size_t i = 0; i < inputs.size(); ++i) call.inputs.push_back(inputs[i]->view(is_narrow && input_types[i] == 'E'));
    for (std::size_t i = 0; i < outputs.size(); ++i)
      call.outputs.push_back(outputs[i]->view(is_narrow && output_types[i] == 'E'));
    const Step step = registered_kernels().at(name)(call);
    if (!step) FAIL("%s did not take the call", name);
    CHECK(step());
    for (std::size_t i = 0; i < outputs.size(); ++i)
      for (std::size_t j = 0; j < outputs[i]->wide.size(); ++j) {
        const float value = is_narrow && output_types[i] == 'E' ? float(outputs[i]->narrow[j]) : outputs[i]->wide[j];
        if (is_narrow) found[i].push_back(value);
        else CHECK_NEAR(found[i][j], value, kUnit);
      }
  }
}

void test_attention(std::int64_t queries, std::int64_t keys, std::int64_t d, bool is_causal) {
  constexpr std::int64_t kBatch = 2, kHeads = 2;
  const std::int64_t width = kHeads * d;
  const bool is_own = queries == keys;
  Pair x({kBatch, queries, is_own ? 3 * width : width}, 1), memory({kBatch, keys, 2 * width}, 2);
  Pair y({kBatch, queries, width}, 3), dx(x.shape, 4), dmemory(memory.shape, 5);
  std::vector<Pair*> projections{&x}, gradients{&dx};
  if (!is_own) projections.push_back(&memory), gradients.push_back(&dmemory);
  const std::string types(projections.size(), 'E');
  const std::map<std::string, std::vector<double>> options{{"num_heads", {kHeads}}, {"causal", {double(is_causal)}}};
  compare("attention", projections, types.c_str(), {&y}, "E", options);
  for (std::size_t i = 0; i < y.wide.size(); ++i) y.wide[i] = y.narrow[i];  // the gradient of y
  projections.insert(projections.begin(), &y);
  compare("attention_backward", projections, ("E" + types).c_str(), gradients, types.c_str(), options);
}

void test_norms(std::int64_t rows, std::int64_t columns) {
  Pair x({rows, columns}, 1), dy({rows, columns}, 2), addend({rows, columns}, 3), y({rows, columns}, 4);
  Pair scale({columns}, 5), shift({columns}, 6), mean({rows}, 7), factor({rows}, 8), dscale({columns}, 9), dshift({columns}, 10);
  for (const char* type : {"Eff", "fff"})
    compare("layer_norm", {&x, &scale, &shift}, type, {&y, &mean, &factor}, "Eff", {{"eps", {0.1}}});
  compare("layer_norm_backward", {&dy, &x, &scale, &mean, &factor}, "EEfff", {&y, &dscale, &dshift}, "Eff", {});
  compare("layer_norm_backward_add", {&dy, &x, &scale, &mean, &factor, &addend}, "EEfffE", {&y, &dscale, &dshift}, "Eff", {});
}

#ifdef SINGA_LITE_ONEDNN

void test_rows(std::int64_t m, std::int64_t n, std::int64_t k) {
  Pair a({m, k}, 1), b({k, n}, 2), b_turned({n, k}, 3), bias({n}, 4), other({m, n}, 5), y({m, n}, 6), z({m, n}, 7);
  Pair scale({n}, 8), shift({n}, 9), mean({m}, 10), factor({m}, 11);
  for (const char* types : {"EE", "Ef", "fE", "ff"}) {  // of results
    compare("matmul_gelu", {&a, &b, &bias}, "EEf", {&y, &z}, types, {});
    compare("matmul_add_norm", {&a, &b, &bias, &other, &scale, &shift}, types[0] == 'E' ? "EEffff" : "EEfEff",
            {&y, &z, &mean, &factor}, (std::string(types) + "ff").c_str(), {{"eps", {0.1}}});
  }
  for (const char* type : {"E", "f"}) {
    compare("matmul_add", {&a, &b, &bias, &other}, "EEfE", {&y}, type, {});
    compare("matmul_mul", {&a, &b, &other}, "EEE", {&y}, type, {{"transpose_b", {0}}});
    compare("matmul_mul", {&a, &b_turned, &other}, "EEf", {&y}, type, {{"transpose_b", {1}}});
  }
}

void test_product(const Matmul& p) {
  Pair a({p.batch, p.m, p.k}, 1), b({p.batch, p.k, p.n}, 2), y({p.batch, p.m, p.n}, 3);
  Floats bias = random_floats(std::size_t(p.n), 4), sums(y.wide.size());
  CHECK(matmul(p, a.wide.data(), b.wide.data(), y.wide.data()));
  CHECK(matmul(p, a.narrow.data(), b.narrow.data(), bias.data(), true, y.narrow.data()));
  CHECK(matmul(p, a.narrow.data(), b.narrow.data(), nullptr, false, sums.data()));
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const float with_bias = y.wide[i] + bias[i % std::size_t(p.n)];
    CHECK_NEAR(sums[i], y.wide[i], 1e-4);
    CHECK_NEAR(float(y.narrow[i]), with_bias < 0 ? 0 : with_bias, kUnit);
  }
}

#endif

}  // namespace

int main() {
  for_threads([] {
    for (std::int64_t length : {1, 5, 33, 70})
      for (std::int64_t d : {1, 7, 32}) {
        for (bool is_causal : {false, true}) test_attention(length, length, d, is_causal);
        test_attention(length, 40, d, false);
      }
    for (std::int64_t columns : {1, 15, 300}) test_norms(70, columns);
#ifdef SINGA_LITE_ONEDNN
    for (std::int64_t m : {1, 9, 300})
      for (std::int64_t n : {1, 33}) test_rows(m, n, 17);
    for (bool transpose_a : {false, true})
      for (bool transpose_b : {false, true})
        for (std::int64_t batch : {1, 3})
          for (std::int64_t k : {1, 101, 1100}) test_product({batch, 130, 19, k, transpose_a, transpose_b});
#endif
  });
}
