# SPDX-License-Identifier: Apache-2.0
"""2-D convolution (cross-correlation, as everywhere in deep learning)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...config import this_thread
from ...errors import ShapeError, check_int
from ...tensor import Tensor
from ..engine import Array, Context, Operator
from ._common import check_floats_beside, check_ndim
from .window import LARGEST_OF_CONV, output_size, pair

__all__ = ["conv2d"]


class Conv2d(Operator):
    autocast = "low"

    def __init__(
        self,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        *,
        dilation: int | Sequence[int] = 1,
        group: int = 1,
    ) -> None:
        self.stride = pair("conv2d", "stride", stride, 1, LARGEST_OF_CONV)
        self.padding = pair("conv2d", "padding", padding, 0, LARGEST_OF_CONV)
        self.dilation = pair("conv2d", "dilation", dilation, 1, LARGEST_OF_CONV)
        self.groups = check_int("conv2d", "group", group, 1)
        # kernels round W themselves; in a recorded step one copy serves all of its uses
        self.autocast_inputs = 1 if this_thread.recorder is None else 2

    @property
    def geometry(self) -> dict[str, Any]:  # Any: kernel attributes, pairs and an int
        return {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
        }

    def check(self, *inputs: Tensor) -> None:
        x, w = inputs[:2]
        check_floats_beside("conv2d", 1, *inputs)
        check_ndim("conv2d", "x", x, 4, "(N, C, H, W)")
        check_ndim("conv2d", "W", w, 4, "(outputs, C / group, kh, kw)")
        if w.size() == 0:
            raise ShapeError(f"conv2d: W {w.shape} has no elements")
        channels, outputs = x.shape[1], w.shape[0]
        if channels % self.groups or outputs % self.groups:
            raise ShapeError(
                f"conv2d: {channels} channels and {outputs} outputs must both be divisible by group = {self.groups}"
            )
        if channels != w.shape[1] * self.groups:
            raise ShapeError(
                f"conv2d: x has {channels} channels but W expects {w.shape[1] * self.groups} "
                f"(W.shape = {w.shape}, group = {self.groups}); check in_channels of this layer"
            )
        if len(inputs) == 3 and inputs[2].shape != (outputs,):
            raise ShapeError(f"conv2d: b must have shape ({outputs},), not {inputs[2].shape}")
        self.out_size(x.shape, w.shape)

    def out_size(self, x: tuple[int, ...], w: tuple[int, ...]) -> tuple[int, int]:
        return output_size("conv2d", x[2:], (w[2], w[3]), self.stride, self.padding, self.dilation)

    def forward(self, context: Context, *inputs: Array) -> Array:
        x, w = inputs[:2]
        context.save(x, w, inputs[-1].dtype)
        y = context.empty((x.shape[0], w.shape[0], *self.out_size(x.shape, w.shape)), x.dtype)
        context.run("conv2d", *inputs, out=y, **self.geometry)
        return y

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        (dy,), (x, w, b_dtype), needs_grad = dys, context.saved, context.needs_grad
        dx = dw = db = None
        has_bias = len(needs_grad) == 3 and needs_grad[2]
        if needs_grad[1] or has_bias:
            dw = context.empty(w.shape, context.gradient_dtype(1, w.dtype))
            db = context.empty(w.shape[:1], b_dtype) if has_bias else None
            out = (dw, db) if has_bias else dw
            context.run("conv2d_backward_weight", dy, x, out=out, **self.geometry)
        if needs_grad[0]:  # last, when a recorded step needs x no more
            dx = context.empty(x.shape, x.dtype)
            context.run("conv2d_backward_data", dy, w, out=dx, **self.geometry)
        return (dx, dw, db)[: len(needs_grad)]


def conv2d(
    x: Tensor,
    W: Tensor,
    b: Tensor | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    group: int = 1,
) -> Tensor:
    """Slide ``W`` over ``x`` and take the products' sum at each position.

    y[n, o, i, j] = b[o] + sum over c, u, v of x[n, c, i s + u d - p, j s + v d - p] W[o, c, u, v]

    SINGA passes a handle where we take the options by keyword, and has no groups on the CPU.

    Args:
        x: float tensor (N, C, H, W).
        W: shape (outputs, C / group, kh, kw); float32 beside an ``x`` of 16 bits is rounded to these.
        b: shape (outputs,), float32 where x has 16 bits; None: there is none.
        stride: step of the window, one int or (height, width), >= 1.
        padding: zeros on both sides of each axis, >= 0.
        dilation: distance between the window's elements, >= 1.
        group: channels and outputs are split into so many independent groups.

    Returns:
        (N, outputs, oh, ow) with oh = floor((H + 2p - d(kh - 1) - 1) / s) + 1; the dtype of ``x``.

    Raises:
        ShapeError: channels, group, bias or window do not fit.
        OptionError: an option is out of range.
    """
    inputs = (x, W) if b is None else (x, W, b)
    op = Conv2d(stride, padding, dilation=dilation, group=group)
    return op(*inputs)  # type: ignore[no-any-return]
