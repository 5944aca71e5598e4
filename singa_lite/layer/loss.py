# SPDX-License-Identifier: Apache-2.0
"""Losses as layers: a mean over the batch, shape (1,)."""

from __future__ import annotations

from .. import autograd
from ..tensor import Tensor
from .base import Layer


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


class MeanSquareError(Layer):
    """The squared error, mean over all elements."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Two tensors of one shape -> (1,)."""
        return autograd.mse_loss(x, t)
