# SPDX-License-Identifier: Apache-2.0
"""Synchronisation schemes: one file each, found by listing this folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from ..plugins import classes_in
from .base import Scheme


@cache
def find_schemes() -> Mapping[str, type[Scheme]]:
    """Return every word of ``dist_option`` and the scheme it chooses; the folder is read once."""
    schemes = classes_in(__name__, Scheme)  # type: ignore[type-abstract]
    return MappingProxyType({name: kind for kind in schemes for name in kind.names})
