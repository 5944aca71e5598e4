// SPDX-License-Identifier: Apache-2.0
// The threads and blocks of a kernel on the host, see emulation.h.
//
// Note [switching]: swapcontext makes a system call, and kernels switch a million times a second. So a context is made
// and entered once for a fiber, which goes from block to block and from kernel to kernel, and all switches after that
// are _setjmp and _longjmp. A fiber whose barrier has not passed is left alone.
#undef _FORTIFY_SOURCE  // which takes a jump to another stack for an error
#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <mutex>
#include <vector>

#include "emulation.h"

namespace emulation {

Place thread, block, threads, blocks;

namespace {

struct Barrier {
  unsigned arrived = 0, passed = 0;
};
constexpr std::size_t kStackBytes = 1 << 16;
struct Fiber {
  jmp_buf place;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};  // not written, so that only what is used becomes memory
  bool is_started = false, is_done = false;
  const Barrier* barrier = nullptr;  // at which it waits while this has passed `passed` times
  unsigned passed = 0, shuffles = 0;
  bool waits() const { return barrier && barrier->passed == passed; }
};

std::vector<Fiber> fibers(1024);
Barrier whole_block, warps[32];
unsigned long long slots[2][1024];  // what shuffles pass on, by turns, so that one barrier is enough
jmp_buf scheduler;
bool moved;  // whether any fiber got on since all were asked
void (*body)(void**);
void** arguments;
std::mutex one_at_a_time;  // kernels of several streams

// Goes back to where this fiber was entered, until it is entered again.
__attribute__((noinline)) void leave(Fiber& me) {
  if (!_setjmp(me.place)) _longjmp(scheduler, 1);
}

void wait_at(Barrier& barrier, unsigned members) {
  const unsigned now = barrier.passed;
  if (++barrier.arrived == members) {
    barrier.arrived = 0;
    ++barrier.passed;
    moved = true;
    return;
  }
  Fiber& me = fibers[thread.x];
  me.barrier = &barrier;
  me.passed = now;
  leave(me);
  me.barrier = nullptr;
}

void run_fiber() {
  for (Fiber& me = fibers[thread.x];; leave(me)) {
    body(arguments);
    me.is_done = true;
    moved = true;
  }
}

// Goes on with a fiber until it leaves.
__attribute__((noinline)) void enter(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.is_started) _longjmp(fiber.place, 1);
  fiber.is_started = true;
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = fiber.stack.get();
  start.uc_stack.ss_size = kStackBytes;
  start.uc_link = nullptr;
  makecontext(&start, run_fiber, 0);
  setcontext(&start);
}

// false if threads wait for others that never come
bool run_block(bool backwards) {
  for (unsigned i = 0; i < threads.x; ++i) {
    Fiber& fiber = fibers[i];
    fiber.is_done = false;
    fiber.shuffles = 0;
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
          Fiber& fiber = fibers[which];
          if (fiber.is_done) continue;
          thread.x = which;
          if (!fiber.waits()) enter(fiber);
          here += !fiber.is_done;
        }
        any_moved |= moved;
      } while (moved && here);
      left += here;
    }
    if (left && !any_moved) {
      fibers = std::vector<Fiber>(1024);  // those that wait never end
      return false;
    }
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
