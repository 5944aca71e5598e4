// SPDX-License-Identifier: Apache-2.0
// A signal whose handler, Python's faulthandler, writes stacks: where they begin and end in the file, and errno kept.
#pragma once

namespace singa_lite {

constexpr char kStacksBegin = '\2', kStacksEnd = '\3';

// Wraps the handler of `signal`: it writes kStacksBegin to `descriptor`, what the handler writes, and kStacksEnd, and
// leaves errno as it was, which faulthandler's own does not. Called again, as by a forked child, it takes the new
// descriptor. False if the signal has no handler.
bool mark_stacks(int signal, int descriptor);

}  // namespace singa_lite
