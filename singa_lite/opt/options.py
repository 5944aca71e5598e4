# SPDX-License-Identifier: Apache-2.0
"""The options of a scheme as callers give them by name: plain values, or schedules of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from ..errors import OptionError, check_number
from .schedule import DecayScheduler

Option = Any  # a number, a bool, or a DecayScheduler of numbers


def join_options(where: str, *several: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options of ``several`` as one dict; OptionError if two of them give the same one."""
    joined: dict[str, Option] = {}
    for options in several:
        twice = sorted(set(joined) & set(options))
        if twice:
            raise OptionError(
                f"{where}: {', '.join(twice)} is given twice, in the text of dist_option and by name; leave one out"
            )
        joined |= options
    return joined


def check_options(scheme: str, types: Mapping[str, Any], given: Mapping[str, Option]) -> None:
    """Raise OptionError unless ``types`` has the name and type of each option; a DecayScheduler is a number."""
    unknown = sorted(set(given) - set(types))
    if unknown:
        have = f"its options are {', '.join(types)}" if types else "it has no options"
        raise OptionError(f"DistOpt: {scheme} has no option {', '.join(unknown)}; {have}")
    for name, value in given.items():
        accepted = get_args(types[name]) or (types[name],)
        if isinstance(value, DecayScheduler) or (value is None and type(None) in accepted):
            continue
        if bool in accepted:
            if not isinstance(value, (bool, np.bool_)):
                raise OptionError(f"{scheme}: {name} = {value!r} must be True or False")
        elif float in accepted:
            check_number(scheme, name, value)


def with_defaults(options: Any, names: Sequence[str]) -> Any:
    """Return ``options`` with those called ``names`` at their defaults."""
    if not names:
        return options
    defaults = type(options)()
    return replace(options, **{name: getattr(defaults, name) for name in names})
