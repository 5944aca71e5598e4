// SPDX-License-Identifier: Apache-2.0
// Max pooling for pool.py; U is the type of the indices. n is the number of elements of out, one a thread. Gradients
// are gathered, not scattered: no atomics, so the same call gives the same bits.

#define WINDOW Int h, Int w, Int out_h, Int out_w, Int k_h, Int k_w, Int s_h, Int s_w, Int p_h, Int p_w
#define GEOMETRY \
  const Window rows{int(h), int(out_h), int(k_h), int(s_h), int(p_h)}, columns{int(w), int(out_w), int(k_w), int(s_w), int(p_w)};

// One axis: windows of k elements begin at s * i - p.
struct Window {
  int size, out, k, s, p;

  __device__ int first(int i) const { return i * s - p; }
  // the windows i, from first_over to last_over, that contain element `at`
  __device__ int first_over(int at) const { return at + p < k ? 0 : (at + p - k) / s + 1; }
  __device__ int last_over(int at) const { return (at + p) / s < out ? (at + p) / s : out - 1; }
};

// Element i of (planes, height, width).
struct Place {
  Int plane;
  int row, column;

  __device__ Place(Int i, Int height, Int width) {
    const Int line = i / width;
    plane = line / height;
    row = int(line - plane * height);
    column = int(i - line * width);
  }
};

KERNEL max_pool_2d(const T* x, T* y, U* indices, Int n, WINDOW) {
  GEOMETRY
  EACH(i, n) {
    const Place place(i, out_h, out_w);
    const int top = rows.first(place.row), left = columns.first(place.column);
    const T* image = x + place.plane * h * w;
    A best = 0;
    int number = 0, at = 0;
    for (int r = top; r < top + rows.k; ++r)
      for (int c = left; c < left + columns.k; ++c, ++number) {
        const bool is_inside = r >= 0 && r < rows.size && c >= 0 && c < columns.size;
        const A value = is_inside ? A(widen(image[Int(r) * w + c])) : A(-1) / A(0);  // -inf, which never wins
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
    const Place place(i, h, w);
    A total = 0;
    for (int r = rows.first_over(place.row); r <= rows.last_over(place.row); ++r)
      for (int c = columns.first_over(place.column); c <= columns.last_over(place.column); ++c) {
        const Int from = (place.plane * out_h + r) * out_w + c;
        const int number = (place.row - rows.first(r)) * columns.k + place.column - columns.first(c);
        if (int(indices[from]) == number) total += widen(dy[from]);
      }
    dx[i] = narrow<T>(total);
  }
}
