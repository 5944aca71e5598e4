# SPDX-License-Identifier: Apache-2.0
"""The fully connected layer."""

from __future__ import annotations

from .. import autograd, initializer
from ..errors import OptionError, ShapeError, check_int
from ..tensor import Tensor
from .base import Layer


class Linear(Layer):
    """y = x W + b.

    ``Linear(out_features)`` takes the input size from its first call; ``Linear(in_features, out_features)``
    checks it. W (in, out) starts as N(0, 2 / (in + out)), b (out,) as zeros.

    Args:
        out_features: columns of the result, >= 1; with a second number the rows of W.
        args: out_features if the first is in_features; then, as in SINGA, bias.
        bias: whether there is b.

    Raises:
        OptionError: a size is no int >= 1.
        ShapeError: at a call, if x is not (..., in_features).
    """

    W: Tensor
    b: Tensor

    def __init__(self, out_features: int, *args: int, bias: bool = True) -> None:
        super().__init__()
        if len(args) > 2:
            raise OptionError(
                f"Linear: expected (out), (in, out) or (in, out, bias), got {(out_features, *args)}"
            )
        sizes = [check_int("Linear", "size", size, 1) for size in (out_features, *args[:1])]
        self.in_features = sizes[0] if args else None
        self.out_features = sizes[-1]
        self.bias = bool(args[1]) if len(args) == 2 else bool(bias)

    def initialize(self, x: Tensor) -> None:
        self._check(x)
        self.in_features = x.shape[-1]
        self.W = self.new_parameter("W", (self.in_features, self.out_features), x)
        initializer.gaussian(self.W, self.in_features, self.out_features)
        if self.bias:
            self.b = self.new_parameter("b", (self.out_features,), x)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        self._check(x)
        y = autograd.matmul(x, self.W)
        return autograd.add_bias(y, self.b) if self.bias else y

    def _check(self, x: Tensor) -> None:
        self.check_float(x)
        if x.ndim() < 2:
            raise ShapeError(f"{self!r}: x must be (..., features), but its shape is {x.shape}; use Flatten")
        if self.in_features is not None:
            self.check_size("features", x.shape[-1], self.in_features)
