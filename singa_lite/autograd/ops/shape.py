# SPDX-License-Identifier: Apache-2.0
"""Operators that move elements, or round them, without computing: reshape, flatten, transpose, cat, pad, tile, cast."""

from __future__ import annotations

from builtins import slice as slice_type  # ``slice`` is the operator here
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...dtypes import accumulation_dtype, is_float
from ...errors import DTypeError, OptionError, ShapeError, check_choice, check_int, check_ints, check_number
from ...graph.rounded import note_written
from ...tensor import Tensor, as_axes, as_axis, as_index, as_permutation, as_shape, product, resolve_shape
from ...tensor.checks import as_dtype, convert_number, listed
from ..engine import Array, Context, Operator
from ._common import Cast, Shape, check_floats, check_tensors

__all__ = [
    "cast",
    "cat",
    "flatten",
    "pad",
    "reshape",
    "slice",
    "split",
    "squeeze",
    "tile",
    "transpose",
    "unsqueeze",
]


class Reshape(Operator):
    autocast = "keep"
    takes_any_float = True

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = shape

    def check(self, *inputs: Tensor) -> None:
        check_tensors("reshape", *inputs)
        resolve_shape(inputs[0].shape, self.shape)

    def forward(self, context: Context, *inputs: Array) -> Array:
        context.save(inputs[0].shape)
        note_written(inputs[0])  # or the view would be read-only for good (graph/rounded.py)
        return inputs[0].reshape(resolve_shape(inputs[0].shape, self.shape))

    def backward(self, context: Context, *dys: Array) -> Array:
        return dys[0].reshape(context.saved[0])


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the same elements, row by row, in another shape; shares the memory of ``x``.

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
    """Return ``x`` as a matrix: axes before ``axis`` joined, and those from it on; shares the memory of ``x``.

    Args:
        x: any tensor.
        axis: 0 <= axis <= number of axes; negative counts from the end.

    Returns:
        Shape (product before, product from axis on), the dtype of ``x``.

    Raises:
        ShapeError: x has no such axis.
    """
    check_tensors("flatten", x)
    first = as_index("flatten", "axis", axis)
    first = first if first == x.ndim() else as_axis("flatten", first, x.ndim())
    return reshape(x, (product(x.shape[:first]), product(x.shape[first:])))


class Transpose(Operator):
    autocast = "keep"
    takes_any_float = True

    def __init__(self, axes: Sequence[int] | None) -> None:
        self.axes = axes

    def check(self, *inputs: Tensor) -> None:
        check_tensors("transpose", *inputs)
        as_permutation(self.axes, inputs[0].ndim())

    def forward(self, context: Context, *inputs: Array) -> Array:
        return self.permute(context, inputs[0], as_permutation(self.axes, inputs[0].ndim))

    def backward(self, context: Context, *dys: Array) -> Array:
        axes = as_permutation(self.axes, dys[0].ndim)
        inverse = sorted(range(len(axes)), key=lambda axis: axes[axis])
        return self.permute(context, dys[0], tuple(inverse))

    def permute(self, context: Context, x: Array, axes: Shape) -> Array:
        out = context.empty(tuple(x.shape[axis] for axis in axes), x.dtype)
        context.run("transpose", x, out=out, axes=axes)
        return out


