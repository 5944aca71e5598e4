# SPDX-License-Identifier: Apache-2.0
"""Batch and layer normalisation."""

from __future__ import annotations

from collections.abc import Sequence

from .. import autograd
from ..autograd.ops.norm import check_rates
from ..dtypes import accumulation_dtype
from ..errors import OptionError, ShapeError, check_int
from ..tensor import Tensor
from .base import Layer, check_once

__all__ = ["BatchNorm2d", "LayerNorm"]


class BatchNorm2d(Layer):
    """Normalise each channel by the batch in training, by running statistics otherwise.

    ``BatchNorm2d()`` takes the channels from its first call; ``BatchNorm2d(channels)`` checks them. scale and
    running_var start as ones, bias and running_mean as zeros; all four have the dtype of the first input, but float32
    where that is float16 or bfloat16, as PyTorch keeps them. The running statistics are of this rank's
    batches; ``DistOpt.synchronize`` averages them over the ranks.

    Args:
        args: channels; then, as in SINGA, momentum.
        momentum: share of the batch in the running statistics, 0 .. 1.
        eps: added to the variance, > 0.

    Raises:
        OptionError: an option is out of range.
        ShapeError: at a call, if x is not (N, channels, H, W) or (N, channels).
    """

    buffers = ("running_mean", "running_var")
    scale: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, *args: float, momentum: float = 0.9, eps: float = 1e-5) -> None:
        super().__init__()
        if len(args) > 2:
            raise OptionError(f"BatchNorm2d: expected (channels) or (channels, momentum), got {args}")
        self.channels = check_int("BatchNorm2d", "channels", args[0], 1) if args else None
        if len(args) == 2:
            check_once("BatchNorm2d", "momentum", args[1], momentum, 0.9)
        self.momentum, self.eps = check_rates("BatchNorm2d", args[1] if len(args) == 2 else momentum, eps)

    def initialize(self, x: Tensor) -> None:
        self._check(x)
        self.channels = x.shape[1]
        like = Tensor((self.channels,), x.device, accumulation_dtype(x.dtype))
        self.scale = self.new_parameter("scale", like.shape, like).set_value(1.0)
        self.bias = self.new_parameter("bias", like.shape, like)
        self.running_mean = Tensor(
            like.shape, like.device, like.dtype, requires_grad=False, name="running_mean"
        )
        self.running_var = Tensor(
            like.shape, like.device, like.dtype, requires_grad=False, name="running_var"
        ).set_value(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (N, C, H, W) or (N, C); same shape."""
        self._check(x)
        return autograd.batchnorm_2d(
            x,
            self.scale,
            self.bias,
            self.running_mean,
            self.running_var,
            momentum=self.momentum,
            eps=self.eps,
        )

    def _check(self, x: Tensor) -> None:
        self.check_float(x)
        if x.ndim() not in (2, 4):
            raise ShapeError(f"{self!r}: x must be (N, C, H, W) or (N, C), but its shape is {x.shape}")
        if self.channels is not None:
            self.check_size("channels", x.shape[1], self.channels)


class LayerNorm(Layer):
    """Normalise each sample over its last axes, then scale and shift them; see ``autograd.layer_norm``.

    ``LayerNorm()`` takes the last axis of its first call; ``LayerNorm(features)`` checks it, and ``LayerNorm((4, 5))``
    normalises over two axes. scale starts as ones, bias as zeros. SINGA has no such layer.

    Args:
        shape: size of the last axis, or sizes of the last axes; None takes the last axis of the first input.
        eps: added to the variance, > 0; use 1e-3 for float16.

    Raises:
        OptionError: an option is out of range.
        ShapeError: at a call, if the last axes of x are others.
    """

    scale: Tensor
    bias: Tensor

    def __init__(self, shape: int | Sequence[int] | None = None, *, eps: float = 1e-5) -> None:
        super().__init__()
        sizes = shape if isinstance(shape, (list, tuple)) else () if shape is None else (shape,)
        self.shape = tuple(check_int("LayerNorm", "shape", size, 1) for size in sizes)
        self.eps = check_rates("LayerNorm", 0, eps)[1]

    def initialize(self, x: Tensor) -> None:
        self._check(x)
        self.shape = self.shape or x.shape[-1:]
        self.scale = self.new_parameter("scale", self.shape, x).set_value(1.0)
        self.bias = self.new_parameter("bias", self.shape, x)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., features) -> same shape."""
        self._check(x)
        return autograd.layer_norm(x, self.scale, self.bias, self.eps)

    def _check(self, x: Tensor) -> None:
        self.check_float(x)
        if x.ndim() < max(1, len(self.shape)):
            raise ShapeError(f"{self!r}: x has too few axes: its shape is {x.shape}")
        for came, expected in zip(x.shape[::-1], self.shape[::-1], strict=False):
            self.check_size("features", came, expected)
