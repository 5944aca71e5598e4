// SPDX-License-Identifier: Apache-2.0
// Children that are forked while another thread is in what all threads share: they find it whole and unlocked.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include "check.h"
#include "kernels/memory.h"
#include "kernels/onednn.h"

using namespace singa_lite;

namespace {

void test_children_can_use(const std::function<void()>& use) {
  use();  // what is made at first use is there before the thread
  std::atomic<bool> has_ended{false};
  std::thread thread([&] {
    while (!has_ended) use();
  });
  for (int i = 0; i < 200; ++i) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      alarm(20);
      use();
      std::_Exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQUAL(status, 0);
  }
  has_ended = true;
  thread.join();
}

}  // namespace

int main() {
#ifdef __SANITIZE_ADDRESS__
  std::puts("skipped: a child forked beside threads cannot use AddressSanitizer's own allocator");
  return 0;
#endif
  test_children_can_use([] { memory_pool().release(memory_pool().acquire(1000), 1000); });
#ifdef SINGA_LITE_ONEDNN
  test_children_can_use([] {
    const auto call = cached_call({1, 2, 3}, []() -> OnednnCall { throw dnnl::error(dnnl_unimplemented, "none"); });
    CHECK(call == nullptr);
  });
#endif
}
