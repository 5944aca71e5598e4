# SPDX-License-Identifier: Apache-2.0
"""Element-by-element kernels; two inputs broadcast as in numpy."""

from __future__ import annotations

import numpy as np

from ..base import Array
from ._wide import wide

COMPARISONS = {
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
}


class ElementwiseKernels:
    """relu to clip."""

    def relu(self, x: Array, *, out: Array) -> None:
        np.maximum(x, 0, out=out)  # NaN stays NaN

    def relu_backward(self, dy: Array, y: Array, *, out: Array) -> None:
        np.multiply(dy, y > 0, out=out)

    def sigmoid(self, x: Array, *, out: Array) -> None:
        # 1 / (1 + exp(-x)) = (1 + tanh(x / 2)) / 2 overflows for no x
        half = wide(x) * 0.5
        np.tanh(half, out=half)
        half += 1
        np.multiply(half, 0.5, out=out, casting="same_kind")

    def sigmoid_backward(self, dy: Array, y: Array, *, out: Array) -> None:
        np.subtract(1, y, out=out)
        np.multiply(out, y, out=out)
        np.multiply(out, dy, out=out)

    def tanh(self, x: Array, *, out: Array) -> None:
        np.tanh(x, out=out)

    def tanh_backward(self, dy: Array, y: Array, *, out: Array) -> None:
        np.multiply(y, y, out=out)
        np.subtract(1, out, out=out)
        np.multiply(out, dy, out=out)

    def exp(self, x: Array, *, out: Array) -> None:
        np.exp(x, out=out)

    def log(self, x: Array, *, out: Array) -> None:
        np.log(x, out=out)

    def sqrt(self, x: Array, *, out: Array) -> None:
        np.sqrt(x, out=out)

    def abs(self, x: Array, *, out: Array) -> None:
        np.abs(x, out=out)

    def negative(self, x: Array, *, out: Array) -> None:
        np.negative(x, out=out)

    def sign(self, x: Array, *, out: Array) -> None:
        np.sign(x, out=out)

    def ceil(self, x: Array, *, out: Array) -> None:
        np.ceil(x, out=out)

    def floor(self, x: Array, *, out: Array) -> None:
        np.floor(x, out=out)

    def square(self, x: Array, *, out: Array) -> None:
        np.multiply(x, x, out=out)

    def add(self, a: Array, b: Array, *, out: Array) -> None:
        np.add(a, b, out=out)

    def sub(self, a: Array, b: Array, *, out: Array) -> None:
        np.subtract(a, b, out=out)

    def mul(self, a: Array, b: Array, *, out: Array) -> None:
        np.multiply(a, b, out=out)

    def div(self, a: Array, b: Array, *, out: Array) -> None:
        np.divide(a, b, out=out)

    def pow(self, a: Array, b: Array, *, out: Array) -> None:
        np.power(a, b, out=out)

    def pow_backward_base(self, dy: Array, a: Array, b: Array, *, out: Array) -> None:
        a, b = wide(a), wide(b)
        slope = np.where(b == 0, 0, b * np.power(a, b - 1))  # a ** 0 is 1 also at a = 0, where a ** -1 is inf
        np.multiply(dy, slope, out=out, casting="same_kind")

    def pow_backward_exponent(self, dy: Array, a: Array, y: Array, *, out: Array) -> None:
        a = wide(a)
        np.multiply(dy, np.where(a == 0, 0, y * np.log(a)), out=out, casting="same_kind")

    def compare(self, a: Array, b: Array, *, out: Array, relation: str) -> None:
        out[...] = COMPARISONS[relation](a, b)

    def clip(self, x: Array, *, out: Array, min: float | None, max: float | None) -> None:
        np.clip(x, min, max, out=out)

    def clip_backward(self, dy: Array, x: Array, *, out: Array, min: float | None, max: float | None) -> None:
        inside = np.ones(x.shape, bool)
        if min is not None:
            inside &= x >= min
        if max is not None:
            inside &= x <= max
        np.multiply(dy, inside, out=out)
