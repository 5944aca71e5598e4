// SPDX-License-Identifier: Apache-2.0
#include "common/signals.h"

#include <cstddef>
#include <initializer_list>
#include <memory>

namespace singa_lite {
#ifdef __unix__
namespace {

constexpr std::size_t kStackBytes = 1 << 16;  // AMX alone takes 11 KiB for what a handler interrupts

// Another stack for handlers that ask for one, while this thread lives; the one it has already, as from faulthandler.
class HandlersStack {
 public:
  HandlersStack() {
    stack_t now;
    if (sigaltstack(nullptr, &now) != 0 || (now.ss_flags & SS_DISABLE) == 0) return;
    memory_.reset(new char[kStackBytes]);
    stack_t own{};
    own.ss_sp = memory_.get();
    own.ss_size = kStackBytes;
    sigaltstack(&own, nullptr);
  }
  ~HandlersStack() {
    stack_t now;
    if (!memory_ || sigaltstack(nullptr, &now) != 0 || now.ss_sp != memory_.get()) return;
    now.ss_flags = SS_DISABLE;
    sigaltstack(&now, nullptr);
  }
  HandlersStack(const HandlersStack&) = delete;
  HandlersStack& operator=(const HandlersStack&) = delete;

 private:
  std::unique_ptr<char[]> memory_;
};

thread_local int depth = 0;  // of blocks inside of each other, of which the first one blocks

sigset_t all_but(std::initializer_list<int> others) {
  sigset_t signals;
  sigfillset(&signals);
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&signals, number);
  for (const int number : others) sigdelset(&signals, number);
  return signals;
}

}  // namespace

SignalsBlocked::SignalsBlocked() {
  if (depth++ > 0) return;
  static const sigset_t signals = all_but({SIGRTMIN + 7});  // SIGNAL of comm/stacks.py
  thread_local const HandlersStack stack;
  pthread_sigmask(SIG_BLOCK, &signals, &before_);
}

SignalsBlocked::~SignalsBlocked() {
  if (--depth == 0) pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void block_signals() {
  if (depth > 0) return;
  ++depth;
  const sigset_t signals = all_but({});
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}
#else
SignalsBlocked::SignalsBlocked() = default;
SignalsBlocked::~SignalsBlocked() = default;
void block_signals() {}
#endif
}  // namespace singa_lite
