# SPDX-License-Identifier: Apache-2.0
"""Layers that reshape and join."""

from __future__ import annotations

from collections.abc import Sequence

from .. import autograd
from ..tensor import Tensor
from .base import Layer

__all__ = ["Add", "Cat", "Flatten", "Reshape"]


class Flatten(Layer):
    """Join the axes before ``axis`` and those from it on.

    Args:
        axis: the first axis of the second group.
    """

    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> two axes."""
        return autograd.flatten(x, self.axis)


class Reshape(Layer):
    """The same elements in another shape."""

    def forward(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Any shape -> ``shape``, in which one size may be -1."""
        return autograd.reshape(x, shape)


class Cat(Layer):
    """Join tensors along one axis.

    Args:
        axis: negative counts from the end.
    """

    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, xs: Sequence[Tensor]) -> Tensor:
        """Tensors whose shapes agree but for the axis -> one tensor."""
        return autograd.cat(xs, self.axis)


class Add(Layer):
    """a + b, for residual connections."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Map two shapes that broadcast to the broadcast shape."""
        return autograd.add(a, b)
