# SPDX-License-Identifier: Apache-2.0
"""What the operator families share: checks of inputs, and calls of kernels that need no explanation."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from ...config import this_thread
from ...dtypes import accumulation_dtype, is_float, is_narrow
from ...errors import DTypeError, ShapeError
from ...tensor import Number, Tensor, broadcast_shape, float32, number_array
from ...tensor.checks import convert_number
from ...tensor.core import check_tensor
from ..engine import Array, Context, Operator

Shape = tuple[int, ...]


# ---- checks --------------------------------------------------------------------------------------------


def check_tensors(where: str, *tensors: object) -> None:
    """Raise DTypeError unless all are Tensors of one dtype, ShapeError if there are none."""
    if not tensors:
        raise ShapeError(f"{where}: expected at least one Tensor")
    for tensor in tensors:
        check_tensor(where, tensor)
    dtypes = [tensor.array.dtype for tensor in tensors]  # type: ignore[attr-defined]  # they are Tensors
    if dtypes.count(dtypes[0]) < len(dtypes):
        found = ", ".join(str(dtype) for dtype in dtypes)
        raise DTypeError(f"{where}: inputs must share one dtype, got {found}; convert with as_type()")


def check_floats(where: str, *tensors: object) -> None:
    """Raise DTypeError unless all are Tensors of one float dtype."""
    check_tensors(where, *tensors)
    first = tensors[0]
    if isinstance(first, Tensor) and not is_float(first.dtype):
        raise DTypeError(f"{where}: needs float tensors, got {first.dtype}; convert with as_type(float32)")


def check_floats_beside(where: str, count: int, *tensors: Tensor) -> None:
    """Do ``check_floats``, where beside 16 bits all tensors but the first ``count`` may be float32."""
    if isinstance(tensors[0], Tensor) and is_narrow(tensors[0].dtype):
        others = [tensor for tensor in tensors[count:] if getattr(tensor, "dtype", None) != float32]
        tensors = (*tensors[:count], *others)
    check_floats(where, *tensors)


def check_ndim(where: str, name: str, tensor: Tensor, ndim: int, axes: str) -> None:
    """Raise ShapeError unless ``tensor`` has ``ndim`` axes, which the message calls ``axes``."""
    if tensor.ndim() != ndim:
        raise ShapeError(f"{where}: {name} must have {ndim} axes {axes}, but its shape is {tensor.shape}")


def check_some(where: str, what: str, tensor: Tensor) -> None:
    """Raise ShapeError if ``tensor`` has no element to take ``what`` of."""
    if tensor.size() == 0:
        raise ShapeError(
            f"{where}: x has shape {tensor.shape}: there is no {what} of nothing; leave empty batches out"
        )


def operands(where: str, a: Tensor | Number, b: Tensor | Number) -> tuple[Tensor, Tensor]:
    """Both as Tensors, a number taking dtype and device of the other; DTypeError for anything else."""
    if isinstance(a, Tensor):
        return a, b if isinstance(b, Tensor) else constant(where, b, a)
    if isinstance(b, Tensor):
        return constant(where, a, b), b
    raise DTypeError(f"{where}: one operand must be a Tensor, got {type(a).__name__} and {type(b).__name__}")


def constant(where: str, value: object, like: Tensor) -> Tensor:
    """Return a scalar Tensor with the dtype and device of ``like``, rounded to it; never takes a gradient."""
    tensor = Tensor.wrap(number_array(where, value, like), like.device)
    tensor.requires_grad = False
    return tensor


# ---- kernels -------------------------------------------------------------------------------------------


def like(context: Context, kernel: str, x: Array, *others: Array, **attributes: Any) -> Array:
    """Run a kernel whose result has the shape and dtype of its first input."""
    out = context.backend.empty(x.shape, x.dtype)
    context.backend.run(kernel, x, *others, out=out, **attributes)
    return out


def broadcasting(context: Context, kernel: str, *xs: Array) -> Array:
    """Run a kernel whose result has the broadcast shape of its inputs and the dtype of the first."""
    shape, *others = (x.shape for x in xs)
    for other in others:
        shape = broadcast_shape(kernel, shape, other)
    out = context.backend.empty(shape, xs[0].dtype)
    context.backend.run(kernel, *xs, out=out)
    return out


def sum_to(context: Context, dy: Array, shape: Shape, dtype: Any = None) -> Array:
    """Return ``dy`` summed back to the shape that was broadcast to it, in ``dtype``; dy itself if nothing changes."""
    wanted = dy.dtype if dtype is None else dtype
    if dy.shape == shape and dy.dtype == wanted:
        return dy
    out = context.empty(shape, wanted)
    context.run("sum_to", dy, out=out)
    return out


def as_array(context: Context, number: float, dtype: Any) -> Array:
    """Return ``number`` as an array without axes."""
    return context.backend.asarray(np.array(number, dtype))


def scaled(context: Context, x: Array, factor: float) -> Array:
    """Return x * factor, in the dtype of x; rounded once."""
    return like(context, "mul", x, as_array(context, factor, accumulation_dtype(x.dtype)))


# ---- operators -----------------------------------------------------------------------------------------


class Elementwise(Operator):
    """A formula of one float tensor: the kernels ``kernel`` (x) -> y and ``kernel``_backward (dy, x) -> dx.

    Args:
        numbers: the attributes of both.
    """

    kernel: str
    autocast: ClassVar[Literal["keep", "widest"] | None] = "keep"

    def __init__(self, **numbers: float) -> None:
        self.numbers = numbers

    def check(self, *inputs: Tensor) -> None:
        check_floats(self.kernel, *inputs)

    def forward(self, context: Context, *inputs: Array) -> Array:
        context.save(inputs[0])
        return like(context, self.kernel, inputs[0], **self.numbers)

    def backward(self, context: Context, *dys: Array) -> Array:
        return like(context, f"{self.kernel}_backward", dys[0], *context.saved, **self.numbers)


class SavesOutput(Elementwise):
    """An ``Elementwise`` whose gradient is computed from the result: ``kernel``_backward is (dy, y) -> dx."""

    def forward(self, context: Context, *inputs: Array) -> Array:
        y = like(context, self.kernel, inputs[0], **self.numbers)
        context.save(y)
        return y


class Cast(Operator):
    """Args: the float dtype of the result."""

    autocast = "keep"
    takes_any_float = True

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def forward(self, context: Context, *inputs: Array) -> Array:
        context.save(inputs[0].dtype)
        y = context.empty(inputs[0].shape, self.dtype)
        context.run("cast", inputs[0], out=y)
        return y

    def backward(self, context: Context, *dys: Array) -> Array:
        return context.cast(dys[0], *context.saved)


class Broadcasting(Operator):
    """A formula of two tensors of one dtype, whose shapes broadcast.

    Attributes:
        where: the function that errors name.
        needs_floats: whether it is for float tensors alone.
        takes_number: whether its kernels take a second input of float32 beside a first one of 16 bits.
        is_commutative: whether the first may be the second.
    """

    where: str
    needs_floats = False
    takes_number = False
    is_commutative = False
    autocast = "widest"

    def check(self, *inputs: Tensor) -> None:
        check = check_floats if self.needs_floats else check_tensors
        check(self.where, *inputs)
        broadcast_shape(self.where, inputs[0].shape, inputs[1].shape)


class WithNumber(Operator):
    """A ``Broadcasting`` of 16 bits and a number that they do not hold: its kernels take the number as float32.

    Args: the operator, one that ``takes_number``, and the number.
    """

    autocast = "keep"

    def __init__(self, op: Broadcasting, number: Number) -> None:
        self.op, self.number = op, convert_number(op.where, number, np.dtype(float32))

    def forward(self, context: Context, *inputs: Array) -> Array:
        inner = Context(context.device, (*context.needs_grad, False))
        y = self.op.forward(inner, *inputs, context.backend.asarray(self.number))
        context.save(*inner.saved)
        return y

    def backward(self, context: Context, *dys: Array) -> Array:
        inner = Context(context.device, (*context.needs_grad, False))
        inner.saved = context.saved
        results: Any = self.op.backward(inner, *dys)
        return results[0]


def combine(op: Broadcasting, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return ``op`` of two Tensors, or of one and a number.

    A number that the 16 bits of the other do not hold is not rounded to them: what is computed from both is rounded.
    """
    first, second = operands(op.where, a, b)
    tensor, number = (first, b) if isinstance(a, Tensor) else (second, a)
    if isinstance(number, Tensor) or not is_narrow(tensor.dtype) or _holds(tensor.dtype, number):
        return op(first, second)  # type: ignore[no-any-return]
    if this_thread.autocast is not None:
        this_thread.autocast.cast(op, (tensor,))  # an error names the operator, not a part of it
    if op.takes_number and (tensor is a or op.is_commutative):
        return WithNumber(op, number)(tensor)  # type: ignore[no-any-return]
    wide = Cast(float32)(tensor)
    pair = operands(op.where, wide, b) if tensor is a else operands(op.where, a, wide)
    return Cast(tensor.dtype)(op(*pair))  # type: ignore[no-any-return]


def _holds(dtype: Any, number: Number) -> bool:
    """Return whether a number is the same in ``dtype`` and in float32."""
    values = [float(convert_number("", number, kind)) for kind in (dtype, accumulation_dtype(dtype))]
    return values[0] == values[1] or values[0] != values[0]  # NaN
