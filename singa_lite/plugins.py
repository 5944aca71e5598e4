# SPDX-License-Identifier: Apache-2.0
"""Classes that nothing names: those in a folder, so that a new transport or scheme is one file, and subclasses."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import GenericAlias
from typing import TypeVar

Contract = TypeVar("Contract")


def classes_in(package: str, contract: type[Contract]) -> Iterator[type[Contract]]:
    """Import every module of ``package``, and yield ``contract`` and its subclasses that have a name in one.

    A class that several modules name comes several times.
    """
    for module_info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        module = importlib.import_module(f"{package}.{module_info.name}")
        for value in vars(module).values():
            # in Python 3.10 tuple[int, ...] is a class too
            if inspect.isclass(value) and not isinstance(value, GenericAlias) and issubclass(value, contract):
                yield value


def subclasses(base: type[Contract]) -> list[type[Contract]]:
    """Return all classes below ``base``, those of the program too, each before what is below it."""
    return [kind for child in base.__subclasses__() for kind in (child, *subclasses(child))]
