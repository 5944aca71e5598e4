// SPDX-License-Identifier: Apache-2.0
// Max and average pooling for pool.py; U is the type of the indices of maxima. n is the number of elements of out, one
// a thread. All arrays have their channels in blocks of `block`, as in layout.py. Gradients are gathered, not scattered:
// no atomics, so the same call gives the same bits.

#define WINDOW Int h, Int w, Int out_h, Int out_w, Int k_h, Int k_w, Int s_h, Int s_w, Int p_h, Int p_w, Int block
#define GEOMETRY \
  const Window rows{int(h), int(out_h), int(k_h), int(s_h), int(p_h)}, columns{int(w), int(out_w), int(k_w), int(s_w), int(p_w)};

// One axis: windows of k elements begin at s * i - p.
struct Window {
  int size, out, k, s, p;

  __device__ int first(int i) const { return i * s - p; }
  // the windows i, from first_over to last_over, that contain element `at`
  __device__ int first_over(int at) const { return at + p < k ? 0 : (at + p - k) / s + 1; }
  __device__ int last_over(int at) const { return (at + p) / s < out ? (at + p) / s : out - 1; }
  // the elements of window i that are not padding, from begin to end
  __device__ int begin(int i) const { return first(i) > 0 ? first(i) : 0; }
  __device__ int end(int i) const { return first(i) + k < size ? first(i) + k : size; }
  // by how many elements its sum is divided
  __device__ int divisor(int i, Int counts_padding) const { return counts_padding ? k : end(i) - begin(i); }
};

// Element i of (planes, height, width, channels).
struct Position {
  Int plane, channel;
  int row, column;

  __device__ Position(Int i, Int height, Int width, Int channels) {
    const Int pixel = i / channels, line = pixel / width;
    channel = i - pixel * channels;
    plane = line / height;
    row = int(line - plane * height);
    column = int(pixel - line * width);
  }
};

KERNEL max_pool_2d(const T* x, T* y, U* indices, Int n, WINDOW) {
  GEOMETRY
  EACH(i, n) {
    const Position position(i, out_h, out_w, block);
    const int top = rows.first(position.row), left = columns.first(position.column);
    const T* image = x + position.plane * h * w * block + position.channel;
    A best = 0;
    int number = 0, at = 0;
    for (int r = top; r < top + rows.k; ++r)
      for (int c = left; c < left + columns.k; ++c, ++number) {
        const bool is_inside = r >= 0 && r < rows.size && c >= 0 && c < columns.size;
        const A value = is_inside ? A(widen(image[(Int(r) * w + c) * block])) : A(-1) / A(0);  // -inf, which never wins
        if (number == 0) best = value;
        else if (value > best) best = value, at = number;  // the first of equals stays
        else if (is_nan(value)) best = value;
      }
    y[i] = narrow<T>(best);
    indices[i] = U(at);
  }
}

KERNEL max_pool_2d_backward(const T* dy, const U* indices, T* dx, Int n, WINDOW) {
  GEOMETRY
  EACH(i, n) {
    const Position position(i, h, w, block);
    A total = 0;
    for (int r = rows.first_over(position.row); r <= rows.last_over(position.row); ++r)
      for (int c = columns.first_over(position.column); c <= columns.last_over(position.column); ++c) {
        const Int from = ((position.plane * out_h + r) * out_w + c) * block + position.channel;
        const int number = (position.row - rows.first(r)) * columns.k + position.column - columns.first(c);
        if (int(indices[from]) == number) total += widen(dy[from]);
      }
    dx[i] = narrow<T>(total);
  }
}

KERNEL avg_pool_2d(const T* x, T* y, Int n, WINDOW, Int counts_padding) {
  GEOMETRY
  EACH(i, n) {
    const Position position(i, out_h, out_w, block);
    const T* image = x + position.plane * h * w * block + position.channel;
    A total = 0;
    for (int r = rows.begin(position.row); r < rows.end(position.row); ++r)
      for (int c = columns.begin(position.column); c < columns.end(position.column); ++c)
        total += widen(image[(Int(r) * w + c) * block]);
    const int divisor = rows.divisor(position.row, counts_padding) * columns.divisor(position.column, counts_padding);
    y[i] = narrow<T>(total / A(divisor));
  }
}

KERNEL avg_pool_2d_backward(const T* dy, T* dx, Int n, WINDOW, Int counts_padding) {
  GEOMETRY
  EACH(i, n) {
    const Position position(i, h, w, block);
    A total = 0;
    for (int r = rows.first_over(position.row); r <= rows.last_over(position.row); ++r)
      for (int c = columns.first_over(position.column); c <= columns.last_over(position.column); ++c) {
        const int divisor = rows.divisor(r, counts_padding) * columns.divisor(c, counts_padding);
        total += widen(dy[((position.plane * out_h + r) * out_w + c) * block + position.channel]) / A(divisor);
      }
    dx[i] = narrow<T>(total);
  }
}
