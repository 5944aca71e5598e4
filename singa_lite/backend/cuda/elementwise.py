# SPDX-License-Identifier: Apache-2.0
"""Element-by-element kernels: the formulas of formulas.h, and kernels without a formula there, in elementwise.cu."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ..base import Array
from ..formulas import FORMULAS, Formula
from .axes import broadcast
from .launch import Launcher, types_of

# see compare in move.cu
RELATIONS = {"less": 1, "equal": 2, "less_equal": 3, "greater": 4, "greater_equal": 6}
NO_NUMBERS = np.frombuffer(bytes(32), "V32")  # Numbers in functions.cuh


class ElementwiseKernels(Launcher):
    """A method for each of FORMULAS, and compare, clip and fill."""

    def add(self, a: Array, b: Array, *, out: Array, relu: bool = False) -> None:
        self.formula("add_relu" if relu else "add", (a, b), out)

    def add_gelu(self, a: Array, b: Array, *, out: tuple[Array, Array]) -> None:
        y, total = out
        axes = broadcast(y.shape, a.shape, b.shape)
        self.each("elementwise.add_gelu_formula", types_of(a, b), y.size, a, b, y, total, y.size, axes)

    def compare(self, a: Array, b: Array, *, out: Array, relation: str) -> None:
        axes, types = broadcast(out.shape, a.shape, b.shape), a.dtype.char + out.dtype.char
        self.each("move.compare", types, out.size, a, b, out, out.size, axes, RELATIONS[relation])

    def clip(self, x: Array, *, out: Array, min: float | None, max: float | None) -> None:
        self.each("elementwise.clip", x.dtype.char, out.size, x, out, out.size, *_limits(min, max))

    def clip_backward(self, dy: Array, x: Array, *, out: Array, min: float | None, max: float | None) -> None:
        given = (dy, x, out, out.size, *_limits(min, max))
        self.each("elementwise.clip_backward", x.dtype.char, out.size, *given)

    def fill(self, *, out: Array, value: float) -> None:
        self.each("elementwise.fill", out.dtype.char, out.size, out, out.size, self.scalar(value))

    def formula(self, name: str, inputs: tuple[Array, ...], out: Array, numbers: Any = NO_NUMBERS) -> None:
        """Start the kernel of a line of formulas.h; the second of two inputs may have a type of its own."""
        axes = (broadcast(out.shape, *(x.shape for x in inputs[-2:])),) if len(inputs) > 1 else ()
        given = (*inputs, out, out.size, *axes, numbers)
        self.each(f"elementwise.{name}_formula", types_of(inputs[0], inputs[-1]), out.size, *given)


def _kernel_of(formula: Formula) -> Callable[..., None]:
    def kernel(self: ElementwiseKernels, *inputs: Array, out: Array, **numbers: float) -> None:
        values = [float(numbers[name]) for name in formula.numbers]
        packed = np.frombuffer(struct.pack(f"<{len(values)}d", *values).ljust(32, b"\0"), "V32")
        self.formula(formula.name, inputs, out, packed)

    kernel.__name__, kernel.__doc__ = formula.name, formula.signature
    return kernel


for _formula in FORMULAS.values():
    if not hasattr(ElementwiseKernels, _formula.name):
        setattr(ElementwiseKernels, _formula.name, _kernel_of(_formula))


def _limits(min: float | None, max: float | None) -> tuple[float, float, int, int]:
    return float(min or 0), float(max or 0), int(min is not None), int(max is not None)
