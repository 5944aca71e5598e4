# SPDX-License-Identifier: Apache-2.0
"""Matrix products and the bias that follows them."""

from __future__ import annotations

from math import prod

import numpy as np

from ...errors import OptionError, ShapeError
from ...tensor import Tensor, broadcast_shape
from ..engine import Array, Context, Operator
from ._common import broadcasting, check_floats, sum_to


def product_of(
    context: Context, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False
) -> Array:
    """The batched product of two raw arrays."""
    rows = a.shape[-1] if transpose_a else a.shape[-2]
    columns = b.shape[-2] if transpose_b else b.shape[-1]
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = context.empty((*batch, rows, columns), a.dtype)
    context.run("matmul", a, b, out=out, transpose_a=transpose_a, transpose_b=transpose_b)
    return out


def rows_of(x: Array) -> Array:
    """(..., k) as (rows, k); k may be 0."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


class Matmul(Operator):
    def check(self, *inputs: Tensor) -> None:
        check_floats("matmul", *inputs)
        x, w = inputs
        if x.ndim() < 2 or w.ndim() < 2 or x.shape[-1] != w.shape[-2]:
            raise ShapeError(
                f"matmul: x (..., m, k) and w (..., k, n) must agree in k, got {x.shape} and {w.shape}"
            )
        broadcast_shape("matmul", x.shape[:-2], w.shape[:-2])

    def forward(self, context: Context, *inputs: Array) -> Array:
        x, w = inputs
        context.save(x, w)
        if w.ndim == 2:  # one big product instead of one per batch element
            return product_of(context, rows_of(x), w).reshape(*x.shape[:-1], w.shape[1])
        return product_of(context, x, w)

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        (dy,), (x, w), (needs_x, needs_w) = dys, context.saved, context.needs_grad
        dx = dw = None
        if w.ndim == 2:
            rows = rows_of(dy)
            if needs_x:
                dx = product_of(context, rows, w, transpose_b=True).reshape(x.shape)
            if needs_w:
                dw = product_of(context, rows_of(x), rows, transpose_a=True)
            return dx, dw
        if needs_x:
            dx = sum_to(context, product_of(context, dy, w, transpose_b=True), x.shape)
        if needs_w:
            dw = sum_to(context, product_of(context, x, dy, transpose_a=True), w.shape)
        return dx, dw


def matmul(x: Tensor, w: Tensor) -> Tensor:
    """The matrix product over the last two axes; the axes before them broadcast.

    Args:
        x: float tensor (..., m, k).
        w: float tensor (..., k, n).

    Returns:
        (..., m, n), the dtype of the inputs. Accumulated in float32 or wider.

    Raises:
        ShapeError: fewer than two axes, k differs, or the axes before do not broadcast.
    """
    return Matmul()(x, w)  # type: ignore[no-any-return]


class AddBias(Operator):
    def __init__(self, axis: int = 0) -> None:
        if axis not in (0, 1):
            raise OptionError(f"add_bias: axis = {axis} must be 0 (b to every row) or 1 (b to every column)")
        self.axis = axis

    def check(self, *inputs: Tensor) -> None:
        check_floats("add_bias", *inputs)
        x, b = inputs
        if x.ndim() < 2 or (self.axis == 1 and x.ndim() != 2):
            raise ShapeError(f"add_bias: x must have two axes, but its shape is {x.shape}")
        wanted = (x.shape[-1],) if self.axis == 0 else (x.shape[0],)
        if b.shape != wanted:
            raise ShapeError(
                f"add_bias: b must have shape {wanted} for x {x.shape} and axis {self.axis}, not {b.shape}"
            )

    def forward(self, context: Context, *inputs: Array) -> Array:
        x, b = inputs
        context.save(b.shape)
        return broadcasting(context, "add", x, b if self.axis == 0 else b.reshape(-1, 1))

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        (dy,), (shape,), (needs_x, needs_b) = dys, context.saved, context.needs_grad
        db = None
        if needs_b:
            db = sum_to(context, dy, shape if self.axis == 0 else (*shape, 1)).reshape(shape)
        return dy if needs_x else None, db


def add_bias(x: Tensor, b: Tensor, axis: int = 0) -> Tensor:
    """x + b with b added to every row (axis 0) or every column (axis 1). x is not changed.

    Args:
        x: float tensor (..., n) for axis 0, (m, n) for axis 1.
        b: shape (n,) for axis 0, (m,) for axis 1.
        axis: 0 or 1.

    Returns:
        Same shape and dtype as ``x``.

    Raises:
        ShapeError: b does not fit.
        OptionError: another axis.
    """
    return AddBias(axis)(x, b)  # type: ignore[no-any-return]
