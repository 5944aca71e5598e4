// SPDX-License-Identifier: Apache-2.0
// The formulas of operators that compute element by element, each written once: compiled into native/kernels, compiled by
// NVRTC for CUDA, and evaluated by numpy. CONTRIBUTING.md says what else a new operator needs.
//
// Note [formulas]: a line is UNARY, BINARY or TERNARY(kernel, type, inputs..., value[, numbers...])  // what it gives
// - type: A, the type in which elements are computed (float for float16), or Real, a float type for integers too.
// - inputs: their names. Two or three inputs broadcast to the result; the first of three has its shape already.
// - value: an expression that C++ and Python read alike: + - * /, comparisons, & and |, where(condition, yes, no), A(0) and
//   Real(0.5) around constants that are not whole or alone, and the functions that native/kernels/vector_math.h,
//   backend/cuda/functions.cuh and backend/cpu/functions.py define.
//   A comparison is 1 or 0 where it is multiplied by a number; numpy has no difference of two: lr * (v > 0) - lr * (v < 0).
// - numbers: names of attributes, which are floats.
// The gradient of an operator is a line of its own, kernel_backward: of dy and x, or of dy and y if its class is SavesOutput.
// A file that includes this one defines the three macros first.

UNARY(relu, A, x, where(x < 0, A(0), x))  // max(x, 0); NaN stays
UNARY(sigmoid, Real, x, logistic(x))  // 1 / (1 + e^-x)
UNARY(tanh, Real, x, tanh(x))  // the hyperbolic tangent
UNARY(exp, Real, x, exp(x))  // e^x
UNARY(log, Real, x, log(x))  // the natural logarithm
UNARY(sqrt, Real, x, sqrt(x))  // the square root
UNARY(ceil, Real, x, ceil(x))  // the smallest whole number >= x
UNARY(abs, A, x, where(x < 0, -x, x + 0))  // |x|
UNARY(negative, A, x, -x)  // -x
UNARY(sign, A, x, where(x > 0, A(1), where(x < 0, A(-1), x)))  // -1, 0 or 1
UNARY(finite_or_zero, A, x, where(x - x == 0, x, A(0)))  // x, or 0 where it is infinite or NaN
UNARY(square, A, x, x * x)  // x x
UNARY(leakyrelu, A, x, where(x > 0, x, alpha * x), alpha)  // x, or alpha x below 0
UNARY(elu, Real, x, where(x > 0, x, alpha * expm1(x)), alpha)  // x, or alpha (e^x - 1) below 0
UNARY(gelu, Real, x, x * normal_cdf(x))  // x times the probability that a normal variable is less

BINARY(square_backward, A, dy, x, dy * (x + x))  // dx of square
BINARY(relu_backward, A, dy, y, where(y > 0, dy, A(0)))  // dx of relu
BINARY(sigmoid_backward, Real, dy, x, dy * logistic_grad(x))  // dx of sigmoid
BINARY(tanh_backward, A, dy, y, dy * (1 - y * y))  // dx of tanh
BINARY(leakyrelu_backward, A, dy, x, where(x > 0, dy, alpha * dy), alpha)  // dx of leakyrelu
BINARY(elu_backward, Real, dy, x, dy * where(x > 0, Real(1), alpha * exp(x)), alpha)  // dx of elu
BINARY(gelu_backward, Real, dy, x, dy * (normal_cdf(x) + x * normal_pdf(x)))  // dx of gelu

// gelu with tanh(u) for the error function is x logistic(2 u), and 2 u = x (1.5957.. + 0.07135.. x^2)
UNARY(gelu_tanh, Real, x, x * logistic(x * (Real(1.5957691216057308) + Real(0.07135481627260025) * x * x)))  // that
BINARY(gelu_tanh_backward, Real, dy, x, dy * (logistic(x * (Real(1.5957691216057308) + Real(0.07135481627260025) * x * x)) + x * logistic_grad(x * (Real(1.5957691216057308) + Real(0.07135481627260025) * x * x)) * (Real(1.5957691216057308) + Real(0.21406444881780076) * x * x)))  // its dx

BINARY(add, A, a, b, a + b)  // a + b
BINARY(sub, A, a, b, a - b)  // a - b
BINARY(mul, A, a, b, a * b)  // a b
BINARY(div, A, a, b, a / b)  // a / b
BINARY(floor_div, A, a, b, floored_quotient(a, b))  // floor(a / b); 0 for an integer a and b = 0
BINARY(pow, Real, a, b, pow(a, b))  // a ** b
BINARY(maximum, A, a, b, where(a < b, b, where(b == b, a, b)))  // the larger of a and b; NaN if one is
BINARY(minimum, A, a, b, where(b < a, b, where(b == b, a, b)))  // the smaller of a and b; NaN if one is

// a ** 0 is 1 also at a = 0, where a ** -1 is infinite
TERNARY(pow_backward_base, Real, dy, a, b, dy * where(b == 0, Real(0), b * pow(a, b - 1)))  // gradient of a, not yet summed
TERNARY(pow_backward_exponent, Real, dy, a, y, dy * where(a == 0, Real(0), y * log(a)))  // gradient of b; 0 where a is 0

TERNARY(select, A, c, a, b, where(c != 0, a, b))  // a, or b where c is 0
TERNARY(pass_where_less, A, dy, a, b, where(a < b, dy, A(0)))  // dy where a < b, else 0
TERNARY(pass_where_not_less, A, dy, a, b, where(a < b, A(0), dy))  // 0 where a < b, else dy

// logarithms below -100 count as -100, so that a probability of 0 or 1 costs no infinity
BINARY(binary_cross_entropy, Real, x, t, -(t * where(log(x) < -100, Real(-100), log(x)) + (1 - t) * where(log1p(-x) < -100, Real(-100), log1p(-x))))  // the cost of each element
BINARY(binary_cross_entropy_grad, Real, x, t, (x - t) / where(x * (1 - x) < Real(1e-12), Real(1e-12), x * (1 - x)))  // its dx
