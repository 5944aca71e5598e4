// SPDX-License-Identifier: Apache-2.0
// layer_norm and its gradient, for norm.py: a block for each row of n elements; scale and bias are of type U, mean and
// inverse_std of type A.

// of one row at x
__device__ void norm_of_row(const T* x, const U* scale, const U* bias, T* y, A* mean, A* inverse_std, Int n, double eps) {
  A sum = 0, squares = 0;
  EACH_OF_ROW(i, n) sum += widen(x[i]);
  const A centre = over_block<Add>(sum) / A(n);
  EACH_OF_ROW(i, n) {
    const A distance = widen(x[i]) - centre;
    squares += distance * distance;
  }
  const A factor = A(1) / sqrt(over_block<Add>(squares) / A(n) + A(eps));
  EACH_OF_ROW(i, n)
    y[i] = narrow<T>(A((widen(x[i]) - centre) * factor * widen(scale[i]) + widen(bias[i])));
  if (threadIdx.x == 0) {
    mean[blockIdx.x] = centre;
    inverse_std[blockIdx.x] = factor;
  }
}

KERNEL layer_norm(const T* x, const U* scale, const U* bias, T* y, A* mean, A* inverse_std, Int n, double eps) {
  norm_of_row(x + blockIdx.x * n, scale, bias, y + blockIdx.x * n, mean, inverse_std, n, eps);
}

// of the sum of x and residual, rounded, which is written too
KERNEL layer_norm_of_sum(const T* x, const T* residual, const U* scale, const U* bias, T* y, A* mean, A* inverse_std,
                         T* sums, Int n, double eps) {
  const Int row = blockIdx.x * n;
  EACH_OF_ROW(i, n) sums[row + i] = narrow<T>(A(widen(x[row + i]) + widen(residual[row + i])));
  norm_of_row(sums + row, scale, bias, y + row, mean, inverse_std, n, eps);  // each thread reads what it has written
}

// products: dy normal, whose sums over the rows are the gradient of scale
KERNEL layer_norm_backward(const T* dy, const T* x, const U* scale, const A* mean, const A* inverse_std, T* dx,
                           A* products, Int n) {
  const Int row = blockIdx.x * n;
  const A centre = mean[blockIdx.x], factor = inverse_std[blockIdx.x];
  A sum = 0, product = 0;
  EACH_OF_ROW(i, n) {
    const A grad = widen(dy[row + i]), normal = (widen(x[row + i]) - centre) * factor;
    sum += grad * widen(scale[i]);
    product += grad * widen(scale[i]) * normal;
    products[row + i] = grad * normal;
  }
  const A of_sum = over_block<Add>(sum) / A(n), of_product = over_block<Add>(product) / A(n);
  EACH_OF_ROW(i, n) {
    const A normal = (widen(x[row + i]) - centre) * factor;
    dx[row + i] = narrow<T>(A(factor * (widen(dy[row + i]) * widen(scale[i]) - of_sum - normal * of_product)));
  }
}
