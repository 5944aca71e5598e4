// SPDX-License-Identifier: Apache-2.0
// Copies between any strides, for move.py: a transposition, a repetition, a part of an array.

KERNEL copy(const T* from, U* to, Int n, Broadcast axes) {
  EACH(i, n) {
    OFFSETS(axes, i, n, offset, target);
    to[target] = Convert<U, T>::of(from[offset]);
  }
}
