# SPDX-License-Identifier: Apache-2.0
"""2-D convolution layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import autograd, initializer
from ..autograd.ops.window import pair
from ..errors import OptionError, ShapeError, check_bool, check_choice, check_int
from ..tensor import Tensor
from .base import Layer, check_once
from .padding import PAD_MODES, same_pad

__all__ = ["Conv2d", "SeparableConv2d"]

ACTIVATIONS = ("NOTSET", "RELU")
Size = int | Sequence[int]


class Conv2d(Layer):
    """Convolution with bias and, optionally, relu.

    ``Conv2d(outputs, kernel_size, ...)`` takes the channels from its first call;
    ``Conv2d(in_channels, outputs, kernel_size, stride, padding, ...)`` checks them. W (outputs, in / group,
    kh, kw) starts as N(0, 2 / (in / group * kh * kw + outputs)), b (outputs,) as zeros.

    Args:
        nb_kernels: outputs, >= 1; with three numbers or more in_channels.
        kernel_size: int or (height, width); with three numbers or more outputs.
        args: kernel_size, stride, padding, dilation, group, bias of the longer style.
        stride: int or pair, >= 1.
        padding: zeros on both sides, int or pair, >= 0.
        dilation: int or pair, >= 1.
        group: independent groups of channels.
        bias: whether there is b.
        pad_mode: "NOTSET", or "SAME_UPPER" / "SAME_LOWER" for ceil(size / stride) outputs;
            where an odd zero is left over it comes last, or first.
        activation: "NOTSET" or "RELU".

    Raises:
        OptionError: an option is unknown or out of range.
        ShapeError: at a call, if x is not (N, in_channels, H, W) or too small. DTypeError: if it is not of floats.
    """

    W: Tensor
    b: Tensor

    def __init__(
        self,
        nb_kernels: int,
        kernel_size: Size,
        *args: Any,  # Any: the rest of SINGA's older call style, ints and pairs
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        group: int = 1,
        bias: bool = True,
        pad_mode: str = "NOTSET",
        activation: str | None = "NOTSET",
    ) -> None:
        super().__init__()
        self.in_channels: int | None = None
        if args:
            self.in_channels, nb_kernels = nb_kernels, kernel_size  # type: ignore[assignment]
            names = ("kernel_size", "stride", "padding", "dilation", "group", "bias")
            if len(args) > len(names):
                raise OptionError(f"Conv2d: {len(args)} arguments after (in, out), at most {names}")
            rest: tuple[Any, ...] = (kernel_size, stride, padding, dilation, group, bias)
            defaults = (None, 1, 0, 1, 1, True)
            for name, *values in list(zip(names, args, rest, defaults, strict=False))[1:]:
                check_once("Conv2d", name, *values)
            kernel_size, stride, padding, dilation, group, bias = args + rest[len(args) :]
        if self.in_channels is not None:
            check_int("Conv2d", "in_channels", self.in_channels, 1)
        self.nb_kernels = check_int("Conv2d", "nb_kernels", nb_kernels, 1)
        self.group = check_int("Conv2d", "group", group, 1)
        check_choice("Conv2d", "pad_mode", pad_mode, PAD_MODES)
        check_choice("Conv2d", "activation", activation, (*ACTIVATIONS, None))
        if nb_kernels % self.group:
            raise OptionError(f"Conv2d: nb_kernels = {nb_kernels} must be divisible by group = {group}")
        self.kernel_size = pair("Conv2d", "kernel_size", kernel_size, 1)
        self.stride = pair("Conv2d", "stride", stride, 1)
        self.padding = pair("Conv2d", "padding", padding, 0)
        self.dilation = pair("Conv2d", "dilation", dilation, 1)
        self.bias = check_bool("Conv2d", "bias", bias)
        self.pad_mode = pad_mode
        self.activation = activation or "NOTSET"
        if pad_mode != "NOTSET" and self.padding != (0, 0):
            raise OptionError(f"Conv2d: give padding = {padding} or pad_mode = {pad_mode!r}, not both")

    def initialize(self, x: Tensor) -> None:
        _check_images(self, x)
        self.in_channels = x.shape[1]
        if self.in_channels % self.group:
            raise ShapeError(
                f"{self!r}: {self.in_channels} channels must be divisible by group = {self.group}"
            )
        self.W = self.new_parameter(
            "W", (self.nb_kernels, self.in_channels // self.group, *self.kernel_size), x
        )
        fan_in = self.in_channels // self.group * self.kernel_size[0] * self.kernel_size[1]
        initializer.gaussian(self.W, fan_in, self.nb_kernels)
        if self.bias:
            self.b = self.new_parameter("b", (self.nb_kernels,), x)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (N, C, H, W) to (N, outputs, oh, ow)."""
        _check_images(self, x)
        padding = self.padding
        if self.pad_mode != "NOTSET":
            x, padding = same_pad(x, self.pad_mode, self.kernel_size, self.stride, self.dilation)
        y = autograd.conv2d(
            x,
            self.W,
            self.b if self.bias else None,
            stride=self.stride,
            padding=padding,
            dilation=self.dilation,
            group=self.group,
        )
        return autograd.relu(y) if self.activation == "RELU" else y


