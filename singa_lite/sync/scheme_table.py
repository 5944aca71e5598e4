# SPDX-License-Identifier: Apache-2.0
"""The schemes that one DistOpt has run, and their states: saved, loaded, and kept for schemes that run later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import CheckpointError, OptionError
from ..tensor import Tensor
from . import find_schemes
from .base import Scheme

PREFIX = "sync/"

States = dict[str, np.ndarray[Any, Any]]
Names = dict[Tensor, str]


class SchemeTable:
    """A DistOpt's schemes, one for each name, and the states that were loaded for schemes that have not run yet."""

    def __init__(self) -> None:
        self._schemes: dict[str, Scheme] = {}
        self._loaded: dict[str, States] = {}

    def get(self, kind: type[Scheme]) -> Scheme | None:
        """Return the scheme with the name of ``kind``, None if there is none yet."""
        return self._schemes.get(kind.names[0])

    def add(self, kind: type[Scheme], scheme: Scheme, names: Names) -> None:
        """Add ``scheme`` by the name of ``kind``, and load the states that are kept for it."""
        name = kind.names[0]
        if name in self._loaded:
            scheme.load_state_dict(self._loaded.pop(name), names)
        self._schemes[name] = scheme

    def check_velocity(self, scheme: Scheme | None) -> None:
        """Raise OptionError if a scheme that is not ``scheme`` keeps velocities."""
        known, others = find_schemes(), [other for other in self._schemes.values() if other is not scheme]
        kept = {other.names[0] for other in others if other.keeps_velocity and not other.state.is_empty}
        kept |= {name for name in self._loaded if known[name].keeps_velocity}
        if kept:
            raise OptionError(
                f"DistOpt: {', '.join(kept)} keeps velocities that have not been sent, which a step without it would "
                "lose; go on with it, or make another DistOpt"
            )

    @property
    def kinds(self) -> list[type[Scheme]]:
        """The classes of the schemes that have run, or whose states were loaded."""
        known = find_schemes()
        return [known[name] for name in {*self._schemes, *self._loaded}]

    def state_dict(self, names: Names) -> States:
        """Return the states of all, as "sync/<scheme>/<state>"."""
        own = {name: scheme.state_dict(names) for name, scheme in self._schemes.items()}
        return {
            f"{PREFIX}{name}/{key}": value
            for name, states in {**self._loaded, **own}.items()
            for key, value in states.items()
        }

    def check_states(self, states: States, names: Names, make: Callable[[type[Scheme]], Scheme]) -> None:
        """Raise CheckpointError unless ``load_state_dict`` takes these; ``make`` gives a scheme to try them on."""
        known, given = find_schemes(), _by_scheme(states)
        if not set(given) <= set(known):
            raise CheckpointError(f"DistOpt: states of unknown schemes {sorted(set(given) - set(known))}")
        for name, own in given.items():
            (self._schemes.get(name) or make(known[name])).check_states(own, names)

    def load_state_dict(self, states: States, names: Names) -> None:
        """Continue from ``state_dict``; a scheme of which nothing is there starts again."""
        given = _by_scheme(states)
        for name, scheme in self._schemes.items():
            scheme.load_state_dict(given.pop(name, {}), names)
        self._loaded = given


def _by_scheme(states: States) -> dict[str, States]:
    """Return the states of each scheme by its name, without the prefix; others are left out."""
    found: dict[str, States] = {}
    for key in states:
        if key.startswith(PREFIX):
            name, _, rest = key.removeprefix(PREFIX).partition("/")
            found.setdefault(name, {})[rest] = states[key]
    return found
