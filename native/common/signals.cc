// SPDX-License-Identifier: Apache-2.0
#include "common/signals.h"

#include <initializer_list>

namespace singa_lite {
#ifdef __unix__
namespace {

thread_local int depth = 0;  // of blocks inside of each other, of which the first one blocks

void block(sigset_t* before) {
  sigset_t blocked;
  sigfillset(&blocked);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&blocked, fault);
  pthread_sigmask(SIG_BLOCK, &blocked, before);
}

}  // namespace

SignalsBlocked::SignalsBlocked() {
  if (depth++ == 0) block(&before_);
}

SignalsBlocked::~SignalsBlocked() {
  if (--depth == 0) pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void block_signals() {
  if (depth > 0) return;
  ++depth;
  block(nullptr);
}
#else
SignalsBlocked::SignalsBlocked() = default;
SignalsBlocked::~SignalsBlocked() = default;
void block_signals() {}
#endif
}  // namespace singa_lite
