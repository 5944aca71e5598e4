# SPDX-License-Identifier: Apache-2.0
"""Transports: one file each, found by listing this folder."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from .base import Communicator


@cache
def find_transports() -> Mapping[str, type[Communicator]]:
    """Return every word of ``World.transport`` and the class that it chooses; the folder is read once."""
    transports: dict[str, type[Communicator]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, Communicator) and "transport" in vars(value):
                transports[value.transport] = value
    transports.pop("", None)  # the contract itself
    return MappingProxyType(transports)
