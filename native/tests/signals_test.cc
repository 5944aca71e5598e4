// SPDX-License-Identifier: Apache-2.0
#include "common/signals.h"

#include <pthread.h>
#include <sys/time.h>

#include <atomic>
#include <cstdint>

#include "check.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"
#include "kernels/threads.h"

using namespace singa_lite;

namespace {

std::uintptr_t stack_begin, stack_end;  // of the first thread
std::atomic<int> handled{0}, handled_elsewhere{0};

void find_stack() {
  pthread_attr_t attributes;
  void* begin;
  std::size_t bytes;
  CHECK(pthread_getattr_np(pthread_self(), &attributes) == 0);
  CHECK(pthread_attr_getstack(&attributes, &begin, &bytes) == 0);
  pthread_attr_destroy(&attributes);
  stack_begin = std::uintptr_t(begin);
  stack_end = stack_begin + bytes;
}

void note(int) {
  const auto here = std::uintptr_t(__builtin_frame_address(0));
  if (here < stack_begin || here >= stack_end) ++handled_elsewhere;
  ++handled;
}

// Signals at any time are handled on the stack of the first thread: neither on oneDNN's heap nor by a thread of OpenMP.
void test_where_signals_are_handled(const Matmul& p, bool is_bfloat16, bool has_regions = true) {
  const auto size = [&](std::int64_t rows, std::int64_t columns) { return std::size_t(p.batch * rows * columns); };
  const Floats a = random_floats(size(p.m, p.k), 1), b = random_floats(size(p.k, p.n), 2), x(kLargeSize, 0, 1.0f);
  Floats y(size(p.m, p.n)), z(kLargeSize);
  const Array<Bfloat16> narrow_a(a.size()), narrow_b(b.size());
  if (!is_bfloat16) matmul(p, a.data(), b.data(), y.data());  // threads that are there already block signals now
  handled = 0;
  const itimerval often{{0, 500}, {0, 500}}, never{};
  CHECK(setitimer(ITIMER_REAL, &often, nullptr) == 0);
  for (int i = 0; i < 20000 && handled < 50; ++i) {
    // ends threads of OpenMP, or starts more of them
    if (has_regions) clip(x.data(), z.data(), -1.0f, 1.0f, x.size());
    if (is_bfloat16) matmul(p, narrow_a.data(), narrow_b.data(), nullptr, false, y.data());
    else matmul(p, a.data(), b.data(), y.data());
  }
  CHECK(setitimer(ITIMER_REAL, &never, nullptr) == 0);
  CHECK(handled >= 50);
  CHECK_EQUAL(handled_elsewhere, 0);
}

void test_signals_wait_for_the_end_of_the_outermost_block() {
  handled = 0;
  {
    const SignalsBlocked outer;
    {
      const SignalsBlocked inner;
      CHECK(raise(SIGALRM) == 0);
    }
    CHECK_EQUAL(handled, 0);
  }
  CHECK_EQUAL(handled, 1);
}

}  // namespace

int main() {
  find_stack();
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  CHECK(sigaction(SIGALRM, &action, nullptr) == 0);
  test_signals_wait_for_the_end_of_the_outermost_block();
  set_threads(3);
#ifdef _OPENMP
#pragma omp parallel num_threads(3)  // as of another library, whose threads oneDNN uses
  CHECK(omp_get_num_threads() > 0);
#endif
  test_where_signals_are_handled({1, 512, 512, 512, false, false}, false, false);
  for_threads([] {
    for (bool is_bfloat16 : {false, true}) {
      test_where_signals_are_handled({1, 256, 256, 256, false, false}, is_bfloat16);
      test_where_signals_are_handled({1, 256, 256, 256, true, false}, is_bfloat16);
      test_where_signals_are_handled({3, 128, 128, 128, false, true}, is_bfloat16);
    }
  });
}
