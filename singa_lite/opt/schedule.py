# SPDX-License-Identifier: Apache-2.0
"""Schedules: hyper-parameters as functions of the step."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np

from ..config import this_thread
from ..errors import OptionError, check_bool, check_int, check_number, is_number
from ..graph.recorder import break_graph

__all__ = ["Constant", "DecayScheduler", "ExponentialDecay"]

STEPS_TO_COMPARE = (0, 1, 10, 100, 1000)  # from the first step to beyond a usual warm-up


class DecayScheduler(ABC):
    """A hyper-parameter that changes with the step.

    Args:
        init_value: its value at step 0.
    """

    is_static = True  # as an argument of a recorded step it is the same as long as it is this object

    def __init__(self, init_value: float) -> None:
        self.init_value = check_number(type(self).__name__, "init_value", init_value)

    def __setattr__(self, name: str, value: object) -> None:
        if this_thread.recorder is not None and hasattr(self, name):  # else it is being made
            break_graph(f"it sets {name} of a schedule, which a replay would not do")
        object.__setattr__(self, name, value)

    def __call__(self, step: int) -> float:
        """Return the value at ``step`` >= 0, the number of updates made so far."""
        if type(step) is not int or step < 0:  # not a call at every step of a replay
            check_int(type(self).__name__, "step", step, 0)
        if this_thread.recorder is not None:
            break_graph("it reads a schedule's value, which a replay would not do")
        return self.call(step)

    def __repr__(self) -> str:
        """Return class and numbers."""
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
        )

    def describe(self, step: int) -> dict[str, Any]:
        """Return class, numbers and the values at ``step`` and some others, as JSON values.

        The values are computed by a copy, so that a schedule that counts its calls goes on as before; there are none
        where it cannot be copied or has no value.
        """
        try:
            clone = copy.deepcopy(self)
            values = {str(at): repr(float(clone.call(at))) for at in (step, *STEPS_TO_COMPARE)}
        except Exception as error:  # whatever the caller's schedule raises at a step that may never come
            values = {"none": type(error).__name__}
        return {"class": type(self).__name__, **described_entries(vars(self), step), "values": values}

    @abstractmethod
    def call(self, step: int) -> float:
        """Return the value at ``step``; a subclass writes it."""


class Constant(DecayScheduler):
    """Always ``init_value``."""

    def __repr__(self) -> str:
        """Return the number."""
        return repr(self.init_value)

    def call(self, step: int) -> float:
        return self.init_value


class ExponentialDecay(DecayScheduler):
    """init_value * decay_rate ** (step / decay_steps).

    Args:
        init_value: value at step 0.
        decay_steps: steps over which the value is multiplied by ``decay_rate`` once, > 0.
        decay_rate: factor, > 0.
        staircase: True rounds the exponent down, so the value drops every ``decay_steps`` steps.

    Raises:
        OptionError: a value out of range.
    """

    def __init__(
        self, init_value: float, decay_steps: int, decay_rate: float, staircase: bool = False
    ) -> None:
        super().__init__(init_value)
        for name, value in (("decay_steps", decay_steps), ("decay_rate", decay_rate)):
            if not check_number("ExponentialDecay", name, value) > 0:
                raise OptionError(f"ExponentialDecay: {name} = {value} must be > 0")
        is_whole = isinstance(decay_steps, Integral)
        self.decay_steps = int(decay_steps) if is_whole else float(decay_steps)
        self.decay_rate = float(decay_rate)
        self.staircase = check_bool("ExponentialDecay", "staircase", staircase)

    def call(self, step: int) -> float:
        try:
            exponent = step / self.decay_steps
            if self.staircase and exponent < math.inf:
                exponent = math.floor(exponent)
            return float(self.init_value * self.decay_rate**exponent)
        except OverflowError:
            raise OptionError(f"{self!r}: the value at step {step} is too large for a float") from None


def described(value: object, step: int) -> Any:
    """Return a number, text or schedule, or a list, tuple or dict of these, as a JSON value; None for all else."""
    if isinstance(value, DecayScheduler):
        return value.describe(step)
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, float) and math.isnan(plain):
        return "nan"  # equal to itself, as what is compared must be
    if isinstance(plain, (list, tuple)):
        items = [described(item, step) for item in plain]
        return None if None in items else items
    if isinstance(plain, dict):
        entries = described_entries(plain, step)
        return entries if len(entries) == len(plain) and all(isinstance(key, str) for key in plain) else None
    return plain if isinstance(plain, (bool, int, float, str)) else None


def described_entries(values: Mapping[str, object], step: int) -> dict[str, Any]:
    """Return what ``described`` gives of each value, by name; without those of which it gives None."""
    found = {name: described(value, step) for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


def as_number(value: object) -> float:
    """Return a number, or an array of shape (), as a float; NaN for anything else, infinity where it is too large."""
    if isinstance(value, (bool, str, bytes)):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:  # of an int
        return math.inf
    except (TypeError, ValueError):
        return math.nan


def as_schedule(name: str, value: object, least: float = 0.0) -> DecayScheduler:
    """Return ``value`` as a schedule; OptionError unless it is a schedule or a finite number >= ``least``."""
    if isinstance(value, DecayScheduler):
        return value
    number = as_number(value) if is_number(value) else math.nan
    if not least <= number < math.inf:
        raise OptionError(f"{name} = {value!r} must be a finite number >= {least} or a DecayScheduler")
    return Constant(number)


class ScheduleAttribute:
    """An attribute of an optimizer that is a schedule; a number that it is set to becomes one.

    Setting it raises OptionError unless the value is a DecayScheduler or a finite number >= 0, and starts in the range.

    Args:
        has_zero: whether it may be 0.
        below: what it must be less than.
    """

    def __init__(self, has_zero: bool = True, below: float = math.inf) -> None:
        self.has_zero, self.below = has_zero, below

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, optimizer: object, owner: type | None = None) -> DecayScheduler:
        try:
            schedule: DecayScheduler = vars(optimizer)[self.name]
        except (KeyError, TypeError):  # not set yet, or asked of the class
            raise AttributeError(f"{owner.__name__ if owner else optimizer} has no {self.name}") from None
        return schedule

    def __set__(self, optimizer: object, value: float | DecayScheduler) -> None:
        schedule = as_schedule(f"{type(optimizer).__name__}: {self.name}", value)
        if not self.has_zero or self.below < math.inf:
            self.check(optimizer, schedule.call(0), "at step 0")
        break_graph(f"it sets {self.name} of an optimizer, which a replay would not do")
        vars(optimizer)[self.name] = schedule

    def check(self, optimizer: object, value: object, when: str) -> None:
        """Raise OptionError unless ``value``, which the schedule gives ``when``, is a number in the range."""
        least = 0.0 if self.has_zero else math.ulp(0.0)
        if not least <= as_number(value) < self.below:
            text = f">= 0 and < {self.below:g}" if self.has_zero else "> 0 and finite"
            if math.isnan(as_number(value)):
                text = f"a number {text}"
            raise OptionError(f"{type(optimizer).__name__}: {self.name} = {value!r} {when} must be {text}")
