// SPDX-License-Identifier: Apache-2.0
#include "comm/combine.h"

#include <algorithm>
#include <vector>

#include "check.h"
#include "common/half.h"

using namespace singa_lite;

namespace {

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax, ReduceOp::kMin};

double fold(ReduceOp op, double a, double b) {
  if (op == ReduceOp::kMax || op == ReduceOp::kMin) {
    if (std::isnan(a) || std::isnan(b)) return double(kNanF);
    return op == ReduceOp::kMax ? std::max(a, b) : std::min(a, b);
  }
  return a + b;
}

template <class T>
T sample(Random& random) {
  if (std::is_integral_v<T>) return T(random.bits() % 2001) - T(1000);
  return random.below(50) == 0 ? T(kNanF) : T(random.uniform());
}

template <class T>
void test_dtype(DType dtype, std::size_t num_sources, std::size_t n, std::size_t offset, bool in_place) {
  for (ReduceOp op : kOps) {
    if (op == ReduceOp::kMean && std::is_integral_v<T>) continue;  // numpy's mean of integers is a float
    std::vector<Array<T>> arrays;
    std::vector<const void*> sources;
    Random random(101);
    for (std::size_t s = 0; s < num_sources; ++s) {
      arrays.emplace_back(n, offset);
      for (std::size_t i = 0; i < n; ++i) arrays[s][i] = sample<T>(random);
    }
    for (const Array<T>& one : arrays) sources.push_back(one.data());
    std::vector<double> expected(n);
    for (std::size_t i = 0; i < n; ++i) {
      expected[i] = double(arrays[0][i]);
      for (std::size_t s = 1; s < num_sources; ++s) expected[i] = fold(op, expected[i], double(arrays[s][i]));
      if (op == ReduceOp::kMean) expected[i] /= double(num_sources);
    }
    Array<T> fresh(n, offset);
    Array<T>& out = in_place ? arrays[num_sources - 1] : fresh;
    combine(dtype, op, sources.data(), num_sources, out.data(), n);
    for (std::size_t i = 0; i < n; ++i) CHECK_NEAR(out[i], expected[i], sizeof(T) == 4 ? 1e-6 : 1e-14);
  }
}

void test_narrow(DType wire, std::size_t num_sources, std::size_t n, std::size_t offset, bool widen) {
  for (ReduceOp op : kOps) {
    std::vector<Array<std::uint16_t>> arrays;
    std::vector<const void*> sources;
    std::vector<double> expected(n, 0);
    for (std::size_t s = 0; s < num_sources; ++s) {
      const Floats x = random_floats(n, 102 + s);
      Floats rounded(n);
      arrays.emplace_back(n, offset);
      to_wire(wire, x.data(), arrays[s].data(), n);
      from_wire(wire, arrays[s].data(), rounded.data(), n);
      for (std::size_t i = 0; i < n; ++i) expected[i] = s == 0 ? rounded[i] : fold(op, expected[i], rounded[i]);
    }
    for (double& one : expected) one /= op == ReduceOp::kMean ? double(num_sources) : 1;
    for (const auto& one : arrays) sources.push_back(one.data());
    Floats wide(n, offset, kNanF);
    Array<std::uint16_t> narrow(n, offset);
    void* out = widen ? static_cast<void*>(wide.data()) : narrow.data();
    combine(wire, op, sources.data(), num_sources, out, n, widen);
    if (!widen) from_wire(wire, narrow.data(), wide.data(), n);
    for (std::size_t i = 0; i < n; ++i) {
      CHECK_NEAR(wide[i], expected[i], wire == DType::kFloat16 ? 1.0 / 2047 : 1.0 / 255);  // half a last digit
      std::uint16_t bits;
      float again;
      to_wire(wire, wide.data() + i, &bits, 1);
      from_wire(wire, &bits, &again, 1);
      CHECK_NEAR(again, wide[i], 0);
    }
  }
}

// Sums of integers wrap around, as numpy's do.
template <class T>
void test_wrapping(DType dtype) {
  const T most = std::numeric_limits<T>::max();
  for (std::size_t num_sources : {2, 3}) {
    std::vector<Array<T>> arrays;
    std::vector<const void*> sources;
    for (std::size_t s = 0; s < num_sources; ++s) arrays.emplace_back(5, 0, s < 2 ? most : T(2));
    for (const Array<T>& one : arrays) sources.push_back(one.data());
    Array<T> out(5);
    combine(dtype, ReduceOp::kSum, sources.data(), num_sources, out.data(), 5);
    for (std::size_t i = 0; i < 5; ++i) CHECK_EQUAL(out[i], num_sources == 2 ? -2 : 0);
  }
}

}  // namespace

int main() {
  for (std::size_t num_sources : {1, 2, 3, 4})
    for (std::size_t n : {0, 1, 7, 8, 17, 2047, 2048, 2049, 10007})
      for (std::size_t offset : {0, 1}) {
        const bool in_place = offset == 1;
        test_dtype<float>(DType::kFloat32, num_sources, n, offset, in_place);
        test_dtype<double>(DType::kFloat64, num_sources, n, offset, in_place);
        test_dtype<std::int32_t>(DType::kInt32, num_sources, n, offset, in_place);
        test_dtype<std::int64_t>(DType::kInt64, num_sources, n, offset, in_place);
        for (DType wire : {DType::kFloat16, DType::kBFloat16})
          for (bool widen : {false, true}) test_narrow(wire, num_sources, n, offset, widen);
      }
  test_wrapping<std::int32_t>(DType::kInt32);
  test_wrapping<std::int64_t>(DType::kInt64);
}
