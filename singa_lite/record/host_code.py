# SPDX-License-Identifier: Apache-2.0
"""What the user's Python that every replay runs, methods of optimizers and schedules, names of other objects.

What lives here: finding that code from the optimizers of a model. What does not: reading one function (user_code.py).

A replay sets the attributes of the model at its end, so code that runs within it would read those of the step before.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

from ..layer.base import Layer
from ..opt.base import Optimizer
from ..opt.schedule import DecayScheduler
from ..tensor.pytree import nodes
from .user_code import is_users, names_of, value_of_cell


def names_on_host(values: Iterable[object]) -> set[str]:
    """Return the attributes that the methods of users' optimizers and schedules name, and functions that these call.

    Args:
        values: of the model's attributes.
    """
    names, seen = set[str](), set[int]()
    pending = [
        each for value in values for each in nodes(value) if isinstance(each, (Optimizer, DecayScheduler))
    ]
    while pending:
        value = pending.pop()
        if id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, FunctionType) and is_users(value):
                names |= names_of(value.__code__)[1]
            pending += _parts(value)
    return names


def _parts(value: Any) -> list[Any]:
    """Return what else runs where ``value`` does: what a function names, the class and attributes of an object."""
    if isinstance(value, FunctionType):
        if not is_users(value):
            return [vars(value).get("__wrapped__")]  # by opt/overrides.py
        named = map(value.__globals__.get, names_of(value.__code__)[0])
        called = (*named, *map(value_of_cell, value.__closure__ or ()))
        return [each for each in called if isinstance(each, (FunctionType, MethodType))]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, type):
        return [each for kind in filter(is_users, value.__mro__) for each in vars(kind).values()]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, (classmethod, staticmethod)):
        return [value.__func__]
    is_followed = isinstance(value, (Optimizer, DecayScheduler)) or (
        is_users(type(value)) and not isinstance(value, Layer)
    )
    return [type(value), *nodes(list(getattr(value, "__dict__", {}).values()))] if is_followed else []
