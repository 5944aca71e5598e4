# SPDX-License-Identifier: Apache-2.0
"""Synchronisation schemes: one file each, found by listing this folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from ..errors import OptionError
from ..plugins import classes_in
from .base import Scheme


@cache
def find_schemes() -> Mapping[str, type[Scheme]]:
    """Return every word of ``dist_option`` and the scheme it chooses; the folder is read once.

    A class is chosen by its own ``names`` alone, not by those of a class that it derives from.

    Raises:
        OptionError: ``names`` of a class is not a tuple of texts, or another class has one of them.
    """
    found: dict[str, type[Scheme]] = {}
    for kind in classes_in(__name__, Scheme):  # type: ignore[type-abstract]
        names = vars(kind).get("names", ())
        if not isinstance(names, tuple) or not all(name and isinstance(name, str) for name in names):
            raise OptionError(f"{_path(kind)}: names must be a tuple of texts, got {names!r}")
        for name in names:
            if found.setdefault(name, kind) is not kind:
                raise OptionError(
                    f"dist_option {name!r} is among the names of {_path(found[name])} and of {_path(kind)}; rename one"
                )
    return MappingProxyType(found)


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
