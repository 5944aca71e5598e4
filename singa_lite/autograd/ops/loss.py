# SPDX-License-Identifier: Apache-2.0
"""Losses: a mean over the batch, shape (1,), ready for ``backward``."""

from __future__ import annotations

from ...dtypes import accumulation_dtype
from ...errors import DTypeError, ShapeError, check_number
from ...tensor import Tensor
from ...tensor.checks import convert_number
from ..engine import Array, Context, Operator
from ._common import check_floats, check_ndim, check_some, like, scaled

__all__ = ["binary_cross_entropy", "cross_entropy", "mse_loss", "ranking_loss", "softmax_cross_entropy"]


def check_labels(where: str, x: Tensor, t: object) -> None:
    """Raise unless ``t`` is class ids (N,) of an integer dtype or a label matrix of x's shape (N, C)."""
    check_floats(where, x)
    check_ndim(where, "x", x, 2, "(N, C)")
    if not isinstance(t, Tensor):
        raise DTypeError(f"{where}: expected a Tensor of labels, got {type(t).__name__}")
    if t.shape not in (x.shape, x.shape[:1]):
        raise ShapeError(
            f"{where}: labels must be class ids {x.shape[:1]} or a matrix {x.shape}, but t has {t.shape}"
        )
    check_some(where, "mean loss", x)
    if t.ndim() == 1 and t.dtype.kind != "i":
        raise DTypeError(
            f"{where}: class ids must be int32 or int64, got {t.dtype}; convert with as_type(int32)"
        )


def _labels(x: Tensor, t: Tensor) -> Tensor:
    """Return class ids of shape (N, 1) as (N,), unless they are a label matrix of ``x``; all else as it is."""
    is_column = isinstance(t, Tensor) and isinstance(x, Tensor) and t.shape == (*x.shape[:1], 1) != x.shape
    return t.reshape((t.size(),)) if is_column and t.dtype.kind == "i" else t


class SoftMaxCrossEntropy(Operator):
    autocast = "float32"

    def check(self, *inputs: Tensor) -> None:
        check_labels("softmax_cross_entropy", *inputs)

    def forward(self, context: Context, *inputs: Array) -> Array:
        x, t = inputs
        loss, probabilities = context.empty((1,), x.dtype), context.empty(x.shape, x.dtype)
        context.run("softmax_cross_entropy", x, t, out=(loss, probabilities))
        context.save(probabilities, t)
        return loss

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        probabilities, t = context.saved
        dx = context.empty(probabilities.shape, probabilities.dtype)
        context.run("softmax_cross_entropy_backward", dys[0], probabilities, t, out=dx)
        return dx, None


def softmax_cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    """Return the cross entropy of softmax(x) against labels, mean over the batch.

    loss = -1/N sum over n, c of t[n, c] log softmax(x)[n, c], computed from logits, so it cannot overflow.
    The gradient is multiplied by the incoming dy, so loss scaling works (SINGA ignores dy).

    Args:
        x: float logits (N, C).
        t: class ids (N,) or (N, 1), int32 or int64, in 0 .. C-1; or a label matrix (N, C) of any dtype, each row
            divided by its sum (one-hot, counts and probabilities all do; a row of zeros adds nothing).

    Returns:
        Shape (1,), the dtype of ``x``. Labels get no gradient.

    Raises:
        ShapeError: shapes do not fit, the batch is empty, or an id is out of range.
        DTypeError: class ids of a float dtype.
    """
    return SoftMaxCrossEntropy()(x, _labels(x, t))  # type: ignore[no-any-return]


class CrossEntropy(Operator):
    autocast = "float32"

    def check(self, *inputs: Tensor) -> None:
        check_labels("cross_entropy", *inputs)

    def forward(self, context: Context, *inputs: Array) -> Array:
        loss = context.empty((1,), inputs[0].dtype)
        context.run("cross_entropy", *inputs, out=loss)
        context.save(*inputs)
        return loss

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        dx = context.empty(context.saved[0].shape, context.saved[0].dtype)
        context.run("cross_entropy_backward", dys[0], *context.saved, out=dx)
        return dx, None


def cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    """Return the cross entropy of probabilities against labels, mean over the batch.

    loss = -1/N sum over n, c of t[n, c] log x[n, c]; x below the smallest normal number counts as that number.

    Args:
        x: probabilities (N, C), float, > 0.
        t: labels as in ``softmax_cross_entropy``.

    Returns:
        Shape (1,), the dtype of ``x``. Labels get no gradient.

    Raises:
        ShapeError, DTypeError: as ``softmax_cross_entropy``.
    """
    return CrossEntropy()(x, _labels(x, t))  # type: ignore[no-any-return]


class MeanSquareError(Operator):
    autocast = "float32"

    def check(self, *inputs: Tensor) -> None:
        check_floats("mse_loss", *inputs)
        if inputs[0].shape != inputs[1].shape:
            raise ShapeError(
                f"mse_loss: x and t must have one shape, got {inputs[0].shape} and {inputs[1].shape}"
            )
        check_some("mse_loss", "mean loss", inputs[0])

    def forward(self, context: Context, *inputs: Array) -> Array:
        loss = context.empty((1,), inputs[0].dtype)
        context.run("mse_loss", *inputs, out=loss)
        context.save(*inputs)
        return loss

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        dx = context.empty(context.saved[0].shape, context.saved[0].dtype)
        context.run("mse_loss_backward", dys[0], *context.saved, out=dx)
        dt = like(context, "negative", dx) if context.needs_grad[1] else None
        return dx, dt


