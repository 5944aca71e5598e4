# SPDX-License-Identifier: Apache-2.0
"""Schedules: hyper-parameters as functions of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from numbers import Real

from ..errors import OptionError


class DecayScheduler(ABC):
    """A hyper-parameter that changes with the step.

    Args:
        init_value: its value at step 0.
    """

    def __init__(self, init_value: float) -> None:
        self.init_value = float(init_value)

    def __call__(self, step: int) -> float:
        """The value at ``step``, the number of updates made so far."""
        return self.call(step)

    @abstractmethod
    def call(self, step: int) -> float:
        """What a subclass writes: the value at ``step``."""


class Constant(DecayScheduler):
    """Always ``init_value``."""

    def call(self, step: int) -> float:
        return self.init_value


class ExponentialDecay(DecayScheduler):
    """init_value * decay_rate ** (step / decay_steps).

    Args:
        init_value: value at step 0.
        decay_steps: steps over which the value is multiplied by ``decay_rate`` once, > 0.
        decay_rate: factor, > 0.
        staircase: True divides without remainder, so the value drops every ``decay_steps`` steps.
    """

    def __init__(
        self, init_value: float, decay_steps: int, decay_rate: float, staircase: bool = False
    ) -> None:
        super().__init__(init_value)
        if not decay_steps > 0 or not decay_rate > 0:
            raise OptionError(
                f"ExponentialDecay: decay_steps = {decay_steps} and decay_rate = {decay_rate} must be > 0"
            )
        self.decay_steps, self.decay_rate, self.staircase = decay_steps, decay_rate, staircase

    def call(self, step: int) -> float:
        exponent = step // self.decay_steps if self.staircase else step / self.decay_steps
        return float(self.init_value * self.decay_rate**exponent)


def as_schedule(name: str, value: float | DecayScheduler, least: float = 0.0) -> DecayScheduler:
    """``value`` as a schedule; OptionError unless it is a schedule or a number >= ``least``."""
    if isinstance(value, DecayScheduler):
        return value
    if not isinstance(value, Real) or not float(value) >= least:
        raise OptionError(f"{name} = {value!r} must be a number >= {least} or a DecayScheduler")
    return Constant(float(value))
