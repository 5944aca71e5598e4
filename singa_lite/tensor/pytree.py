# SPDX-License-Identifier: Apache-2.0
"""Nested lists, tuples, dicts and dataclasses with Tensors as leaves (JAX and PyTorch call them pytrees)."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np

from .core import Tensor

PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, np.generic, np.dtype, type, range)


class OpaqueLeafError(Exception):
    """A pytree holds an object of a type whose changes cannot be detected."""


def leaves(value: Any, kind: Any = Tensor) -> list[Any]:  # Any: a class or several, and their objects
    """Return all leaves of a pytree that are of a ``kind``, in order; others are passed over."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif _is_dataclass(value):
        value = [item for _, item in _fields(value)]
    elif type(value) not in (list, tuple) and not _is_namedtuple(value):
        return []
    return [leaf for item in value for leaf in leaves(item, kind)]


def flatten(
    value: object, describe: Callable[[object], Hashable] | None = None
) -> tuple[Hashable, list[Tensor]]:
    """Take a pytree apart.

    Args:
        value: the pytree. Its other leaves are plain values: numbers, text, None, enums, types, functions without a
            closure, and objects whose class has ``is_static = True``, which count as equal where they are the same.
        describe: called with any other object, returns what represents it; None raises.

    Returns:
        (structure, Tensors): two pytrees with equal structures differ in the values of their Tensors alone; shapes,
        dtypes, devices, flags and whether an operator made them are part of it.

    Raises:
        OpaqueLeafError: another object, without ``describe``; the text is its type's name.
    """
    found: list[Tensor] = []
    return _walk(value, found, describe or _raise), found


def rebuild(value: Any, tensors: Iterator[Any]) -> Any:
    """Return the pytree ``value`` with the next of ``tensors`` for each of its Tensors; nothing else is copied."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        new = copy.copy(value)  # of the same class
        for key, item in value.items():
            new[key] = rebuild(item, tensors)
        return new
    if _is_namedtuple(value):
        return type(value)(*(rebuild(item, tensors) for item in value))
    if type(value) in (list, tuple):
        return type(value)(rebuild(item, tensors) for item in value)
    if _is_dataclass(value):
        return dataclasses.replace(value, **{name: rebuild(item, tensors) for name, item in _fields(value)})
    return value


def _walk(value: Any, found: list[Tensor], describe: Callable[[object], Hashable]) -> Hashable:
    if isinstance(value, Tensor):
        found.append(value)
        array, flags = value.array, (value.requires_grad, value.stores_grad, value.creator is None)
        return Tensor, array.shape, array.dtype.str, id(value.device), flags
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, dict):
        return type(value), tuple([(_key(key), _walk(item, found, describe)) for key, item in value.items()])
    if type(value) in (list, tuple) or _is_namedtuple(value):
        return type(value), tuple([_walk(item, found, describe) for item in value])
    if _is_dataclass(value):
        return type(value), tuple((name, _walk(item, found, describe)) for name, item in _fields(value))
    is_function = isinstance(value, (types.FunctionType, types.BuiltinFunctionType))
    if (is_function and not getattr(value, "__closure__", None)) or getattr(type(value), "is_static", False):
        return type(value), value
    return describe(value)


def _key(key: Hashable) -> Hashable:
    """A key of a dict, for comparisons: Tensors compare element by element."""
    return (Tensor, id(key)) if isinstance(key, Tensor) else (type(key), key)


def _raise(value: object) -> Hashable:
    raise OpaqueLeafError(type(value).__name__)


def _is_namedtuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_dataclass(value: object) -> bool:
    """Whether it is a dataclass object that ``dataclasses.replace`` can make again."""
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and all(field.init for field in dataclasses.fields(value))
        and not getattr(type(value), "is_static", False)
    )


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