def mse_loss(x: Tensor, t: Tensor) -> Tensor:
    """Return the squared error, mean over all elements.

    Args:
        x: float tensor of any shape.
        t: same shape and dtype.

    Returns:
        Shape (1,), the dtype of ``x``.

    Raises:
        ShapeError: the shapes differ, or hold no element.
    """
    return MeanSquareError()(x, t)  # type: ignore[no-any-return]


class BinaryCrossEntropy(Operator):
    autocast = "float32"

    def check(self, *inputs: Tensor) -> None:
        x, t = inputs
        check_floats("binary_cross_entropy", x)
        if not isinstance(t, Tensor):
            raise DTypeError(f"binary_cross_entropy: expected a Tensor of labels, got {type(t).__name__}")
        if x.shape != t.shape or x.ndim() == 0:
            raise ShapeError(
                f"binary_cross_entropy: x and t must have one shape (N, ...), got {x.shape} and {t.shape}"
            )
        check_some("binary_cross_entropy", "mean loss", x)

    def forward(self, context: Context, *inputs: Array) -> Array:
        x, t = inputs
        t = context.cast(t, x.dtype)
        context.save(x, t)
        costs, total = like(context, "binary_cross_entropy", x, t), context.empty((1,), x.dtype)
        rows = costs.reshape(x.shape[0], -1)
        means = context.empty((1, rows.shape[1]), x.dtype)
        context.run("mean", rows, out=means, axes=(0,), keepdims=True)
        context.run("sum", means, out=total.reshape(1, 1), axes=(1,), keepdims=True)
        return total

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        x, t = context.saved
        dx = like(context, "binary_cross_entropy_grad", x, t)
        return like(context, "mul", dx, scaled(context, dys[0], 1 / x.shape[0]).reshape(())), None


def binary_cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    """Return the cross entropy of probabilities against labels of 0 and 1, mean over the batch.

    loss = -1/N sum of t log x + (1 - t) log(1 - x), over all elements: those of a sample add up, as in SINGA, where
    PyTorch takes the mean over them too. Logarithms below -100 count as -100. The gradient is multiplied by the
    incoming dy.

    Args:
        x: probabilities (N, ...), float, in 0 .. 1.
        t: labels of the same shape, 0 .. 1, of any dtype.

    Returns:
        Shape (1,), the dtype of ``x``. Labels get no gradient.

    Raises:
        ShapeError: the shapes differ, or hold no element.
    """
    return BinaryCrossEntropy()(x, t)  # type: ignore[no-any-return]


class RankingLoss(Operator):
    autocast = "float32"

    def __init__(self, margin: float) -> None:
        self.margin = check_number("ranking_loss", "M", margin)

    def check(self, *inputs: Tensor) -> None:
        pos, neg = inputs
        check_floats("ranking_loss", pos, neg)
        if pos.shape != neg.shape:
            raise ShapeError(
                f"ranking_loss: pos and neg must have one shape, got {pos.shape} and {neg.shape}"
            )
        check_some("ranking_loss", "mean loss", pos)

    def forward(self, context: Context, *inputs: Array) -> Array:
        pos, neg = (context.cast(x, accumulation_dtype(x.dtype)) for x in inputs)
        margin = context.backend.asarray(convert_number("ranking_loss: M", self.margin, pos.dtype))
        missing = like(context, "relu", like(context, "add", like(context, "sub", neg, pos), margin))
        context.save(missing, inputs[0].dtype)
        loss = context.empty((1,), pos.dtype)
        context.run("mean", missing.reshape(1, -1), out=loss, axes=(1,), keepdims=False)
        return context.cast(loss, inputs[0].dtype)

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        missing, dtype = context.saved
        share = scaled(context, context.cast(dys[0], missing.dtype), 1 / missing.size)
        shares = context.empty(missing.shape, missing.dtype)
        context.run("broadcast_to", share.reshape([1] * missing.ndim), out=shares)
        dneg = context.cast(like(context, "relu_backward", shares, missing), dtype)
        return like(context, "negative", dneg), dneg


def ranking_loss(pos: Tensor, neg: Tensor, M: float = 0.2) -> Tensor:
    """Return by how much scores of wrong answers come within a margin of right ones, mean over all elements.

    loss = mean of max(M - pos + neg, 0), whose gradient at 0 is 0.

    Args:
        pos: float scores of right answers, of any shape.
        neg: scores of wrong answers, same shape and dtype.
        M: the margin.

    Returns:
        Shape (1,), the dtype of ``pos``.

    Raises:
        ShapeError: the shapes differ, or hold no element. OptionError: ``M`` is not a number.
    """
    return RankingLoss(M)(pos, neg)  # type: ignore[no-any-return]
