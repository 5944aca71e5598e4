// SPDX-License-Identifier: Apache-2.0
#include "comm/stack_marks.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>

namespace singa_lite {
namespace {

void (*wrapped)(int) = nullptr;
volatile sig_atomic_t file = -1;

void write_mark(char mark) {
  const ssize_t written = write(file, &mark, 1);
  (void)written;  // without it the reader waits until its time is over
}

void write_marked(int signal) {
  const int error = errno;
  write_mark(kStacksBegin);
  wrapped(signal);
  write_mark(kStacksEnd);
  errno = error;
}

}  // namespace

bool mark_stacks(int signal, int descriptor) {
  struct sigaction action;
  if (sigaction(signal, nullptr, &action) != 0 || (action.sa_flags & SA_SIGINFO) != 0) return false;
  if (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) return false;
  file = descriptor;
  if (action.sa_handler == write_marked) return true;
  wrapped = action.sa_handler;
  action.sa_handler = write_marked;
  return sigaction(signal, &action, nullptr) == 0;
}

}  // namespace singa_lite
