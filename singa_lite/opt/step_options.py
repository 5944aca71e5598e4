# SPDX-License-Identifier: Apache-2.0
"""Which options a step of a scheme has: those of its call, of dist_option's text, and of the constructor.

They are plain values, or schedules of the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields
from typing import Any, Protocol

import numpy as np

from ..errors import OptionError, check_choice, check_number, is_one_of
from ..sync.base import OptimizerView, Scheme, StepContext, types_of
from ..sync.text import (
    accepted_of,
    make_options,
    options_by_name,
    read_dist_option,
    scheme_of_options,
    wrapped_field,
)
from .base import Optimizer
from .schedule import DecayScheduler, described

Option = Any  # a number, a bool, or a DecayScheduler of numbers


class CallDefaults(OptimizerView, Protocol):
    """The attributes of DistOpt that are the defaults of a call; they may be set between steps."""

    opt: Optimizer
    dist_option: str
    spars: float | DecayScheduler


class StepOptions:
    """Reads the options of a DistOpt's steps; every method gets that as ``dist``, to which it keeps no reference.

    ``options`` and ``clip_norm`` are the constructor's; a scheme with an option ``clip`` gets ``clip_norm`` there.
    """

    def __init__(self, options: dict[str, Option], clip_norm: float | None) -> None:
        self.options, self._clip_norm = options, clip_norm

    def check(self, dist: CallDefaults, spars: float | DecayScheduler | None) -> None:
        """Raise OptionError unless the constructor's options fit its ``dist_option``, and ``spars`` is given once."""
        scheme, of_text = read_dist_option(dist.dist_option)
        of_text = options_by_name(scheme, _join_options(of_text, self.options))
        _join_options(of_text, {} if spars is None else {"spars": spars})
        self.step(dist, scheme, self.read_call(dist, None, None, {}))

    def read_call(
        self,
        dist: CallDefaults,
        dist_option: str | None,
        spars: float | DecayScheduler | None,
        options: dict[str, Option],
    ) -> dict[str, Option]:
        """Return the options of a call by name, schedules as they are; without ``spars`` where it is the attribute."""
        default, of_default = read_dist_option(dist.dist_option)
        scheme, of_text = (default, {}) if dist_option is None else read_dist_option(dist_option)
        of_call = options_by_name(scheme, _join_options(of_text, options))
        given = options_by_name(scheme, {**self.options, **of_default}) if scheme is default else {}
        wrapped = wrapped_field(scheme)
        if wrapped in of_call and of_call[wrapped] != given.get(wrapped):
            given = {}  # are another scheme's
        if spars is not None and "spars" in types_of(scheme_of_options(scheme, {**given, **of_call})):
            of_call = _join_options(of_call, {"spars": spars})
        given |= of_call
        by_name = {name: value for name, value in given.items() if name != wrapped}
        takes = scheme_of_options(scheme, given)
        _check_options(takes.names[0], types_of(takes), by_name)
        if self._clip_norm is not None and has_clip(scheme):
            if "clip" in given:
                raise OptionError(
                    f"DistOpt: clip_norm and the option clip of {scheme.names[0]} are one thing; leave one out"
                )
            given["clip"] = self._clip_norm
        return given

    def step(
        self, dist: CallDefaults, scheme: type[Scheme], given: dict[str, Option], offset: int = 0
    ) -> StepContext:
        """Return the step that is ``offset`` steps ahead; OptionError if the optimizer does not fit."""
        step = dist.opt._step_counter + offset
        options = make_options(scheme, _values_at(scheme, _values(dist, scheme, given), step))
        if scheme.takes_momentum(options):
            dist.momentum_rule(step)
        return StepContext(options, step, dist)

    def structure(
        self, dist: CallDefaults, scheme: Scheme, given: dict[str, Option], offset: int
    ) -> Hashable:
        """Return what decides which kernels and collectives the step has that is ``offset`` steps ahead."""
        step = self.step(dist, type(scheme), given, offset)
        options: Hashable = step.options
        if scheme.read_again:
            names = {field.name for field in fields(step.options)} - {*scheme.read_again}
            options = tuple(getattr(step.options, name) for name in sorted(names))
        return scheme, options, scheme.step_key(step)


def schedules(dist: CallDefaults, scheme: type[Scheme], given: dict[str, Option]) -> dict[str, Any]:
    """Return what ``described`` says of each option that is a schedule, by "the schedule of <name>"."""
    return {
        f"the schedule of {key}": described(value, dist.opt._step_counter)
        for key, value in _values(dist, scheme, given).items()
        if isinstance(value, DecayScheduler)
    }


def has_clip(scheme: type[Scheme]) -> bool:
    """Return whether a scheme clips local gradients itself, by its option ``clip``."""
    return "clip" in types_of(scheme)


def _values(dist: CallDefaults, scheme: type[Scheme], given: dict[str, Option]) -> dict[str, Option]:
    """Return ``given`` with the default of ``spars`` if the scheme has that option."""
    takes_it = "spars" in types_of(scheme_of_options(scheme, given))
    return {"spars": dist.spars, **given} if takes_it else given


def _values_at(scheme: type[Scheme], given: dict[str, Option], step: int) -> dict[str, Any]:
    """Return the values of ``given`` at ``step``; OptionError where that of a flag is neither True nor False."""
    values = dict(given)
    for name, value in given.items():
        if isinstance(value, DecayScheduler):
            values[name] = found = value(step)
            is_bool = types_of(scheme_of_options(scheme, given)).get(name) is bool
            if is_bool and not is_one_of(found, (False, True)):
                raise OptionError(f"DistOpt: {name} = {found!r} at step {step} must be True or False")
    return values


def _join_options(of_text: Mapping[str, Option], by_name: Mapping[str, Option]) -> dict[str, Option]:
    """Return both as one dict; OptionError if they give the same option."""
    if twice := sorted(set(of_text) & set(by_name)):
        raise OptionError(
            f"DistOpt: {', '.join(twice)} is given twice, in the text of dist_option and by name; leave one out"
        )
    return {**of_text, **by_name}


def _check_options(scheme: str, types: Mapping[str, Any], given: Mapping[str, Option]) -> None:
    """Raise OptionError unless ``types`` has the name and type of each option; a DecayScheduler is a number."""
    if unknown := sorted(set(given) - set(types)):
        have = f"its options are {', '.join(types)}" if types else "it has no options"
        raise OptionError(f"DistOpt: {scheme} has no option {', '.join(unknown)}; {have}")
    for name, value in given.items():
        accepted, choices = accepted_of(types[name])
        if isinstance(value, DecayScheduler) or (value is None and type(None) in accepted):
            continue
        if choices and (not accepted or is_one_of(value, choices)):
            check_choice(scheme, name, value, choices)
            continue
        if bool in accepted:
            if not isinstance(value, (bool, np.bool_)):
                raise OptionError(f"{scheme}: {name} = {value!r} must be True or False")
        elif float in accepted:
            check_number(scheme, name, value)
