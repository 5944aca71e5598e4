# SPDX-License-Identifier: Apache-2.0
"""Synchronisation schemes: one file each, found by listing this folder."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import GenericAlias, MappingProxyType

from .base import Scheme


@cache
def find_schemes() -> Mapping[str, type[Scheme]]:
    """Return every word of ``dist_option`` and the scheme it chooses; the folder is read once."""
    schemes: dict[str, type[Scheme]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for value in vars(module).values():
            # in Python 3.10 tuple[int, ...] is a class too
            is_class = inspect.isclass(value) and not isinstance(value, GenericAlias)
            if is_class and issubclass(value, Scheme) and not inspect.isabstract(value):
                schemes.update(dict.fromkeys(value.names, value))
    return MappingProxyType(schemes)
