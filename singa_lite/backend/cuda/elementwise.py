# SPDX-License-Identifier: Apache-2.0
"""Element-by-element kernels, in elementwise.cu; two inputs broadcast as in numpy."""

from __future__ import annotations

from ..base import Array
from .axes import broadcast
from .launch import Launcher

RELATIONS = {
    "less": 1,
    "equal": 2,
    "less_equal": 3,
    "greater": 4,
    "greater_equal": 6,
}  # see compare in move.cu


class ElementwiseKernels(Launcher):
    """relu to clip."""

    def relu(self, x: Array, *, out: Array) -> None:
        self._map("relu", x, out)

    def sigmoid(self, x: Array, *, out: Array) -> None:
        self._map("sigmoid", x, out)

    def tanh(self, x: Array, *, out: Array) -> None:
        self._map("tanh_", x, out)

    def exp(self, x: Array, *, out: Array) -> None:
        self._map("exp_", x, out)

    def log(self, x: Array, *, out: Array) -> None:
        self._map("log_", x, out)

    def sqrt(self, x: Array, *, out: Array) -> None:
        self._map("sqrt_", x, out)

    def abs(self, x: Array, *, out: Array) -> None:
        self._map("abs_", x, out)

    def negative(self, x: Array, *, out: Array) -> None:
        self._map("negative", x, out)

    def sign(self, x: Array, *, out: Array) -> None:
        self._map("sign", x, out)

    def ceil(self, x: Array, *, out: Array) -> None:
        self._map("ceil_", x, out)

    def floor(self, x: Array, *, out: Array) -> None:
        self._map("floor_", x, out)

    def square(self, x: Array, *, out: Array) -> None:
        self._map("square", x, out)

    def relu_backward(self, dy: Array, y: Array, *, out: Array) -> None:
        self._slope("relu_backward", dy, y, out)

    def sigmoid_backward(self, dy: Array, y: Array, *, out: Array) -> None:
        self._slope("sigmoid_backward", dy, y, out)

    def tanh_backward(self, dy: Array, y: Array, *, out: Array) -> None:
        self._slope("tanh_backward", dy, y, out)

    def add(self, a: Array, b: Array, *, out: Array, relu: bool = False) -> None:
        self._meet("add_relu" if relu else "add", a, b, out)

    def sub(self, a: Array, b: Array, *, out: Array) -> None:
        self._meet("sub", a, b, out)

    def mul(self, a: Array, b: Array, *, out: Array) -> None:
        self._meet("mul", a, b, out)

    def div(self, a: Array, b: Array, *, out: Array) -> None:
        self._meet("div_", a, b, out)

    def pow(self, a: Array, b: Array, *, out: Array) -> None:
        self._meet("pow_", a, b, out)

    def pow_backward_base(self, dy: Array, a: Array, b: Array, *, out: Array) -> None:
        axes = broadcast(out.shape, a.shape, b.shape)
        self.each("elementwise.pow_backward_base", dy.dtype.char, out.size, dy, a, b, out, out.size, axes)

    def pow_backward_exponent(self, dy: Array, a: Array, y: Array, *, out: Array) -> None:
        axes = broadcast(out.shape, a.shape, y.shape)
        self.each("elementwise.pow_backward_exponent", dy.dtype.char, out.size, dy, a, y, out, out.size, axes)

    def compare(self, a: Array, b: Array, *, out: Array, relation: str) -> None:
        axes, types = broadcast(out.shape, a.shape, b.shape), a.dtype.char + out.dtype.char
        self.each("move.compare", types, out.size, a, b, out, out.size, axes, RELATIONS[relation])

    def clip(self, x: Array, *, out: Array, min: float | None, max: float | None) -> None:
        self.each("elementwise.clip", x.dtype.char, out.size, x, out, out.size, *_limits(min, max))

    def clip_backward(self, dy: Array, x: Array, *, out: Array, min: float | None, max: float | None) -> None:
        self.each(
            "elementwise.clip_backward", x.dtype.char, out.size, dy, x, out, out.size, *_limits(min, max)
        )

    def fill(self, *, out: Array, value: float) -> None:
        self.each("elementwise.fill", out.dtype.char, out.size, out, out.size, float(value))

    def _map(self, name: str, x: Array, out: Array) -> None:
        self.each("elementwise." + name, x.dtype.char, out.size, x, out, out.size)

    def _slope(self, name: str, dy: Array, y: Array, out: Array) -> None:
        self.each("elementwise." + name, y.dtype.char, out.size, dy, y, out, out.size)

    def _meet(self, name: str, a: Array, b: Array, out: Array) -> None:
        axes = broadcast(out.shape, a.shape, b.shape)
        self.each("elementwise." + name, a.dtype.char, out.size, a, b, out, out.size, axes)


def _limits(min: float | None, max: float | None) -> tuple[float, float, int, int]:
    return float(min or 0), float(max or 0), int(min is not None), int(max is not None)
