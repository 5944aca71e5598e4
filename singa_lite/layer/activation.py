# SPDX-License-Identifier: Apache-2.0
"""Activations as layers."""

from __future__ import annotations

from .. import autograd
from ..tensor import Tensor
from .base import Layer

__all__ = ["ReLU", "Sigmoid", "SoftMax", "Tanh"]


class ReLU(Layer):
    """max(x, 0), element by element."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> same shape."""
        return autograd.relu(x)


class Sigmoid(Layer):
    """1 / (1 + exp(-x)), element by element."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> same shape."""
        return autograd.sigmoid(x)


class Tanh(Layer):
    """The hyperbolic tangent, element by element."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> same shape."""
        return autograd.tanh(x)


class SoftMax(Layer):
    """exp(x) / sum(exp(x)) along one axis.

    Args:
        axis: where the results sum to one.
    """

    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Any shape that has the axis -> same shape."""
        return autograd.softmax(x, self.axis)
