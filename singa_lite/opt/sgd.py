# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from ..errors import OptionError
from .base import Optimizer, Pairs
from .schedule import DecayScheduler, as_schedule


class SGD(Optimizer):
    """v = momentum * v + (1 - dampening) * g with g = grad + weight_decay * p, then p -= lr * v.

    With nesterov p -= lr * (g + momentum * v). v starts at zero, so dampening acts from the first step on.

    Args:
        lr: learning rate, >= 0.
        momentum: >= 0; 0 keeps no state.
        dampening: share of the gradient that momentum leaves out.
        weight_decay: >= 0, times the parameter is added to its gradient.
        nesterov: needs momentum > 0 and dampening 0.
        dtype: accepted for SINGA scripts; the momentum has its parameter's dtype.

    Raises:
        OptionError: a value out of range.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.
    """

    def __init__(
        self,
        lr: float | DecayScheduler = 0.1,
        momentum: float | DecayScheduler = 0.0,
        dampening: float | DecayScheduler = 0.0,
        weight_decay: float | DecayScheduler = 0.0,
        nesterov: bool = False,
        dtype: object = None,
    ) -> None:
        super().__init__(lr)
        self.momentum = as_schedule("SGD: momentum", momentum)
        self.dampening = as_schedule("SGD: dampening", dampening)
        self.weight_decay = as_schedule("SGD: weight_decay", weight_decay)
        self.nesterov = bool(nesterov)
        if self.nesterov and (self.momentum(0) <= 0 or self.dampening(0) != 0):
            raise OptionError("SGD: nesterov needs momentum > 0 and dampening 0")
        if isinstance(momentum, DecayScheduler) or self.momentum(0) > 0:
            self.slot_names = ("momentum",)

    def update_all(self, pairs: Pairs) -> None:
        step = self.step_counter
        self.run_update(
            "sgd_update",
            pairs,
            lr=self.lr(step),
            momentum=self.momentum(step),
            dampening=self.dampening(step),
            weight_decay=self.weight_decay(step),
            nesterov=self.nesterov,
        )
