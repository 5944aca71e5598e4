# SPDX-License-Identifier: Apache-2.0
"""Dropout as a layer."""

from __future__ import annotations

from .. import autograd
from ..autograd.ops.dropout import check_ratio
from ..tensor import Tensor
from .base import Layer

__all__ = ["Dropout"]


class Dropout(Layer):
    """Zero a random share of the elements in training, scale the others up; the identity otherwise.

    Args:
        ratio: share that is zeroed, 0 <= ratio < 1.

    Raises:
        OptionError: ``ratio`` is out of range. DTypeError: at a call, if x is not of floats.
    """

    def __init__(self, ratio: float = 0.5) -> None:
        super().__init__()
        self.ratio = check_ratio("Dropout", ratio)

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> same shape."""
        return autograd.dropout(x, self.ratio)
