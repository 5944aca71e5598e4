# SPDX-License-Identifier: Apache-2.0
"""Losses as layers: a mean over the batch, shape (1,)."""

from __future__ import annotations

from .. import autograd
from ..tensor import Tensor
from .base import Layer

__all__ = ["BinaryCrossEntropy", "CrossEntropy", "MeanSquareError", "SoftMaxCrossEntropy"]


class SoftMaxCrossEntropy(Layer):
    """Cross entropy of softmax(x) against class ids (N,) or a label matrix (N, C)."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Logits (N, C) and labels -> (1,)."""
        return autograd.softmax_cross_entropy(x, t)


class CrossEntropy(Layer):
    """Cross entropy of probabilities against class ids (N,) or a label matrix (N, C)."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Probabilities (N, C) and labels -> (1,)."""
        return autograd.cross_entropy(x, t)


class BinaryCrossEntropy(Layer):
    """Cross entropy of probabilities against labels of 0 and 1; the elements of a sample add up."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Probabilities (N, ...) and labels of the same shape -> (1,)."""
        return autograd.binary_cross_entropy(x, t)


class MeanSquareError(Layer):
    """The squared error, mean over all elements."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Map two tensors of one shape to (1,)."""
        return autograd.mse_loss(x, t)
