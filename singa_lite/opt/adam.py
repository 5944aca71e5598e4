# SPDX-License-Identifier: Apache-2.0
"""Adam."""

from __future__ import annotations

from ..errors import OptionError
from .base import Optimizer, Pairs
from .schedule import DecayScheduler, as_schedule


class Adam(Optimizer):
    """m and v follow g and g*g, and p -= lr * m' / (sqrt(v') + epsilon), both corrected for their start at zero.

    Args:
        lr: learning rate, >= 0.
        beta_1: how slowly m follows, 0 <= beta_1 < 1.
        beta_2: how slowly v follows, 0 <= beta_2 < 1.
        epsilon: > 0, outside the root.
        weight_decay: >= 0, times the parameter is added to its gradient.

    Source: Kingma, Ba, "Adam: A Method for Stochastic Optimization", 2015.
    """

    slot_names = ("m", "v")

    def __init__(
        self,
        lr: float | DecayScheduler = 0.1,
        beta_1: float | DecayScheduler = 0.9,
        beta_2: float | DecayScheduler = 0.999,
        epsilon: float | DecayScheduler = 1e-8,
        weight_decay: float | DecayScheduler = 0.0,
    ) -> None:
        super().__init__(lr)
        self.beta_1 = as_schedule("Adam: beta_1", beta_1)
        self.beta_2 = as_schedule("Adam: beta_2", beta_2)
        self.epsilon = as_schedule("Adam: epsilon", epsilon)
        self.weight_decay = as_schedule("Adam: weight_decay", weight_decay)
        for name, beta in (("beta_1", self.beta_1), ("beta_2", self.beta_2)):
            if not beta(0) < 1:
                raise OptionError(f"Adam: {name} = {beta(0)} must be in [0, 1)")
        if not self.epsilon(0) > 0:
            raise OptionError(f"Adam: epsilon = {self.epsilon(0)} must be > 0")

    def update_all(self, pairs: Pairs) -> None:
        step = self.step_counter
        self.run_update(
            "adam_update",
            pairs,
            lr=self.lr(step),
            beta_1=self.beta_1(step),
            beta_2=self.beta_2(step),
            eps=self.epsilon(step),
            weight_decay=self.weight_decay(step),
            step=step + 1,
        )
