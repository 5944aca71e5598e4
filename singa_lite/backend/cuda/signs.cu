// SPDX-License-Identifier: Apache-2.0
// Signs as bits for message.py. T is the type of values, U of where segments end.

// A thread makes a byte of eight signs; NaN counts as negative.
KERNEL pack_signs(const T* x, Byte* bits, Int n, Int num_bytes) {
  EACH(i, num_bytes) {
    Byte found = 0;
    for (Int bit = 0; bit < 8 && 8 * i + bit < n; ++bit)
      found = static_cast<Byte>(found | (widen(x[8 * i + bit]) >= 0 ? 1 << bit : 0));
    bits[i] = found;
  }
}

KERNEL add_signs(const Byte* bits, const T* scales, const U* ends, T* flat, Int n, Int count, double factor) {
  EACH(i, n) {
    Int low = 0, high = count - 1;  // the first segment that ends behind i
    while (low < high) {
      const Int middle = (low + high) / 2;
      if (ends[middle] > i) high = middle;
      else low = middle + 1;
    }
    const A sent = widen(scales[low]) * static_cast<A>(factor);
    flat[i] = narrow<T>(A(widen(flat[i]) + (bits[i / 8] >> i % 8 & 1 ? sent : A(-sent))));
  }
}
