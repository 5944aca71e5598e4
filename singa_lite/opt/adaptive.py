# SPDX-License-Identifier: Apache-2.0
"""Optimizers that scale every element's step by its earlier gradients."""

from __future__ import annotations

from typing import Any

from ..graph.recorder import scalar
from .base import Optimizer, Pairs
from .schedule import DecayScheduler, ScheduleAttribute

__all__ = ["AdaGrad", "Adam", "AdamW", "RMSProp"]


class AdaGrad(Optimizer):
    """s += g*g, then p -= lr * g / sqrt(s + epsilon); s starts at zero.

    Args:
        lr: learning rate, >= 0.
        epsilon: > 0, inside the root as in SINGA.
        weight_decay: >= 0, times the parameter is added to its gradient.

    Raises:
        OptionError: a value out of range.

    Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011.
    """

    slot_names = ("sum_of_squares",)
    epsilon = ScheduleAttribute(has_zero=False)
    weight_decay = ScheduleAttribute()
    is_recordable = True

    def __init__(
        self,
        lr: float | DecayScheduler = 0.1,
        epsilon: float | DecayScheduler = 1e-8,
        weight_decay: float | DecayScheduler = 0.0,
    ) -> None:
        super().__init__(lr)
        self.epsilon = epsilon
        self.weight_decay = weight_decay

    def update_all(self, pairs: Pairs) -> None:
        lr, epsilon, weight_decay = map(self.number, ("lr", "epsilon", "weight_decay"))
        slots = AdaGrad.slot_names
        self.run_update(
            "adagrad_update", pairs, slots=slots, lr=lr, epsilon=epsilon, weight_decay=weight_decay
        )


class RMSProp(Optimizer):
    """s = rho * s + (1 - rho) * g*g, then p -= lr * g / sqrt(s + epsilon); s starts at zero.

    Args:
        lr: learning rate, >= 0.
        rho: decay rate of s, 0 <= rho < 1.
        epsilon: > 0, inside the root as in SINGA.
        weight_decay: >= 0, times the parameter is added to its gradient.

    Raises:
        OptionError: a value out of range.

    Source: Hinton, "Neural Networks for Machine Learning", lecture 6e, 2012.
    """

    slot_names = ("mean_square",)
    rho = ScheduleAttribute(below=1.0)
    epsilon = ScheduleAttribute(has_zero=False)
    weight_decay = ScheduleAttribute()
    is_recordable = True

    def __init__(
        self,
        lr: float | DecayScheduler = 0.1,
        rho: float | DecayScheduler = 0.9,
        epsilon: float | DecayScheduler = 1e-8,
        weight_decay: float | DecayScheduler = 0.0,
    ) -> None:
        super().__init__(lr)
        self.rho = rho
        self.epsilon = epsilon
        self.weight_decay = weight_decay

    def update_all(self, pairs: Pairs) -> None:
        self.run_update(
            "rmsprop_update",
            pairs,
            slots=RMSProp.slot_names,
            lr=self.number("lr"),
            weight=scalar(lambda: 1 - self.value_of("rho")),
            epsilon=self.number("epsilon"),
            weight_decay=self.number("weight_decay"),
        )


class Adam(Optimizer):
    """p -= lr * m' / (sqrt(v') + epsilon), with moving means m of g and v of g*g, corrected for their start at zero.

    m = beta_1 * m + (1 - beta_1) * g and m' = m / (1 - beta_1**t) at the t-th step; v and v' likewise, with beta_2.
    As in SINGA t counts the steps of the optimizer: a parameter that joins late, such as that of a layer unfrozen late,
    begins with larger ones, up to a few times, than by a count for each parameter, as PyTorch has it.

    Args:
        lr: learning rate, >= 0.
        beta_1: decay rate of m, 0 <= beta_1 < 1.
        beta_2: decay rate of v, 0 <= beta_2 < 1.
        epsilon: > 0, outside the root.
        weight_decay: >= 0, times the parameter is added to its gradient.

    Raises:
        OptionError: a value out of range.

    Source: Kingma, Ba, "Adam: A Method for Stochastic Optimization", 2015.
    """

    slot_names = ("m", "v")
    beta_1 = ScheduleAttribute(below=1.0)
    beta_2 = ScheduleAttribute(below=1.0)
    epsilon = ScheduleAttribute(has_zero=False)
    weight_decay = ScheduleAttribute()

    def __init__(
        self,
        lr: float | DecayScheduler = 0.1,
        beta_1: float | DecayScheduler = 0.9,
        beta_2: float | DecayScheduler = 0.999,
        epsilon: float | DecayScheduler = 1e-8,
        weight_decay: float | DecayScheduler = 0.0,
    ) -> None:
        super().__init__(lr)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.weight_decay = weight_decay

    is_recordable = True
    kernel = "adam_update"

    def update_all(self, pairs: Pairs) -> None:
        self.run_update(
            self.kernel,
            pairs,
            slots=Adam.slot_names,
            rate=scalar(lambda: self.value_of("lr") / self._correction("beta_1")),
            weight_1=scalar(lambda: 1 - self.value_of("beta_1")),
            weight_2=scalar(lambda: 1 - self.value_of("beta_2")),
            correction=scalar(lambda: 1 / self._correction("beta_2")),
            epsilon=self.number("epsilon"),
            **self.decay(),
        )

    def decay(self) -> dict[str, Any]:
        """Return the attributes of the kernel for the weight decay."""
        return {"weight_decay": self.number("weight_decay")}

    def _correction(self, beta: str) -> float:
        """Return what a moving mean of ones, which began with zero, is after this step."""
        return 1 - self.value_of(beta) ** (self._step_counter + 1)


class AdamW(Adam):
    """Adam whose weight decay shrinks the parameter itself: first p *= 1 - lr * weight_decay, then a step of Adam.

    Args:
        lr, beta_1, beta_2, epsilon: as in Adam.
        weight_decay: >= 0.

    Raises:
        OptionError: a value out of range.

    Source: Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    is_recordable = True
    kernel = "adamw_update"

    def __init__(
        self,
        lr: float | DecayScheduler = 0.001,
        beta_1: float | DecayScheduler = 0.9,
        beta_2: float | DecayScheduler = 0.999,
        epsilon: float | DecayScheduler = 1e-8,
        weight_decay: float | DecayScheduler = 0.01,
    ) -> None:
        super().__init__(lr, beta_1, beta_2, epsilon, weight_decay)

    def decay(self) -> dict[str, Any]:
        return {"keep": scalar(lambda: 1 - self.value_of("lr") * self.value_of("weight_decay"))}
