# SPDX-License-Identifier: Apache-2.0
"""Selecting elements: comparisons, choosing between two tensors by a condition, and taking elements by index."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dtypes import is_float
from ...errors import DTypeError
from ...tensor import Number, Tensor, as_axis, broadcast_shape, float32
from ...tensor.checks import as_numbers
from ..engine import Array, Context, Operator, no_grad
from ._common import Broadcasting, check_floats, check_ndim, check_tensors, combine, like, operands, sum_to

__all__ = ["embedding", "equal", "gather", "greater", "greater_equal", "less", "less_equal", "where"]


class Compare(Broadcasting):
    """Args: ``relation``: one of those of the kernel ``compare``."""

    def __init__(self, relation: str) -> None:
        self.where = self.relation = relation

    def forward(self, context: Context, *inputs: Array) -> Array:
        a, b = inputs
        dtype = a.dtype if is_float(a.dtype) else float32
        out = context.empty(np.broadcast_shapes(a.shape, b.shape), dtype)
        context.run("compare", a, b, out=out, relation=self.relation)
        return out


def _compared(relation: str, x: Tensor | Number, y: Tensor | Number) -> Tensor:
    with no_grad():  # a step function: its gradient is 0 wherever it has one
        return combine(Compare(relation), x, y)


def greater(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """1 where x > y, else 0.

    Args:
        x: tensor or number.
        y: tensor or number; the shapes must broadcast and the dtypes agree.

    Returns:
        The broadcast shape; the dtype of float inputs, float32 for integers. A leaf: it has no gradient.

    Raises:
        ShapeError: the shapes do not broadcast.
        DTypeError: the dtypes differ.
    """
    return _compared("greater", x, y)


def greater_equal(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """1 where x >= y, else 0; arguments, result and errors as ``greater``."""
    return _compared("greater_equal", x, y)


def less(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """1 where x < y, else 0; arguments, result and errors as ``greater``."""
    return _compared("less", x, y)


def less_equal(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """1 where x <= y, else 0; arguments, result and errors as ``greater``."""
    return _compared("less_equal", x, y)


def equal(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """1 where x == y, else 0; arguments, result and errors as ``greater``."""
    return _compared("equal", x, y)


class Where(Operator):
    """Inputs: the condition, of any dtype, and the two tensors to choose from."""

    autocast = "widest"

    def check(self, *inputs: Tensor) -> None:
        condition, x, y = inputs
        check_tensors("where", x, y)
        if not isinstance(condition, Tensor):
            raise DTypeError(f"where: the condition must be a Tensor, not {type(condition).__name__}")
        broadcast_shape("where", condition.shape, broadcast_shape("where", x.shape, y.shape))

    def forward(self, context: Context, *inputs: Array) -> Array:
        condition, x, y = inputs
        shape = np.broadcast_shapes(condition.shape, x.shape, y.shape)
        if condition.dtype != x.dtype:  # not cast, which would round 0.5 to int 0 and 1e-10 to float16 0
            is_zero, chosen = (context.empty(condition.shape, x.dtype) for _ in range(2))
            for values, out in ((condition, is_zero), (is_zero, chosen)):
                zero = context.backend.asarray(np.zeros((), values.dtype))
                context.run("compare", values, zero, out=out, relation="equal")
            condition = chosen
        if condition.shape != shape:
            whole = context.empty(shape, x.dtype)
            context.run("broadcast_to", condition, out=whole)
            condition = whole
        context.save(condition, x.shape, y.shape)
        return like(context, "select", condition, x, y)

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        (dy,), (condition, x_shape, y_shape) = dys, context.saved
        zero = context.backend.asarray(np.zeros((), dy.dtype))
        dx = dother = None
        if context.needs_grad[1]:
            dx = sum_to(context, like(context, "select", condition, dy, zero), x_shape)
        if context.needs_grad[2]:
            dother = sum_to(context, like(context, "select", condition, zero, dy), y_shape)
        return None, dx, dother


def where(x: Tensor | Number, y: Tensor | Number, condition: Any) -> Tensor:
    """Return x where the condition is not 0, else y (SINGA's order of arguments).

    Args:
        x: tensor or number.
        y: tensor or number; the shapes must broadcast and the dtypes agree.
        condition: a Tensor of any dtype, or anything numpy makes an array of; its shape must broadcast too. In a
            recorded step give a Tensor: one that is made from values of the host lets the step run eagerly.

    Returns:
        The broadcast shape, the dtype of x and y. The condition gets no gradient.

    Raises:
        ShapeError: the shapes do not broadcast.
        DTypeError: the dtypes of x and y differ, or the condition does not consist of numbers.
    """
    x, y = operands("where", x, y)
    if not isinstance(condition, Tensor):
        condition = Tensor(data=as_numbers("where", "condition", condition) != 0, device=x.device)
    return Where()(condition, x, y)  # type: ignore[no-any-return]


class Gather(Operator):
    """Inputs: x, and indices of one axis of it; ``where`` is the function that errors name."""

    autocast = "keep"

    def __init__(self, where: str, axis: int) -> None:
        self.where, self.axis = where, axis

    def check(self, *inputs: Tensor) -> None:
        x, indices = inputs
        check_tensors(self.where, x)
        as_axis(self.where, self.axis, x.ndim())
        if not isinstance(indices, Tensor) or indices.dtype.kind != "i":
            came = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
            raise DTypeError(
                f"{self.where}: indices must be an int32 or int64 Tensor, not {came}; use as_type(int32)"
            )

    def forward(self, context: Context, *inputs: Array) -> Array:
        x, indices = inputs
        axis = self.axis % x.ndim
        context.save(x.shape, indices)
        out = context.empty((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)
        context.run("gather", x, indices, out=out, axis=axis, where=self.where)
        return out

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        shape, indices = context.saved
        dx = context.empty(shape, dys[0].dtype)
        context.run("gather_backward", dys[0], indices, out=dx, axis=self.axis % len(shape))
        return dx, None


def gather(x: Tensor, axis: int, indices: Any) -> Tensor:
    """Take the elements of ``x`` at the given indices of an axis (names and order are SINGA's).

    Args:
        x: any tensor.
        axis: negative counts from the end.
        indices: int32 or int64 Tensor of any shape, in 0 .. x.shape[axis] - 1; or a list or numpy array, where
            negative ones count from the end.

    Returns:
        The axes of ``indices`` instead of ``axis``, the dtype of ``x``. An element that is taken several times has the
        sum of the gradients, always added in the same order.

    Raises:
        ShapeError: no such axis, or an index out of range; on a CUDA device at the next call that waits for it.
        DTypeError: indices that are not integers.
    """
    check_tensors("gather", x)
    if not isinstance(indices, Tensor):
        values = as_numbers("gather", "indices", indices)
        values = values.astype(int) if isinstance(indices, (list, tuple)) and not values.size else values
        if values.dtype.kind not in "iu":
            raise DTypeError(f"gather: indices must be integers, not {values.dtype}")
        if values.dtype.itemsize < 8:  # the size may not fit
            values = values.astype(np.int64)
        size = x.shape[as_axis("gather", axis, x.ndim())]
        indices = Tensor(data=np.where(values < 0, values + size, values), device=x.device)
    return Gather("gather", axis)(x, indices)  # type: ignore[no-any-return]


def embedding(x: Tensor, w: Tensor) -> Tensor:
    """Take the rows of a matrix that ids name (SINGA's order of arguments).

    Args:
        x: ids of any shape, int32 or int64, in 0 .. rows - 1.
        w: float tensor (rows, features).

    Returns:
        Shape (x.shape..., features), the dtype of ``w``. A row that several ids name has the sum of their gradients.

    Raises:
        ShapeError: w is not a matrix, or an id is out of range; on a CUDA device at the next call that waits for it.
        DTypeError: ids that are not integers.
    """
    check_floats("embedding", w)
    check_ndim("embedding", "w", w, 2, "(rows, features)")
    return Gather("embedding", 0)(w, x)  # type: ignore[no-any-return]
