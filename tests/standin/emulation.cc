// SPDX-License-Identifier: Apache-2.0
// The threads and blocks of a kernel on the host, see emulation.h.
#include <ucontext.h>

#include <mutex>
#include <vector>

#include "emulation.h"

namespace emulation {

Place thread, block, threads, blocks;

namespace {

struct Barrier {
  unsigned arrived = 0, passed = 0;
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool is_done = false;
  unsigned shuffles = 0;
};

std::vector<Fiber> fibers(1024);
Barrier whole_block, warps[32];
unsigned long long slots[2][1024];  // what shuffles pass on, by turns, so that one barrier is enough
ucontext_t scheduler;
bool moved;  // whether any fiber got on since all were asked
void (*body)(void**);
void** arguments;
std::mutex one_at_a_time;  // kernels of several streams

void wait_at(Barrier& barrier, unsigned members) {
  const unsigned now = barrier.passed;
  if (++barrier.arrived == members) {
    barrier.arrived = 0;
    ++barrier.passed;
    moved = true;
    return;
  }
  const Place me = thread;
  while (barrier.passed == now) swapcontext(&fibers[me.x].context, &scheduler);
}

void run_fiber() {
  body(arguments);
  fibers[thread.x].is_done = true;
  moved = true;
}

// false if threads wait for others that never come
bool run_block(bool backwards) {
  for (unsigned i = 0; i < threads.x; ++i) {
    Fiber& fiber = fibers[i];
    fiber.is_done = false;
    fiber.shuffles = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, run_fiber, 0);
  }
  whole_block = Barrier();
  for (Barrier& warp : warps) warp = Barrier();
  // a warp runs as far as it can before the next one does, so that one which may not run ahead is seen
  const unsigned num_warps = (threads.x + 31) / 32;
  for (unsigned left = threads.x; left;) {
    bool any_moved = false;
    left = 0;
    for (unsigned w = 0; w < num_warps; ++w) {
      const unsigned begin = 32 * (backwards ? num_warps - 1 - w : w), end = begin + 32 < threads.x ? begin + 32 : threads.x;
      unsigned here;
      do {
        moved = false;
        here = 0;
        for (unsigned i = begin; i < end; ++i) {
          const unsigned which = backwards ? begin + end - 1 - i : i;
          if (fibers[which].is_done) continue;
          thread.x = which;
          swapcontext(&scheduler, &fibers[which].context);
          here += !fibers[which].is_done;
        }
        any_moved |= moved;
      } while (moved && here);
      left += here;
    }
    if (left && !any_moved) return false;
  }
  return true;
}

}  // namespace

void wait_for_block() { wait_at(whole_block, threads.x); }

unsigned long long shuffle_bits(unsigned long long value, unsigned from_lane) {
  const unsigned warp = thread.x / 32, turn = fibers[thread.x].shuffles++ % 2;
  const unsigned me = thread.x, members = threads.x - 32 * warp < 32 ? threads.x - 32 * warp : 32;
  slots[turn][me] = value;
  wait_at(warps[warp], members);
  return from_lane < members ? slots[turn][32 * warp + from_lane] : value;
}

int run(void (*kernel)(void**), unsigned num_blocks, unsigned num_threads, void** given, bool backwards) {
  const std::lock_guard lock(one_at_a_time);
  if (num_threads == 0 || num_threads > 1024 || num_blocks == 0) return 2;
  body = kernel;
  arguments = given;
  threads = Place{num_threads, 1, 1};
  blocks = Place{num_blocks, 1, 1};
  for (unsigned i = 0; i < num_blocks; ++i) {
    block = Place{backwards ? num_blocks - 1 - i : i, 0, 0};
    if (!run_block(backwards)) return 1;
  }
  return 0;
}

}  // namespace emulation