def transpose(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return ``x`` with its axes permuted, copied to row-major order.

    Args:
        x: any tensor.
        shape: the permutation (SINGA's name for it): axis i of the result is axis shape[i] of ``x``.
            None reverses the axes.

    Returns:
        The permuted shape, the dtype of ``x``.

    Raises:
        ShapeError: ``shape`` is not a permutation of the axes.
    """
    return Transpose(shape)(x)  # type: ignore[no-any-return]


def cast(x: Tensor, to: Any) -> Tensor:
    """Return the elements rounded to another float dtype.

    Args:
        x: float, any shape.
        to: a float dtype.

    Returns:
        The shape of ``x``, a copy where the dtype is its own.

    Raises:
        DTypeError: ``x`` or ``to`` is no float.
    """
    check_floats("cast", x)
    dtype = as_dtype(to)
    if not is_float(dtype):
        raise DTypeError(f"cast: to = {dtype} is no float dtype; use as_type(), whose result has no gradient")
    return Cast(dtype)(x)  # type: ignore[no-any-return]


class Concat(Operator):
    autocast = "widest"

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
    autocast = "keep"

    def __init__(self, pads: Sequence[int], constant: float = 0.0) -> None:
        self.pads = check_ints("pad", "pads", pads, 0)
        check_number("pad", "constant", constant)
        self.constant = constant

    def check(self, *inputs: Tensor) -> None:
        check_tensors("pad", *inputs)
        if len(self.pads) != 2 * inputs[0].ndim():
            raise ShapeError(
                f"pad: {inputs[0].ndim()} axes need {2 * inputs[0].ndim()} pads (all before, then all after), "
                f"got {len(self.pads)}"
            )
        convert_number("pad: constant", self.constant, inputs[0].dtype)

    def inside(self, shape: Shape) -> tuple[Any, ...]:
        """Return the index of the part of the result that holds x of this shape."""
        parts = (slice_type(before, before + size) for before, size in zip(self.pads, shape, strict=False))
        return *parts, ...  # an array even where there is no axis

    def forward(self, context: Context, *inputs: Array) -> Array:
        x = inputs[0]
        context.save(x.shape)
        befores, afters = self.pads[: x.ndim], self.pads[x.ndim :]
        shape = tuple(b + size + a for b, size, a in zip(befores, x.shape, afters, strict=True))
        y = context.empty(shape, x.dtype)
        context.run("fill", out=y, value=convert_number("pad", self.constant, x.dtype).item())
        context.run("copy", x, out=y[self.inside(x.shape)])
        return y

    def backward(self, context: Context, *dys: Array) -> Array:
        (shape,) = context.saved
        dx = context.empty(shape, dys[0].dtype)
        context.run("copy", dys[0][self.inside(shape)], out=dx)
        return dx


def pad(x: Tensor, mode: str, pads: Sequence[int], constant: float = 0.0) -> Tensor:
    """Return ``x`` inside a frame of a constant (SINGA's name and order of arguments).

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


class Slice(Operator):
    """Args: ``parts``: a slice of each axis, within it."""

    autocast = "keep"

    def __init__(self, parts: tuple[slice_type, ...]) -> None:
        self.parts = (*parts, ...)  # so a part is an array even where there is no axis

    def forward(self, context: Context, *inputs: Array) -> Array:
        part = inputs[0][self.parts]
        context.save(inputs[0].shape)
        out = context.empty(part.shape, part.dtype)
        context.run("copy", part, out=out)
        return out

    def backward(self, context: Context, *dys: Array) -> Array:
        (shape,) = context.saved
        dx = context.empty(shape, dys[0].dtype)
        context.run("fill", out=dx, value=0.0)
        context.run("copy", dys[0], out=dx[self.parts])
        return dx


def slice(
    x: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    axes: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> Tensor:
    """Return ``x[start:end:step]`` along some axes (SINGA's and ONNX's form; ``x[1:, ::2]`` is shorter).

    Args:
        x: any tensor.
        starts: where to begin on each of ``axes``; negative counts from the end, what is outside is left out.
        ends: where to stop, not included; with a negative step a large negative number is "before the first".
        axes: which axes; None is the first ones.
        steps: how far apart, not 0; None is 1.

    Returns:
        A copy of the part, of as many axes; the gradient of the rest is 0.

    Raises:
        ShapeError: the lists differ in length, hold other values than ints, or there is no such axis.
    """
    check_tensors("slice", x)
    given = [starts, ends, *(values for values in (axes, steps) if values is not None)]
    if not all(isinstance(v, Sequence) or (isinstance(v, np.ndarray) and v.ndim == 1) for v in given):
        raise ShapeError(f"slice: starts, ends, axes and steps must be lists of ints, got {given}")
    if len({len(values) for values in given}) != 1 or len(starts) > x.ndim():
        raise ShapeError(
            f"slice: starts, ends, axes and steps must have one length <= {x.ndim()}, got {given}"
        )
    numbers = (
        as_axes("slice", axes, x.ndim())
        if axes is None
        else [as_axis("slice", axis, x.ndim()) for axis in axes]
    )
    parts = [slice_type(None)] * x.ndim()
    for index, axis in enumerate(numbers[: len(starts)]):
        step = 1 if steps is None else as_index("slice", "step", steps[index])
        if step == 0 or numbers[: len(starts)].count(axis) > 1:
            raise ShapeError(f"slice: step {step} of axis {axis}, which must be named once and not with 0")
        start, end = as_index("slice", "start", starts[index]), as_index("slice", "end", ends[index])
        found = range(x.shape[axis])[start:end:step]
        parts[axis] = slice_type(0, 0) if not found else slice_type(found[0], _behind(found), step)
    return Slice(tuple(parts))(x)  # type: ignore[no-any-return]


def _behind(numbers: range) -> int | None:
    """Return where a slice of these numbers stops; None is before the first."""
    return None if numbers.stop < 0 else numbers.stop


class Split(Operator):
    """Args: ``axis``, >= 0; ``sizes``: of the parts along it."""

    autocast = "keep"

    def __init__(self, axis: int, sizes: list[int]) -> None:
        self.axis, self.sizes = axis, sizes

    def forward(self, context: Context, *inputs: Array) -> tuple[Array, ...]:
        x, start = inputs[0], 0
        parts = []
        for size in self.sizes:
            part = context.empty((*x.shape[: self.axis], size, *x.shape[self.axis + 1 :]), x.dtype)
            context.run("slice", x, out=part, axis=self.axis, start=start)
            parts.append(part)
            start += size
        return tuple(parts)

    def backward(self, context: Context, *dys: Array) -> Array:
        shape = list(dys[0].shape)
        shape[self.axis] = sum(self.sizes)
        dx = context.empty(tuple(shape), dys[0].dtype)
        context.run("concat", *dys, out=dx, axis=self.axis)
        return dx


def split(
    x: Tensor, axis: int, parts: Sequence[int] | None = None, num_output: int | None = None
) -> tuple[Tensor, ...]:
    """Cut a tensor into parts along one axis, the reverse of ``cat``.

    Args:
        x: any tensor.
        axis: negative counts from the end.
        parts: sizes >= 0 that add up to that of the axis.
        num_output: instead of ``parts``, how many equal ones.

    Returns:
        The parts, as copies.

    Raises:
        ShapeError: no such axis, or sizes that do not add up.
        OptionError: neither or both of ``parts`` and ``num_output``, or ``parts`` is not a list of ints >= 0.
    """
    check_tensors("split", x)
    position = as_axis("split", axis, x.ndim())
    if (parts is None) == (num_output is None):
        raise OptionError(f"split: give parts or num_output, not {parts!r} and {num_output!r}")
    if parts is None:
        count = check_int("split", "num_output", num_output, 1)
        parts = [x.shape[position] // count] * count
    sizes = check_ints("split", "parts", parts, 0)
    if sum(sizes) != x.shape[position] or not sizes:
        raise ShapeError(
            f"split: parts {sizes} do not add up to {x.shape[position]}, the size of axis {axis}"
        )
    return Split(position, sizes)(x)  # type: ignore[no-any-return]


class Tile(Operator):
    autocast = "keep"

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def forward(self, context: Context, *inputs: Array) -> Array:
        (y,) = inputs
        context.save(y.shape, y.dtype)
        for _, shape, (before, count, after) in self._axes(y.shape):
            x, y = y, context.empty(shape, y.dtype)
            context.run("broadcast_to", x.reshape(before, 1, after), out=y.reshape(before, count, after))
        return y

    def backward(self, context: Context, *dys: Array) -> Array:
        shape, dtype = context.saved
        dx = context.cast(dys[0], accumulation_dtype(dtype))  # rounded once, behind the last axis
        for source, _, (before, count, after) in reversed(list(self._axes(shape))):
            dy, dx = dx, context.empty(source, dx.dtype)
            context.run(
                "sum",
                dy.reshape(before, count, after),
                out=dx.reshape(before, after),
                axes=(1,),
                keepdims=False,
            )
        return context.cast(dx, dtype)

    def _axes(self, shape: Shape) -> Iterator[tuple[Shape, Shape, Shape]]:
        """Yield for each axis that is repeated the shape before and after it, and the latter in three axes."""
        for axis, count in enumerate(self.counts):
            if count != 1:
                longer = (*shape[:axis], shape[axis] * count, *shape[axis + 1 :])
                yield shape, longer, (product(shape[:axis]), count, product(shape[axis:]))
                shape = longer


def tile(x: Tensor, repeats: int | Sequence[int]) -> Tensor:
    """Return copies of ``x`` side by side, as ``numpy.tile`` where ``repeats`` has a number for each axis.

    Args:
        x: any tensor.
        repeats: copies along each axis, >= 0; fewer numbers than axes are for the first ones, as in SINGA (numpy's
            for the last); more add axes in front.

    Returns:
        The size of each axis times its copies, the dtype of ``x``; shares its memory where all counts are 1.

    Raises:
        OptionError: ``repeats`` is not an int or a list of ints >= 0.
        ShapeError: more axes or elements than an array can have.
    """
    check_tensors("tile", x)
    given = check_ints("tile", "repeats", listed(repeats), 0)
    counts = [*given, *[1] * (x.ndim() - len(given))]
    shape = as_shape("tile", (*[1] * (len(counts) - x.ndim()), *x.shape))
    as_shape("tile", [size * count for size, count in zip(shape, counts, strict=True)])
    y = reshape(x, shape)
    return y if all(count == 1 for count in counts) else Tile(counts)(y)


def squeeze(x: Tensor, axis: int | Sequence[int] = ()) -> Tensor:
    """Leave out axes of size 1; shares the memory of ``x``.

    Args:
        x: any tensor.
        axis: which; negative counts from the end; an empty list is all of size 1.

    Returns:
        The other axes.

    Raises:
        ShapeError: there is no such axis, or its size is not 1.
    """
    check_tensors("squeeze", x)
    given = listed(axis)
    chosen = as_axes("squeeze", given, x.ndim()) if given else [i for i, n in enumerate(x.shape) if n == 1]
    if any(x.shape[i] != 1 for i in chosen):
        raise ShapeError(f"squeeze: axes {given} of shape {x.shape} must have size 1")
    return reshape(x, [n for i, n in enumerate(x.shape) if i not in chosen])


def unsqueeze(x: Tensor, axis: int | Sequence[int] = -1) -> Tensor:
    """Add axes of size 1; shares the memory of ``x``.

    Args:
        x: any tensor.
        axis: where in the result; negative counts from its end.

    Returns:
        As many axes more as ``axis`` names.

    Raises:
        ShapeError: an axis is out of range or named twice.
    """
    check_tensors("unsqueeze", x)
    given = listed(axis)
    chosen = as_axes("unsqueeze", given, x.ndim() + len(given))
    sizes = iter(x.shape)
    return reshape(x, [1 if i in chosen else next(sizes) for i in range(x.ndim() + len(given))])
