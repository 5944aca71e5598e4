# SPDX-License-Identifier: Apache-2.0
"""The schemes that one DistOpt has run, and their states: saved, loaded, and refused where a step would lose them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import CheckpointError, OptionError, check_int
from ..tensor import Tensor
from . import find_schemes
from .base import Scheme

PREFIX = "sync/"

States = dict[str, np.ndarray[Any, Any]]
Names = dict[Tensor, str]


class SchemeTable:
    """One scheme of each name.

    Args:
        make: (class, threshold) -> a new scheme.
        threshold: elements, where a call does not say.
    """

    def __init__(self, make: Callable[[type[Scheme], int], Scheme], threshold: int) -> None:
        self._make, self._threshold = make, threshold
        self._schemes: dict[str, Scheme] = {}
        self._loaded: dict[str, States] = {}  # states of schemes that have not run yet

    def get(self, kind: type[Scheme], threshold: int | None, names: Names) -> Scheme:
        """Return the scheme of the name of ``kind``, a new one with the states that were loaded at the first call.

        Raises:
            OptionError: ``threshold`` is another one than that scheme's.
        """
        name = kind.names[0]
        if name not in self._schemes:
            limit = self._threshold if threshold is None else threshold
            scheme = self._make(kind, check_int("DistOpt", "threshold", limit, 0))
            if name in self._loaded:
                scheme.load_state_dict(self._loaded.pop(name), names)
            self._schemes[name] = scheme
        scheme = self._schemes[name]
        if threshold is not None and threshold != scheme.threshold:
            raise OptionError(
                f"DistOpt: {name} runs with threshold {scheme.threshold}, not {threshold}; "
                "changing it would lose residuals: make another DistOpt"
            )
        return scheme

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

    # ---- states --------------------------------------------------------------------------------------

    def state_dict(self, names: Names) -> States:
        """Return the states of all, as "sync/<scheme>/<state>"."""
        own = {name: scheme.state_dict(names) for name, scheme in self._schemes.items()}
        return {
            f"{PREFIX}{name}/{key}": value
            for name, states in {**self._loaded, **own}.items()
            for key, value in states.items()
        }

    def check_states(self, states: States, names: Names) -> None:
        """Raise CheckpointError unless ``load_state_dict`` can take these; nothing is changed."""
        known, given = find_schemes(), _by_scheme(states)
        if not set(given) <= set(known):
            raise CheckpointError(f"DistOpt: states of unknown schemes {sorted(set(given) - set(known))}")
        for name, own in given.items():
            self._make(known[name], self._threshold).load_state_dict(own, names)

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
