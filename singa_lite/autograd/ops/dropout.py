# SPDX-License-Identifier: Apache-2.0
"""Dropout."""

from __future__ import annotations

from ...config import this_thread
from ...errors import OptionError, check_number
from ...tensor import Tensor
from ..engine import Array, Context, Operator
from ._common import check_floats

__all__ = ["dropout"]


def check_ratio(where: str, ratio: object) -> float:
    """Return ``ratio`` as a float; OptionError unless 0 <= ratio < 1."""
    if check_number(where, "ratio", ratio, 0, 1) == 1:
        raise OptionError(f"{where}: ratio = {ratio} must be in 0 <= ratio < 1")
    return check_number(where, "ratio", ratio)


def drop(context: Context, x: Array, ratio: float) -> tuple[Array, Array]:
    """Return ``x`` without a random share of it, and the mask of what stays."""
    y, mask = context.empty(x.shape, x.dtype), context.empty(x.shape, "bool")
    seed, counter = context.device.next_random()
    context.run("dropout", x, out=(y, mask), ratio=ratio, seed=seed, counter=counter)
    return y, mask


class Dropout(Operator):
    autocast = "keep"

    def __init__(self, ratio: float = 0.5) -> None:
        self.ratio = check_ratio("dropout", ratio)

    def check(self, *inputs: Tensor) -> None:
        check_floats("dropout", *inputs)

    def forward(self, context: Context, *inputs: Array) -> Array:
        y, mask = drop(context, inputs[0], self.ratio)
        context.save(mask)
        return y

    def backward(self, context: Context, *dys: Array) -> Array:
        dx = context.empty(dys[0].shape, dys[0].dtype)
        context.run("dropout_backward", dys[0], *context.saved, out=dx, ratio=self.ratio)
        return dx


def dropout(x: Tensor, ratio: float = 0.5) -> Tensor:
    """Zero a random share of the elements and scale the others by 1 / (1 - ratio), so the expectation stays.

    Every call draws a new mask from the device's random stream. When ``autograd.training`` is False the
    result is ``x`` itself. SINGA's signature has an unused ``seed`` before ``ratio``.

    Args:
        x: float tensor of any shape.
        ratio: share that is zeroed, 0 <= ratio < 1.

    Returns:
        Same shape and dtype as ``x``.

    Raises:
        OptionError: ratio out of range.

    Source: Srivastava et al., "Dropout", 2014.
    """
    op = Dropout(ratio)
    op.check(x)
    if this_thread.training:
        return op(x)  # type: ignore[no-any-return]
    if this_thread.autocast is not None:
        this_thread.autocast.cast(op, (x,))  # refuses what it refuses while training
    return x
