// SPDX-License-Identifier: Apache-2.0
// What every test program shares: checks that end it with one clear line, arrays with nothing behind them, fixed
// random numbers, and a body run on one, two and three threads.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace singa_lite {

constexpr float kNanF = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfF = std::numeric_limits<float>::infinity();

// Print where and why, and end with 1.
#define FAIL(...)                                              \
  do {                                                         \
    std::fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);       \
    std::fprintf(stderr, __VA_ARGS__);                         \
    std::fputc('\n', stderr);                                  \
    std::exit(1);                                              \
  } while (false)

#define CHECK(condition)                                  \
  do {                                                    \
    if (!(condition)) FAIL("%s does not hold", #condition); \
  } while (false)

#define CHECK_EQUAL(got, expected)                                                                      \
  do {                                                                                                  \
    const long long got_ = (long long)(got), expected_ = (long long)(expected);                         \
    if (got_ != expected_) FAIL("%s is %lld, expected %s = %lld", #got, got_, #expected, expected_);    \
  } while (false)

// |got - expected| <= tolerance * max(1, |expected|); NaN and infinities only equal themselves.
#define CHECK_NEAR(got, expected, tolerance)                                                   \
  do {                                                                                         \
    const double got_ = double(got), expected_ = double(expected);                             \
    if (!is_near(got_, expected_, tolerance))                                                  \
      FAIL("%s is %.9g, expected %s = %.9g", #got, got_, #expected, expected_);                \
  } while (false)

inline bool is_near(double got, double expected, double tolerance) {
  if (std::isnan(expected) || std::isnan(got)) return std::isnan(expected) && std::isnan(got);
  if (std::isinf(expected) || std::isinf(got)) return got == expected;
  return std::abs(got - expected) <= tolerance * std::max(1.0, std::abs(expected));
}

// The same sequence everywhere (splitmix64).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t bound) { return std::size_t(bits() % bound); }
  float uniform() { return float(bits() >> 40) * 0x1p-23f - 1.0f; }  // in [-1, 1)

 private:
  std::uint64_t state_;
};

// Elements whose last is the last of its allocation, so that a sanitizer sees one step too far; an offset takes the
// first away from the alignment that vectors like.
template <class T>
class Array {
 public:
  explicit Array(std::size_t count, std::size_t offset = 0, T value = T())
      : count_(count), memory_(new T[count + offset]), data_(memory_.get() + offset) {
    for (std::size_t i = 0; i < count; ++i) data_[i] = value;
  }
  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t size() const { return count_; }
  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }

 private:
  std::size_t count_;
  std::unique_ptr<T[]> memory_;
  T* data_;
};
using Floats = Array<float>;

inline Floats random_floats(std::size_t count, std::uint64_t seed, std::size_t offset = 0) {
  Floats made(count, offset);
  Random random(seed);
  for (std::size_t i = 0; i < count; ++i) made[i] = random.uniform();
  return made;
}

inline void set_threads(int threads) {
#ifdef _OPENMP
  omp_set_num_threads(threads);
#else
  (void)threads;
#endif
}

template <class Body>
void for_threads(const Body& body) {
  for (int threads : {1, 2, 3}) {
    set_threads(threads);
    body();
  }
}

// Sizes at and around the widths of vectors and the grain of threads, and one large odd one.
constexpr std::initializer_list<std::size_t> kSizes = {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 1023, 16385, 65539};
constexpr std::size_t kLargeSize = 1000003;

}  // namespace singa_lite
