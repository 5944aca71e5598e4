// SPDX-License-Identifier: Apache-2.0
// The functions of vector_math.h against long double, in units of the last place.
#include "kernels/vector_math.h"

#include "check.h"

using namespace singa_lite;

namespace {

double last_places(float got, long double exact) {
  const float nearest = float(exact);
  if (std::isnan(nearest) || std::isnan(got)) return std::isnan(nearest) && std::isnan(got) ? 0 : 1e9;
  if (got == nearest) return 0;
  if (std::isinf(nearest) || std::isinf(got)) return 1e9;
  const float size = std::fabs(nearest), next = std::nextafter(size, kInfF);
  const double unit = std::isinf(next) ? double(size) - double(std::nextafter(size, 0.0f)) : double(next) - double(size);
  return std::fabs(double((long double)(got)-exact)) / unit;
}

template <class Function, class Exact>
void test(const char* name, const Function& function, const Exact& exact, float low, float high, double most) {
  Random random(7);
  const auto check = [&](float x) {
    const double error = last_places(function(x), exact((long double)(x)));
    if (error > most) FAIL("%s(%.9g) is %.9g, off by %.3g units of the last place", name, x, function(x), error);
  };
  for (int i = 0; i < 400000; ++i) {
    check(low + (high - low) * (0.5f + 0.5f * random.uniform()));
    check((low < 0 && i % 2 ? -1.0f : 1.0f) * std::ldexp(1.0f + 0.5f * std::fabs(random.uniform()), -int(random.below(120))));
  }
  check(0.0f);
  check(kNanF);
}

// a^b of any signs and sizes, and of quarters to whole powers, which are exact where a float holds them.
void test_pow() {
  Random random(7);
  const auto check = [](float a, float b, double most) {
    const float got = vector_math::pow(a, b);
    const long double exact = std::pow((long double)(a), (long double)(b));
    if (last_places(got, exact) > most || (got == got && std::signbit(got) != std::signbit(exact)))
      FAIL("pow(%.9g, %.9g) is %.9g, expected %.9Lg", a, b, got, exact);
  };
  for (int i = 0; i < 400000; ++i) {
    check(std::ldexp(1.0f + 0.5f * random.uniform(), int(random.below(250)) - 149), 40 * random.uniform(), 0.501);
    check(1 + 1e-3f * random.uniform(), 1e5f * random.uniform(), 0.501);
    const float a = 0.25f * (float(random.below(201)) - 100), b = float(random.below(21)) - 10;
    const long double exact = std::pow((long double)(a), (long double)(b));
    check(a, b, exact == float(exact) ? 0 : 0.501);
  }
  const float extremes[] = {0.0f,  -0.0f, 1,     -1,     2,     -2,       0.5f,     -0.5f,    3,         -3,
                            1e-42f, -1e-42f, 3e38f, -3e38f, kInfF, -kInfF, kNanF, 8388609, 8388607.5f, 16777216};
  for (const float a : extremes)
    for (const float b : extremes) check(a, b, 0.501);
  for (int k = 20; k < 128; ++k)
    for (const float fraction : {1.0f, 1.5f, 2 - 0x1p-23f})
      for (const float b : {std::ldexp(fraction, k), -std::ldexp(fraction, k)}) {
        for (const float a : {-2.0f, -1.0f, -0.5f, 1.5f}) check(a, b, 0.501);
        CHECK_NEAR(vector_math::pow(-kInfF, b), std::pow(-double(kInfF), double(b)), 0);  // glibc's of long double errs
      }
}

}  // namespace

int main() {
  test_pow();
  const long double root = std::sqrt(0.5L);
  const auto derivative = [](long double x) { return 1 / ((1 + std::exp(x)) * (1 + std::exp(-x))); };
  test("exp", vector_math::exp, [](long double x) { return std::exp(x); }, -103, 89, 1.1);
  test("expm1", vector_math::expm1, [](long double x) { return std::expm1(x); }, -40, 89, 1.6);
  test("log", vector_math::log, [](long double x) { return std::log(x); }, 0, 100, 1.0);
  test("log", vector_math::log, [](long double x) { return std::log(x); }, 0.5f, 2, 1.0);
  test("log1p", vector_math::log1p, [](long double x) { return std::log1p(x); }, -0.999f, 100, 1.6);
  test("logistic", vector_math::logistic, [](long double x) { return 1 / (1 + std::exp(-x)); }, -103, 89, 2);
  test("logistic_grad", vector_math::logistic_grad, derivative, -86, 86, 2.5);
  test("tanh", vector_math::tanh, [](long double x) { return std::tanh(x); }, -12, 12, 2.4);
  test("normal_cdf", vector_math::normal_cdf, [&](long double x) { return std::erfc(-x * root) / 2; }, -13, 9, 7);
  test("normal_pdf", vector_math::normal_pdf,
       [](long double x) { return 0.398942280401432677940L * std::exp(-x * x / 2); }, -13, 13, 3.5);
  const float extremes[] = {kInfF, -kInfF, 3e38f, -3e38f};
  for (const float x : extremes) {
    CHECK_NEAR(vector_math::exp(x), x > 0 ? kInfF : 0, 0);
    CHECK_NEAR(vector_math::expm1(x), x > 0 ? kInfF : -1, 0);
    CHECK_NEAR(vector_math::tanh(x), x > 0 ? 1 : -1, 0);
    CHECK_NEAR(vector_math::logistic(x), x > 0 ? 1 : 0, 0);
    CHECK_NEAR(vector_math::logistic_grad(x), 0, 0);
    CHECK_NEAR(vector_math::normal_cdf(x), x > 0 ? 1 : 0, 0);
    CHECK_NEAR(vector_math::normal_pdf(x), 0, 0);
  }
  CHECK_NEAR(vector_math::log(0.0f), -kInfF, 0);
  CHECK_NEAR(vector_math::log(kInfF), kInfF, 0);
  CHECK_NEAR(vector_math::log(-1.0f), kNanF, 0);
  CHECK_NEAR(vector_math::log1p(-1.0f), -kInfF, 0);
  CHECK_NEAR(vector_math::log1p(kInfF), kInfF, 0);
  CHECK_NEAR(vector_math::log1p(-2.0f), kNanF, 0);
}
