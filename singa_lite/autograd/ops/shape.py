# SPDX-License-Identifier: Apache-2.0
"""Operators that move elements without computing: reshape, flatten, transpose, cat, pad."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import DTypeError, OptionError, ShapeError, check_choice, check_int, check_number
from ...tensor import Tensor, as_axis, as_permutation, product, resolve_shape
from ..engine import Array, Context, Operator
from ._common import Shape, check_tensors


class Reshape(Operator):
    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = shape

    def check(self, *inputs: Tensor) -> None:
        check_tensors("reshape", *inputs)
        resolve_shape("reshape", inputs[0].shape, self.shape)

    def forward(self, context: Context, *inputs: Array) -> Array:
        context.save(inputs[0].shape)
        return inputs[0].reshape(resolve_shape("reshape", inputs[0].shape, self.shape))

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
    first = axis if axis == x.ndim() else as_axis("flatten", axis, x.ndim())
    return reshape(x, (product(x.shape[:first]), product(x.shape[first:])))


class Transpose(Operator):
    def __init__(self, axes: Sequence[int] | None) -> None:
        self.axes = axes

    def check(self, *inputs: Tensor) -> None:
        check_tensors("transpose", *inputs)
        as_permutation("transpose", self.axes, inputs[0].ndim())

    def forward(self, context: Context, *inputs: Array) -> Array:
        return self.permute(context, inputs[0], as_permutation("transpose", self.axes, inputs[0].ndim))

    def backward(self, context: Context, *dys: Array) -> Array:
        axes = as_permutation("transpose", self.axes, dys[0].ndim)
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
        axis = as_axis("cat", self.axis, inputs[0].ndim())
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
    if not isinstance(xs, (list, tuple)):
        raise DTypeError(f"cat: expected a list of Tensors, got {type(xs).__name__}")
    if not xs:
        raise ShapeError("cat: expected at least one Tensor")
    return Concat(axis)(*xs)  # type: ignore[no-any-return]


class Pad(Operator):
    def __init__(self, pads: Sequence[int], constant: float = 0.0) -> None:
        if not isinstance(pads, (list, tuple)):
            raise OptionError(f"pad: pads = {pads!r} must be a list of ints")
        self.pads = [check_int("pad", "pads", size, 0) for size in pads]
        self.constant = check_number("pad", "constant", constant)

    def check(self, *inputs: Tensor) -> None:
        check_tensors("pad", *inputs)
        if len(self.pads) != 2 * inputs[0].ndim():
            raise ShapeError(
                f"pad: {inputs[0].ndim()} axes need {2 * inputs[0].ndim()} pads (all before, then all after), "
                f"got {len(self.pads)}"
            )
        if inputs[0].dtype.kind != "f" and not self.constant.is_integer():
            raise DTypeError(f"pad: constant = {self.constant} is no {inputs[0].dtype}")

    def inside(self, shape: Shape) -> tuple[slice, ...]:
        """Where x of this shape lies in the result."""
        return tuple(slice(before, before + size) for before, size in zip(self.pads, shape, strict=False))

    def forward(self, context: Context, *inputs: Array) -> Array:
        x = inputs[0]
        context.save(x.shape)
        befores, afters = self.pads[: x.ndim], self.pads[x.ndim :]
        shape = tuple(b + size + a for b, size, a in zip(befores, x.shape, afters, strict=True))
        y = context.empty(shape, x.dtype)
        context.run("fill", out=y, value=self.constant)
        context.run("copy", x, out=y[self.inside(x.shape)])
        return y

    def backward(self, context: Context, *dys: Array) -> Array:
        (shape,) = context.saved
        dx = context.empty(shape, dys[0].dtype)
        context.run("copy", dys[0][self.inside(shape)], out=dx)
        return dx


def pad(x: Tensor, mode: str, pads: Sequence[int], constant: float = 0.0) -> Tensor:
    """``x`` inside a frame of a constant (SINGA's name and order of arguments).

    Args:
        x: any tensor, n axes.
        mode: "constant"; SINGA's "reflect" and "edge" are not there.
        pads: 2 n ints >= 0: what is added before each axis, then what is added after each.
        constant: value of the frame; -inf is one.

    Returns:
        Each axis longer by its two pads, the dtype of ``x``.

    Raises:
        OptionError: another mode, or a negative pad.
        ShapeError: not two pads an axis.
    """
    check_choice("pad", "mode", mode, ("constant",))
    return Pad(pads, constant)(x)  # type: ignore[no-any-return]
