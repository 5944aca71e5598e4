// SPDX-License-Identifier: Apache-2.0
// The exception of native code; bindings turn it into the Python class of the same name.
#pragma once

#include <stdexcept>
#include <string>

namespace singa_lite {

// A collective failed: a peer died, is late or disagrees, or the transport cannot be had.
struct CommError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace singa_lite