class SeparableConv2d(Layer):
    """Convolve each channel by itself (``depthwise_conv``), then all of them with a 1 x 1 window (``point_conv``).

    ``SeparableConv2d(outputs, kernel_size, ...)`` takes the channels from its first call;
    ``SeparableConv2d(in_channels, outputs, kernel_size, stride, padding)`` checks them.

    Args:
        nb_kernels: outputs, >= 1; with three numbers or more in_channels.
        kernel_size: int or (height, width); with three numbers or more outputs.
        args: kernel_size, stride, padding of the longer style.
        stride: int or pair, >= 1.
        padding: zeros on both sides, int or pair, >= 0.
        bias: whether both convolutions have one.

    Raises:
        OptionError: an option is out of range.
        ShapeError: at a call, if x is not (N, in_channels, H, W) or too small.

    Source: Chollet, "Xception: Deep Learning with Depthwise Separable Convolutions", 2017.
    """

    depthwise_conv: Conv2d
    point_conv: Conv2d

    def __init__(
        self,
        nb_kernels: int,
        kernel_size: Size,
        *args: Any,  # Any: the rest of SINGA's older call style, ints and pairs
        stride: Size = 1,
        padding: Size = 0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.in_channels: int | None = None
        if args:
            self.in_channels, nb_kernels = nb_kernels, kernel_size  # type: ignore[assignment]
            if len(args) > 3:
                raise OptionError(
                    f"SeparableConv2d: {len(args)} arguments after (in, out), at most kernel_size, stride, padding"
                )
            for name, *values in zip(
                ("stride", "padding"), args[1:], (stride, padding), (1, 0), strict=False
            ):
                check_once("SeparableConv2d", name, *values)
            kernel_size, stride, padding = args + (kernel_size, stride, padding)[len(args) :]
            check_int("SeparableConv2d", "in_channels", self.in_channels, 1)
        self.nb_kernels = check_int("SeparableConv2d", "nb_kernels", nb_kernels, 1)
        self.kernel_size = pair("SeparableConv2d", "kernel_size", kernel_size, 1)
        self.stride = pair("SeparableConv2d", "stride", stride, 1)
        self.padding = pair("SeparableConv2d", "padding", padding, 0)
        self.bias = check_bool("SeparableConv2d", "bias", bias)

    def initialize(self, x: Tensor) -> None:
        _check_images(self, x)
        channels = x.shape[1]
        self.depthwise_conv = Conv2d(
            channels,
            channels,
            self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            group=channels,
            bias=self.bias,
        )
        self.point_conv = Conv2d(channels, self.nb_kernels, 1, bias=self.bias)
        self.in_channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """x (N, C, H, W) -> (N, outputs, oh, ow)."""
        _check_images(self, x)
        return self.point_conv(self.depthwise_conv(x))


def _check_images(layer: Conv2d | SeparableConv2d, x: Tensor) -> None:
    """Raise unless ``x`` is a float (N, C, H, W) with the channels of the layer, if it has some already."""
    layer.check_float(x)
    if x.ndim() != 4:
        raise ShapeError(f"{layer!r}: x must be (N, C, H, W), but its shape is {x.shape}")
    if layer.in_channels is not None:
        layer.check_size("channels", x.shape[1], layer.in_channels)
