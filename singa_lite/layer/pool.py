# SPDX-License-Identifier: Apache-2.0
"""2-D pooling layers."""

from __future__ import annotations

from collections.abc import Sequence

from .. import autograd
from ..autograd.ops.window import pair
from ..errors import OptionError, check_choice
from ..tensor import Tensor
from .base import Layer
from .padding import PAD_MODES, same_padding

Size = int | Sequence[int]


class Pooling2d(Layer):
    """Maximum or mean of each window.

    Args:
        kernel_size: int or (height, width), >= 1.
        stride: int or pair; None is ``kernel_size``.
        padding: on both sides, int or pair, smaller than ``kernel_size``.
        is_max: maximum if True, else mean (padding counts as zeros).
        pad_mode: "NOTSET", or "SAME_UPPER" / "SAME_LOWER" for ceil(size / stride) outputs.

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
        self.is_max = is_max
        self.pad_mode = pad_mode
        if pad_mode != "NOTSET" and self.padding != (0, 0):
            raise OptionError(f"{where}: give padding = {padding} or pad_mode = {pad_mode!r}, not both")

    def forward(self, x: Tensor) -> Tensor:
        """x (N, C, H, W) -> (N, C, oh, ow)."""
        self.check_float(x)
        padding = self.padding
        if self.pad_mode != "NOTSET" and x.ndim() == 4:
            padding = same_padding(repr(self), x.shape[2:], self.kernel_size, self.stride)
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
