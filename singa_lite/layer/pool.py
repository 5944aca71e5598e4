# SPDX-License-Identifier: Apache-2.0
"""Pooling layers, in 2-D and along one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .. import autograd
from ..autograd.ops.window import check_pool_padding, pair
from ..errors import OptionError, check_bool, check_choice
from ..tensor import Tensor
from .base import Layer
from .padding import PAD_MODES, same_pad

__all__ = ["AvgPool1d", "AvgPool2d", "MaxPool1d", "MaxPool2d", "Pooling2d"]

Size = int | Sequence[int]


class Pooling2d(Layer):
    """Maximum or mean of each window.

    Args:
        kernel_size: int or (height, width), >= 1.
        stride: int or pair; None is ``kernel_size``.
        padding: on both sides, int or pair, smaller than ``kernel_size``.
        is_max: maximum if True, else mean (padding counts as zeros).
        pad_mode: "NOTSET", or "SAME_UPPER" / "SAME_LOWER" for ceil(size / stride) outputs;
            where an odd piece of padding is left over it comes last, or first.

    Raises:
        OptionError: an option is unknown or out of range.
        ShapeError: at a call, if x is not (N, C, H, W) or too small.
    """

    def __init__(
        self,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        is_max: bool = True,
        pad_mode: str = "NOTSET",
    ) -> None:
        super().__init__()
        where = type(self).__name__
        check_choice(where, "pad_mode", pad_mode, PAD_MODES)
        self.kernel_size = pair(where, "kernel_size", kernel_size, 1)
        self.stride = self.kernel_size if stride is None else pair(where, "stride", stride, 1)
        self.padding = pair(where, "padding", padding, 0)
        check_pool_padding(where, self.kernel_size, self.padding)
        self.is_max = check_bool(where, "is_max", is_max)
        self.pad_mode = pad_mode
        if pad_mode != "NOTSET" and self.padding != (0, 0):
            raise OptionError(f"{where}: give padding = {padding} or pad_mode = {pad_mode!r}, not both")

    def forward(self, x: Tensor) -> Tensor:
        """Map x (N, C, H, W) to (N, C, oh, ow)."""
        self.check_float(x)
        padding = self.padding
        if self.pad_mode != "NOTSET" and x.ndim() == 4:
            value = -math.inf if self.is_max else 0.0  # so that padding never wins
            x, padding = same_pad(x, self.pad_mode, self.kernel_size, self.stride, value=value)
        pool = autograd.max_pool_2d if self.is_max else autograd.avg_pool_2d
        return pool(x, self.kernel_size, self.stride, padding)


class MaxPool2d(Pooling2d):
    """The largest element of each window; arguments as ``Pooling2d``."""

    def __init__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, pad_mode: str = "NOTSET"
    ) -> None:
        super().__init__(kernel_size, stride, padding, True, pad_mode)


class AvgPool2d(Pooling2d):
    """The mean of each window; arguments as ``Pooling2d``."""

    def __init__(
        self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, pad_mode: str = "NOTSET"
    ) -> None:
        super().__init__(kernel_size, stride, padding, False, pad_mode)


class _Pooling1d(Pooling2d):
    """Maximum or mean of each window along the last axis; ints where ``Pooling2d`` takes pairs."""

    def __init__(
        self, kernel_size: int, stride: int | None, padding: int, is_max: bool, pad_mode: str
    ) -> None:
        step = kernel_size if stride is None else stride
        super().__init__((1, kernel_size), (1, step), (0, padding), is_max, pad_mode)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (N, C, L) to (N, C, ol); SINGA's (N, C, 1, L) to (N, C, 1, ol)."""
        if not isinstance(x, Tensor) or x.ndim() != 3:
            return super().forward(x)
        y = super().forward(autograd.reshape(x, (*x.shape[:2], 1, x.shape[2])))
        return autograd.reshape(y, (*y.shape[:2], y.shape[3]))


class MaxPool1d(_Pooling1d):
    """The largest element of each window along the last axis; ints where ``Pooling2d`` takes pairs."""

    def __init__(
        self, kernel_size: int, stride: int | None = None, padding: int = 0, pad_mode: str = "NOTSET"
    ) -> None:
        super().__init__(kernel_size, stride, padding, True, pad_mode)


class AvgPool1d(_Pooling1d):
    """The mean of each window along the last axis; arguments as ``MaxPool1d``."""

    def __init__(
        self, kernel_size: int, stride: int | None = None, padding: int = 0, pad_mode: str = "NOTSET"
    ) -> None:
        super().__init__(kernel_size, stride, padding, False, pad_mode)
