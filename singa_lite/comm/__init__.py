# SPDX-License-Identifier: Apache-2.0
"""Transports: one file each, found by listing this folder."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import GenericAlias, MappingProxyType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .base import Communicator
    from .p2p import Messenger

Contract = TypeVar("Contract", "Communicator", "Messenger")


@cache
def find_transports() -> Mapping[str, type[Communicator]]:
    """Return every word of ``World.transport`` and the class that it chooses; the folder is read once."""
    from .base import Communicator

    return _find(Communicator)  # type: ignore[type-abstract]


@cache
def find_messengers() -> Mapping[str, type[Messenger]]:
    """Return every word of ``Job.transport`` and the class that it chooses; the folder is read once."""
    from .p2p import Messenger

    return _find(Messenger)  # type: ignore[type-abstract]


def _find(contract: type[Contract]) -> Mapping[str, type[Contract]]:
    found: dict[str, type[Contract]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for value in vars(module).values():
            # in Python 3.10 tuple[int, ...] is a class too
            is_class = inspect.isclass(value) and not isinstance(value, GenericAlias)
            if is_class and issubclass(value, contract) and "transport" in vars(value):
                found[value.transport] = value
    found.pop("", None)  # the contract itself
    return MappingProxyType(found)
