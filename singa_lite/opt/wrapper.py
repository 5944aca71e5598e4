# SPDX-License-Identifier: Apache-2.0
"""An optimizer that wraps another one: what it passes on as it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..errors import OptionError
from ..tensor import Tensor
from .base import MomentumRule, Optimizer, Pairs
from .schedule import DecayScheduler


class OptimizerWrapper(Optimizer, ABC):
    """Passes schedules, steps, slots and descriptions on to ``opt``; what updates, a subclass writes."""

    is_recordable = True
    opt: Optimizer

    @property
    def lr(self) -> DecayScheduler:  # type: ignore[override]
        return self.opt.lr

    @lr.setter
    def lr(self, value: float | DecayScheduler) -> None:
        self.opt.lr = value

    @property
    def step_counter(self) -> int:
        return self.opt.step_counter

    @step_counter.setter
    def step_counter(self, steps: int) -> None:
        self.opt.step_counter = steps

    def slots(self, param: Tensor) -> dict[str, Tensor]:
        return self.opt.slots(param)

    def unnamed(self) -> tuple[int, ...] | None:
        return self.opt.unnamed()

    def call(self, loss: Tensor) -> None:
        """Raise OptionError: without the ranks' agreement there is no update."""
        raise OptionError(
            f"{type(self).__name__}: has no call(loss); call the optimizer itself, as optimizer(loss)"
        )

    @abstractmethod
    def update_all(self, pairs: Pairs) -> None: ...

    def lr_at(self, step: int) -> float:
        return self.opt.lr_at(step)

    def momentum_rule(self, step: int) -> MomentumRule:
        return self.opt.momentum_rule(step)

    def describe(self) -> dict[str, Any]:
        return self.opt.describe()

    def zero_grad(self) -> None:
        self.opt.zero_grad()
