// SPDX-License-Identifier: Apache-2.0
// Threads that no signal handler interrupts.
//
// Note [signals]: sgemm of oneDNN 3.2 computes with the stack pointer in its workspace on the heap (its issue 4845). A signal
// would be handled there, over whatever lies below: Ctrl-C ended a training with "corrupted size vs. prev_size". So signals
// wait while a thread is in oneDNN, runs a plan, in which it may be, or starts a parallel region. Threads of our own and of
// OpenMP get none at all: they inherit it, and those that another library's region has started block them in one of ours.
// Python would not run a handler before the kernel has returned anyway. Not blocked are signals of faults (SIGSEGV, ...), and
// the one by which a process writes its main thread's stack for others: its handler, as all of Python's, asks for another
// stack, so the thread has one.
#pragma once

#ifdef __unix__
#include <signal.h>
#endif

namespace singa_lite {

// Inside: the calling thread gets no signals, but for those of Note [signals].
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
#ifdef __unix__
  sigset_t before_;
#endif
};

// Have the calling thread get none from now on.
void block_signals();

}  // namespace singa_lite
