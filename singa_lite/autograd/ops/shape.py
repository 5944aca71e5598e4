# SPDX-License-Identifier: Apache-2.0
"""Operators that move elements without computing: reshape, flatten, transpose, cat."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ShapeError
from ...tensor import Tensor
from ..engine import Array, Context, Operator
from ._common import Shape, check_axes, check_axis, check_tensors, product


class Reshape(Operator):
    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(int(size) for size in shape)

    def check(self, *inputs: Tensor) -> None:
        check_tensors("reshape", *inputs)
        self.resolve(inputs[0].shape)

    def resolve(self, given: Shape) -> Shape:
        """The target with its -1 worked out; ShapeError if it does not hold the same number of elements."""
        known = product([size for size in self.shape if size != -1])
        unknown = self.shape.count(-1)
        fits = product(given) == known if unknown == 0 else known > 0 and product(given) % known == 0
        if unknown > 1 or min(self.shape, default=0) < -1 or not fits:
            raise ShapeError(f"reshape: {given} does not fit into {self.shape} (at most one -1)")
        return tuple(product(given) // known if size == -1 else size for size in self.shape)

    def forward(self, context: Context, *inputs: Array) -> Array:
        context.save(inputs[0].shape)
        return inputs[0].reshape(self.resolve(inputs[0].shape))

    def backward(self, context: Context, *dys: Array) -> Array:
        return dys[0].reshape(context.saved[0])


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements, row by row, in another shape; shares the memory of ``x``.

    Args:
        x: any tensor.
        shape: the new sizes; one of them may be -1, "whatever is left".

    Returns:
        The new shape, the dtype of ``x``.

    Raises:
        ShapeError: another number of elements, or more than one -1.
    """
    return Reshape(shape)(x)  # type: ignore[no-any-return]


def flatten(x: Tensor, axis: int = 1) -> Tensor:
    """Two axes: all before ``axis`` joined, and all from ``axis`` on joined; shares the memory of ``x``.

    Args:
        x: any tensor.
        axis: 0 <= axis <= number of axes; negative counts from the end.

    Returns:
        Shape (product before, product from axis on), the dtype of ``x``.

    Raises:
        ShapeError: x has no such axis.
    """
    check_tensors("flatten", x)
    first = axis if axis == x.ndim() else check_axis("flatten", axis, x.ndim())
    return reshape(x, (product(x.shape[:first]), product(x.shape[first:])))


class Transpose(Operator):
    def __init__(self, axes: Sequence[int] | None) -> None:
        self.axes = None if axes is None else tuple(axes)

    def check(self, *inputs: Tensor) -> None:
        check_tensors("transpose", *inputs)
        self.resolve(inputs[0].ndim())

    def resolve(self, ndim: int) -> Shape:
        """The permutation counted from the front; ShapeError if it is none."""
        if self.axes is None:
            return tuple(reversed(range(ndim)))
        if len(check_axes("transpose", self.axes, ndim)) != ndim:
            raise ShapeError(f"transpose: {self.axes} is no permutation of {ndim} axes")
        return tuple(axis % ndim for axis in self.axes)

    def forward(self, context: Context, *inputs: Array) -> Array:
        return self.permute(context, inputs[0], self.resolve(inputs[0].ndim))

    def backward(self, context: Context, *dys: Array) -> Array:
        axes = self.resolve(dys[0].ndim)
        inverse = sorted(range(len(axes)), key=lambda place: axes[place])
        return self.permute(context, dys[0], tuple(inverse))

    def permute(self, context: Context, x: Array, axes: Shape) -> Array:
        out = context.empty(tuple(x.shape[axis] for axis in axes), x.dtype)
        context.run("transpose", x, out=out, axes=axes)
        return out


def transpose(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """``x`` with its axes permuted, copied to row-major order.

    Args:
        x: any tensor.
        shape: the permutation (SINGA's name for it): axis i of the result is axis shape[i] of ``x``.
            None reverses the axes.

    Returns:
        The permuted shape, the dtype of ``x``.

    Raises:
        ShapeError: ``shape`` is no permutation of the axes.
    """
    return Transpose(shape)(x)  # type: ignore[no-any-return]


class Concat(Operator):
    def __init__(self, axis: int = 0) -> None:
        self.axis = axis

    def check(self, *inputs: Tensor) -> None:
        check_tensors("cat", *inputs)
        axis = check_axis("cat", self.axis, inputs[0].ndim())
        for tensor in inputs:
            others = [shape[:axis] + shape[axis + 1 :] for shape in (tensor.shape, inputs[0].shape)]
            if tensor.ndim() != inputs[0].ndim() or others[0] != others[1]:
                raise ShapeError(
                    f"cat: shapes {inputs[0].shape} and {tensor.shape} must agree but for axis {axis}"
                )

    def forward(self, context: Context, *inputs: Array) -> Array:
        axis = self.axis % inputs[0].ndim
        sizes = [x.shape[axis] for x in inputs]
        context.save(axis, sizes)
        shape = (*inputs[0].shape[:axis], sum(sizes), *inputs[0].shape[axis + 1 :])
        out = context.empty(shape, inputs[0].dtype)
        context.run("concat", *inputs, out=out, axis=axis)
        return out

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        (dy,), (axis, sizes) = dys, context.saved
        gradients: list[Array | None] = []
        start = 0
        for size, needed in zip(sizes, context.needs_grad, strict=True):
            part = None
            if needed:
                part = context.empty((*dy.shape[:axis], size, *dy.shape[axis + 1 :]), dy.dtype)
                context.run("slice", dy, out=part, axis=axis, start=start)
            gradients.append(part)
            start += size
        return tuple(gradients)


def cat(xs: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors joined along one axis.

    Args:
        xs: one or more tensors of one dtype, with equal shapes but for ``axis``.
        axis: negative counts from the end.

    Returns:
        The joined shape, the dtype of the inputs.

    Raises:
        ShapeError: no tensors, no such axis, or other sizes differ.
    """
    if not xs:
        raise ShapeError("cat: expected at least one Tensor")
    return Concat(axis)(*xs)  # type: ignore[no-any-return]
