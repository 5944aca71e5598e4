# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of two tensors, which broadcast as in numpy, and sums over several tensors.

A Python number as operand takes the dtype and device of the other, where that can hold it: beside 16 bits that cannot
it stays whole, and the result is rounded. Every backward makes arrays of its own or passes dy on unchanged; the engine
never adds into one that two inputs share (SINGA's Add does).
"""

from __future__ import annotations

from collections.abc import Callable

from ...dtypes import accumulation_dtype
from ...errors import ShapeError
from ...tensor import Number, Tensor
from ..engine import Array, Context, Operator, Recomputed
from ._common import (
    Broadcasting,
    Elementwise,
    broadcasting,
    check_floats,
    check_tensors,
    combine,
    like,
    operands,
    scaled,
    sum_to,
)

__all__ = ["add", "div", "max", "mean", "min", "mul", "pow", "sub", "sum"]

# that are computed again one behind the other, each four calls of Python deeper; a stage of ResNet-110 has 18
MAX_SUMS = 32


class Add(Broadcasting):
    where = "add"
    takes_number = is_commutative = True

    def forward(self, context: Context, *inputs: Array) -> Array:
        context.save(*(x.shape for x in inputs))
        return broadcasting(context, "add", *inputs)

    def _recomputation(
        self, context: Context, inputs: list[Array | Recomputed]
    ) -> Callable[[], Array] | None:
        terms = {id(each): each for each in inputs if isinstance(each, Recomputed)}
        if len(terms) < 2 or context.saved[0] != context.saved[1]:
            return None
        if any(term.num_sums == MAX_SUMS for term in terms.values()):
            return None
        backend = context.backend
        # a sum becomes part of the later of two norms, which decides how it is rounded
        in_order = sorted(terms.values(), key=lambda term: term.number)

        def compute() -> Array:
            a, b = (term.once() for term in in_order)
            y = backend.empty(a.shape, a.dtype)
            backend.run("add", a, b, out=y)
            return y

        return compute

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        return tuple(
            sum_to(context, dys[0], shape) if needed else None
            for shape, needed in zip(context.saved, context.needs_grad, strict=True)
        )


def add(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return a + b.

    Args:
        a: tensor or number.
        b: tensor or number; the shapes must broadcast and the dtypes agree.

    Returns:
        The broadcast shape, the dtype of the inputs.

    Raises:
        ShapeError: the shapes do not broadcast.
        DTypeError: the dtypes differ.
    """
    return combine(Add(), a, b)


class Sub(Broadcasting):
    where = "sub"
    takes_number = True

    def forward(self, context: Context, *inputs: Array) -> Array:
        context.save(*(x.shape for x in inputs))
        return broadcasting(context, "sub", *inputs)

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        (dy,), (a_shape, b_shape), (needs_a, needs_b) = dys, context.saved, context.needs_grad
        da = sum_to(context, dy, a_shape) if needs_a else None
        db = like(context, "negative", sum_to(context, dy, b_shape)) if needs_b else None
        return da, db


def sub(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return a - b; arguments, result and errors as ``add``."""
    return combine(Sub(), a, b)


class Mul(Broadcasting):
    where = "mul"
    takes_number = is_commutative = True

    def forward(self, context: Context, *inputs: Array) -> Array:
        context.save(*inputs)
        return broadcasting(context, "mul", *inputs)

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        (dy,), (a, b), (needs_a, needs_b) = dys, context.saved, context.needs_grad
        da = sum_to(context, broadcasting(context, "mul", dy, b), a.shape) if needs_a else None
        db = sum_to(context, broadcasting(context, "mul", dy, a), b.shape) if needs_b else None
        return da, db


def mul(x: Tensor | Number, y: Tensor | Number) -> Tensor:
    """Return x * y, element by element; arguments, result and errors as ``add``."""
    return combine(Mul(), x, y)


class Div(Broadcasting):
    where = "div"
    needs_floats = takes_number = True

    def forward(self, context: Context, *inputs: Array) -> Array:
        y = broadcasting(context, "div", *inputs)
        context.save(inputs[0].shape, inputs[1], y)
        return y

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        a_shape, b, y = context.saved
        needs_a, needs_b = context.needs_grad
        quotient = broadcasting(context, "div", dys[0], b)
        da = sum_to(context, quotient, a_shape) if needs_a else None
        db = None
        if needs_b:  # d(a/b)/db = -(a/b)/b
            db = like(context, "negative", sum_to(context, like(context, "mul", quotient, y), b.shape))
        return da, db


def div(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return a / b, element by element; floats only, else as ``add``. x / 0 is inf or NaN."""
    return combine(Div(), a, b)


class Pow(Broadcasting):
    where = "pow"
    needs_floats = True

    def forward(self, context: Context, *inputs: Array) -> Array:
        y = broadcasting(context, "pow", *inputs)
        context.save(*inputs, y)
        return y

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        (dy,), (a, b, y), (needs_a, needs_b) = dys, context.saved, context.needs_grad
        da = db = None
        if needs_a:
            da = sum_to(context, broadcasting(context, "pow_backward_base", dy, a, b), a.shape)
        if needs_b:
            db = sum_to(context, broadcasting(context, "pow_backward_exponent", dy, a, y), b.shape)
        return da, db


class Square(Elementwise):
    kernel = "square"
    autocast = "widest"  # as of Pow

    def check(self, *inputs: Tensor) -> None:
        check_floats("pow", *inputs)


def pow(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return a ** b, element by element; floats only, else as ``add``.

    NaN where a < 0 and b is not an integer. The gradient of b is 0 where a is 0, and NaN where a < 0.
    """
    if isinstance(a, Tensor) and type(b) in (int, float) and b == 2:
        return Square()(a)  # type: ignore[no-any-return]
    return combine(Pow(), a, b)


class Sum(Operator):
    autocast = "widest"
    where = "sum"

    def check(self, *inputs: Tensor) -> None:
        check_tensors(self.where, *inputs)
        for tensor in inputs:
            if tensor.shape != inputs[0].shape:
                raise ShapeError(
                    f"{self.where}: tensors have the shapes {inputs[0].shape} and {tensor.shape}"
                )

    def forward(self, context: Context, *inputs: Array) -> Array:
        if len(inputs) == 2:
            return broadcasting(context, "add", *inputs)
        return context.cast(self.total(context, inputs), inputs[0].dtype)

    def total(self, context: Context, inputs: tuple[Array, ...]) -> Array:
        """Return the sum, of 16 bits in float32."""
        total = context.empty(inputs[0].shape, accumulation_dtype(inputs[0].dtype))
        context.run("copy" if total.dtype == inputs[0].dtype else "cast", inputs[0], out=total)
        for x in inputs[1:]:
            context.run("add", total, x, out=total)
        return total

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        return tuple(dys[0] if needed else None for needed in context.needs_grad)


def sum(*tensors: Tensor) -> Tensor:
    """Return the sum of several tensors, element by element (SINGA's meaning; ``reduce_sum`` sums over axes).

    Args:
        tensors: one or more, of one shape and dtype.

    Returns:
        The shape and dtype of each.

    Raises:
        ShapeError: the shapes differ.
    """
    return Sum()(*tensors)  # type: ignore[no-any-return]


class Mean(Sum):
    where = "mean"

    def check(self, *inputs: Tensor) -> None:
        super().check(*inputs)
        check_floats(self.where, *inputs)

    def forward(self, context: Context, *inputs: Array) -> Array:
        mean = scaled(context, self.total(context, inputs), 1 / len(inputs))
        return context.cast(mean, inputs[0].dtype)

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        return super().backward(context, scaled(context, dys[0], 1 / len(context.needs_grad)))


def mean(*tensors: Tensor) -> Tensor:
    """Return the mean of several float tensors, element by element (``reduce_mean`` goes over axes); as ``sum``."""
    return Mean()(*tensors)  # type: ignore[no-any-return]


class Maximum(Broadcasting):
    """Of two tensors; the first has the gradient where both are equal, or one is NaN."""

    kernel, where = "maximum", "max"

    def forward(self, context: Context, *inputs: Array) -> Array:
        context.save(*inputs)
        return broadcasting(context, self.kernel, *inputs)

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        (dy,), (a, b), (needs_a, needs_b) = dys, context.saved, context.needs_grad
        da = db = None
        if needs_a:
            da = sum_to(context, self.passed(context, "pass_where_not_less", dy, a, b), a.shape)
        if needs_b:
            db = sum_to(context, self.passed(context, "pass_where_less", dy, a, b), b.shape)
        return da, db

    def passed(self, context: Context, kernel: str, dy: Array, a: Array, b: Array) -> Array:
        """dy where b is the result, or where it is not."""
        return like(context, kernel, dy, a, b)


class Minimum(Maximum):
    kernel, where = "minimum", "min"

    def passed(self, context: Context, kernel: str, dy: Array, a: Array, b: Array) -> Array:
        return like(context, kernel, dy, b, a)


def max(*tensors: Tensor | Number) -> Tensor:
    """Return the largest of several tensors, element by element (SINGA's meaning; it is not a reduction over axes).

    Where several are the largest, the first of them has the gradient. NaN wins.

    Args:
        tensors: one or more tensors or numbers, of one dtype, whose shapes broadcast.

    Returns:
        The broadcast shape, the dtype of the inputs.

    Raises:
        ShapeError: the shapes do not broadcast, or there are no tensors.
        DTypeError: the dtypes differ, or none is a Tensor.
    """
    return _joined(Maximum(), tensors)


def min(*tensors: Tensor | Number) -> Tensor:
    """Return the smallest of several tensors, element by element; arguments, result, gradient and errors as ``max``."""
    return _joined(Minimum(), tensors)


def _joined(op: Maximum, tensors: tuple[Tensor | Number, ...]) -> Tensor:
    if len(tensors) < 2:
        check_tensors(op.where, *tensors)
    joined, *others = tensors
    for other in others:
        joined = op(*operands(op.where, joined, other))
    return joined  # type: ignore[return-value]
