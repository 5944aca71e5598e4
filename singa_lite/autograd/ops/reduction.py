# SPDX-License-Identifier: Apache-2.0
"""Sums and means over axes of one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import check_bool
from ...tensor import Tensor, as_axes, product
from ..engine import Array, Context, Operator
from ._common import Shape, check_floats, check_tensors, scaled

__all__ = ["reduce_mean", "reduce_sum"]


class ReduceSum(Operator):
    autocast = "float32"
    where, kernel = "reduce_sum", "sum"

    def __init__(self, axes: int | Sequence[int] | None = None, keepdims: bool | int = 1) -> None:
        self.axes = axes
        self.keepdims = check_bool(self.where, "keepdims", keepdims)

    def check(self, *inputs: Tensor) -> None:
        check_tensors(self.where, *inputs)
        as_axes(self.where, self.axes, inputs[0].ndim())

    def kept_shape(self, shape: Shape) -> Shape:
        """Return the result's shape with reduced axes as 1."""
        axes = as_axes(self.where, self.axes, len(shape))
        return tuple(1 if axis in axes else size for axis, size in enumerate(shape))

    def forward(self, context: Context, *inputs: Array) -> Array:
        x = inputs[0]
        axes = as_axes(self.where, self.axes, x.ndim)
        context.save(x.shape)
        shape = self.kept_shape(x.shape)
        if not self.keepdims:
            shape = tuple(size for axis, size in enumerate(shape) if axis not in axes)
        out = context.empty(shape, x.dtype)
        context.run(self.kernel, x, out=out, axes=axes, keepdims=self.keepdims)
        return out

    def backward(self, context: Context, *dys: Array) -> Array:
        (shape,) = context.saved
        dx = context.empty(shape, dys[0].dtype)
        context.run("broadcast_to", dys[0].reshape(self.kept_shape(shape)), out=dx)
        return dx


def reduce_sum(x: Tensor, axes: int | Sequence[int] | None = None, keepdims: bool | int = 1) -> Tensor:
    """Return the sum over axes.

    Args:
        x: any tensor.
        axes: one axis or several; negative counts from the end; None is all.
        keepdims: whether reduced axes stay with size 1.

    Returns:
        The dtype of ``x``. float16 is summed in float32.

    Raises:
        ShapeError: x has no such axis, or one is named twice.
    """
    return ReduceSum(axes, keepdims)(x)  # type: ignore[no-any-return]


class ReduceMean(ReduceSum):
    where, kernel = "reduce_mean", "mean"

    def check(self, *inputs: Tensor) -> None:
        super().check(*inputs)
        check_floats(self.where, *inputs)

    def backward(self, context: Context, *dys: Array) -> Array:
        count = product(context.saved[0]) // max(1, dys[0].size)
        return super().backward(context, scaled(context, dys[0], 1 / max(1, count)))


def reduce_mean(x: Tensor, axes: int | Sequence[int] | None = None, keepdims: bool | int = 1) -> Tensor:
    """Return the mean over axes; arguments, result and errors as ``reduce_sum``, floats only."""
    return ReduceMean(axes, keepdims)(x)  # type: ignore[no-any-return]
