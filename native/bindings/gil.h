// SPDX-License-Identifier: Apache-2.0
// Work without the GIL, also in a daemon thread that is still at work when the interpreter ends.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

namespace singa_lite {

// As pybind11::gil_scoped_release, but where the interpreter has ended meanwhile. Python 3.11 ends a thread that wants
// the GIL then by unwinding its stack: into destructors that must not throw, which aborts the process, or that use
// Python. Here it stops for good instead, as in Python 3.14, and ends with the process.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) pause();
    }
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace singa_lite
