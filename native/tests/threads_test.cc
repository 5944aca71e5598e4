// SPDX-License-Identifier: Apache-2.0
#include "kernels/threads.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "check.h"
#include "kernels/elementwise.h"

using namespace singa_lite;

namespace {

void test_every_part_is_visited_once(std::size_t count, std::size_t cost) {
  std::vector<std::atomic<int>> visits(count);
  parallel_for(count, cost, [&](std::size_t begin, std::size_t end) {
    CHECK(begin < end && end <= count);
    for (std::size_t i = begin; i < end; ++i) ++visits[i];
  });
  for (std::size_t i = 0; i < count; ++i) CHECK_EQUAL(visits[i].load(), 1);
}

void test_small_work_stays_on_one_thread() {
  std::atomic<int> calls{0};
  parallel_for(kGrain - 1, 1, [&](std::size_t, std::size_t) { ++calls; });
  CHECK_EQUAL(calls.load(), 1);
}

void test_a_region_inside_a_region_stays_on_one_thread() {
  std::atomic<int> most{0};
  parallel_for(4, 1 << 20, [&](std::size_t begin, std::size_t end) {
    if (end - begin < 4) most.store(std::max(most.load(), num_threads()));
  });
  CHECK(most.load() <= 1);
}

// GNU OpenMP would hang in such a child; the deadline of the test sees it.
void test_a_forked_child_computes_on_one_thread() {
  test_every_part_is_visited_once(1 << 18, 1);  // two threads by now
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    CHECK_EQUAL(num_threads(), 1);
    set_threads(2);
    CHECK_EQUAL(num_threads(), 1);
    test_every_part_is_visited_once(1 << 18, 1);
    const Floats x(kLargeSize, 1, -2.0f);
    Floats y(kLargeSize, 1, kNanF);
    clip(x.data(), y.data(), -1.0f, 1.0f, x.size());
    CHECK_NEAR(y[kLargeSize - 1], -1, 0);
    std::exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK_EQUAL(status, 0);
}

}  // namespace

int main() {
  for_threads([] {
    for (std::size_t count : {0, 1, 2, 3, 7, 16385, 100003})
      for (std::size_t cost : {0, 1, 20000}) test_every_part_is_visited_once(count, cost);
    test_small_work_stays_on_one_thread();
    test_a_region_inside_a_region_stays_on_one_thread();
  });
  set_threads(2);
  test_a_forked_child_computes_on_one_thread();
}
