# SPDX-License-Identifier: Apache-2.0
"""2-D pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import check_bool
from ...tensor import Tensor
from ..engine import Array, Context, Operator
from ._common import check_floats, check_ndim
from .window import check_pool_padding, output_size, pair

__all__ = ["avg_pool_2d", "max_pool_2d"]


class Pool2d(Operator):
    """Base of both poolings: the window and its shape rule."""

    autocast = "keep"
    where = "pool_2d"

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
    ) -> None:
        self.kernel_size = pair(self.where, "kernel_size", kernel_size, 1)
        self.stride = self.kernel_size if stride is None else pair(self.where, "stride", stride, 1)
        self.padding = pair(self.where, "padding", padding, 0)
        check_pool_padding(self.where, self.kernel_size, self.padding)

    @property
    def geometry(self) -> dict[str, Any]:  # Any: kernel attributes
        return {"kernel_size": self.kernel_size, "stride": self.stride, "padding": self.padding}

    def check(self, *inputs: Tensor) -> None:
        check_floats(self.where, *inputs)
        check_ndim(self.where, "x", inputs[0], 4, "(N, C, H, W)")
        self.out_shape(inputs[0].shape)

    def out_shape(self, x: tuple[int, ...]) -> tuple[int, ...]:
        size = output_size(self.where, x[2:], self.kernel_size, self.stride, self.padding)
        return (*x[:2], *size)


class MaxPool2d(Pool2d):
    where = "max_pool_2d"

    def forward(self, context: Context, *inputs: Array) -> Array:
        x = inputs[0]
        shape = self.out_shape(x.shape)
        fits_a_byte = self.kernel_size[0] * self.kernel_size[1] <= 256
        y, indices = context.empty(shape, x.dtype), context.empty(shape, "uint8" if fits_a_byte else "int32")
        context.run("max_pool_2d", x, out=(y, indices), **self.geometry)
        context.save(indices, x.shape)
        return y

    def backward(self, context: Context, *dys: Array) -> Array:
        indices, shape = context.saved
        dx = context.empty(shape, dys[0].dtype)
        context.run("max_pool_2d_backward", dys[0], indices, out=dx, **self.geometry)
        return dx


def max_pool_2d(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
) -> Tensor:
    """Return the largest element of each window; the gradient goes to the first of equals.

    Padding wins over nothing but -inf. Of a window with NaN that is the result, and any element has its gradient.

    Args:
        x: float tensor (N, C, H, W).
        kernel_size: one int or (height, width), >= 1.
        stride: step of the window; None is ``kernel_size``.
        padding: on both sides, smaller than ``kernel_size``.

    Returns:
        (N, C, oh, ow) with oh = floor((H + 2p - k) / s) + 1; the dtype of ``x``.

    Raises:
        ShapeError: x has not four axes or the window does not fit.
        OptionError: an option is out of range.
    """
    return MaxPool2d(kernel_size, stride, padding)(x)  # type: ignore[no-any-return]


class AvgPool2d(Pool2d):
    where = "avg_pool_2d"

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        *,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__(kernel_size, stride, padding)
        self.count_include_pad = check_bool(self.where, "count_include_pad", count_include_pad)

    @property
    def geometry(self) -> dict[str, Any]:  # Any: kernel attributes
        return {**super().geometry, "count_include_pad": self.count_include_pad}

    def forward(self, context: Context, *inputs: Array) -> Array:
        x = inputs[0]
        y = context.empty(self.out_shape(x.shape), x.dtype)
        context.run("avg_pool_2d", x, out=y, **self.geometry)
        context.save(x.shape)
        return y

    def backward(self, context: Context, *dys: Array) -> Array:
        dx = context.empty(context.saved[0], dys[0].dtype)
        context.run("avg_pool_2d_backward", dys[0], out=dx, **self.geometry)
        return dx


def avg_pool_2d(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    *,
    count_include_pad: bool = True,
) -> Tensor:
    """Return the mean of each window; arguments, result and errors as ``max_pool_2d``.

    Args:
        x: float tensor (N, C, H, W).
        kernel_size: one int or (height, width).
        stride: step of the window; None is ``kernel_size``.
        padding: zeros on both sides, smaller than ``kernel_size``.
        count_include_pad: whether a window divides by its full size, or by the elements inside the image.
    """
    op = AvgPool2d(kernel_size, stride, padding, count_include_pad=count_include_pad)
    return op(x)  # type: ignore[no-any-return]
