// SPDX-License-Identifier: Apache-2.0
// Numbers that a CUDA graph reads, see Note [captured parts] in capture.py.

struct Numbers {
  Int count, values[60];
};

KERNEL store(Int* to, Numbers from) {
  if (threadIdx.x < from.count) to[threadIdx.x] = from.values[threadIdx.x];
}
