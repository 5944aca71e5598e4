# SPDX-License-Identifier: Apache-2.0
"""Nested lists, tuples, dicts and dataclasses with Tensors as leaves (JAX and PyTorch call them pytrees)."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np

from .core import Tensor

PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, np.generic, np.dtype, type, range)
TOLD_APART = (complex, np.complexfloating, range)  # equal ones may have zeros of other signs, or another stop

BUILTIN = (list, tuple, dict)


class OpaqueLeafError(Exception):
    """A pytree holds an object of a type whose changes cannot be detected."""


def leaves(value: Any, kind: Any = Tensor) -> list[Any]:  # Any: a class or several, and their objects
    """Return all leaves of a pytree that are of a ``kind``, in order; others are passed over."""
    if isinstance(value, kind):
        return [value]
    return [leaf for item in _items(value) for leaf in leaves(item, kind)]


def nodes(value: Any) -> Iterator[Any]:
    """Yield a pytree, what it holds, and so on down to the leaves."""
    yield value
    for item in _items(value):
        yield from nodes(item)


def _items(value: Any) -> Iterable[Any]:
    form = _form_of(value.__class__)
    if form == "dict":
        return value.values()  # type: ignore[no-any-return]
    if form == "dataclass":
        return [item for _, item in _fields(value)]
    return value if form in ("sequence", "namedtuple") else ()


def flatten(
    value: object,
    describe: Callable[[object], Hashable] | None = None,
    takes_results: bool = False,
    containers: list[Any] | None = None,
) -> tuple[Hashable, list[Tensor]]:
    """Take a pytree apart.

    Args:
        value: the pytree. Its other leaves are plain values: numbers, text, None, enums, types, functions without a
            closure and bound to no object, and objects whose class has ``is_static = True``, which count as equal where
            they are the same.
        describe: called with any other object, or a dict or dataclass with attributes beside its items or fields,
            returns what represents it; None raises.
        takes_results: whether results of recorded steps count as leaves of the autograd graph.
        containers: gets the lists, dicts and dataclasses that are taken apart, each before its items, unless None.

    Returns:
        (structure, Tensors): two pytrees with equal structures differ in the values of their Tensors alone; shapes,
        dtypes, devices, flags and whether an operator made them are part of it.

    Raises:
        OpaqueLeafError: another object, without ``describe``; the text is its type's name.
    """
    found: list[Tensor] = []
    return _walk(value, found, describe or _raise, takes_results, containers), found


def rebuild(value: Any, tensors: Iterator[Any]) -> Any:
    """Return the pytree ``value`` with the next of ``tensors`` for each of its Tensors; nothing else is copied."""
    if isinstance(value, Tensor):
        return next(tensors)
    return mapped(value, partial(rebuild, tensors=tensors))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a list, tuple, dict or dataclass like ``value`` with ``change(item)`` for each item; else ``value``."""
    form = _form_of(value.__class__)
    if form == "sequence":
        return type(value)(map(change, value))
    if form == "namedtuple":
        return type(value)._make(map(change, value))  # not by a __new__ of its own
    if form in ("dict", "dataclass"):
        new = copy.copy(value)  # of the same class
        for key, item in value.items() if form == "dict" else _fields(value):
            if form == "dict":
                new[key] = change(item)
            else:
                object.__setattr__(new, key, change(item))  # of a frozen one, too
        return new
    return value


def is_container(value: Any) -> bool:
    """Return whether an object is a list, dict or dataclass of a pytree, whose items may be set."""
    return value.__class__ is list or _form_of(value.__class__) in ("dict", "dataclass")


def placed(value: Any, numbers: Iterator[int], containers: list[Any]) -> Any:
    """Return the pytree ``value`` in existing lists, dicts and dataclasses, whose content it replaces.

    Args:
        numbers: for each, in the order of ``flatten``, which of ``containers`` takes its place.
        containers: None stands for a new one, which is put there.
    """
    if not is_container(value):
        return mapped(value, partial(placed, numbers=numbers, containers=containers))
    number = next(numbers)
    new = mapped(value, partial(placed, numbers=numbers, containers=containers))
    old = containers[number]
    if old is None:
        containers[number] = new
        return new
    if isinstance(old, list):
        old[:] = new
    elif isinstance(old, dict):
        old.clear()
        for key, item in new.items():
            old[key] = item
    else:
        for name, item in _fields(new):
            object.__setattr__(old, name, item)  # of a frozen one, too
    return old


def _walk(
    value: Any,
    found: list[Tensor],
    describe: Callable[[object], Hashable],
    takes_results: bool,
    containers: list[Any] | None,
) -> Hashable:
    form = _form_of(value.__class__)
    if form == "tensor":
        found.append(value)
        array, creator = value.array, value.creator
        flags = (
            value.requires_grad,
            value.stores_grad,
            creator is None or (takes_results and creator.is_replayed),
        )
        return Tensor, array.shape, array.dtype.str, id(value.device), flags
    if form == "plain" or (form == "function" and _is_free(value)):
        # of two zeros the sign, and likewise
        return type(value), (repr(value),) if not value or isinstance(value, TOLD_APART) else value
    if form in ("object", "function") or (value.__class__ not in BUILTIN and _has_more(value, form)):
        return describe(value)
    if containers is not None and (form in ("dict", "dataclass") or value.__class__ is list):
        containers.append(value)
    walk = partial(_walk, found=found, describe=describe, takes_results=takes_results, containers=containers)
    if form == "dict":
        return type(value), (*map(_key, value), *map(walk, value.values()))
    if form == "dataclass":
        return type(value), tuple([(name, walk(item)) for name, item in _fields(value)])
    return type(value), tuple(map(walk, value))


@lru_cache(maxsize=1000)  # a bound for classes that are made again and again
def _form_of(kind: type) -> str:
    """Return how objects of a class are taken apart: as a dataclass if ``dataclasses.replace`` can make them."""
    if issubclass(kind, Tensor):
        return "tensor"
    if issubclass(kind, PLAIN) or getattr(kind, "is_static", False) is True:
        return "plain"
    if issubclass(kind, dict):  # unless setting an item is more than that
        return "dict" if kind.__setitem__ in (dict.__setitem__, OrderedDict.__setitem__) else "object"
    if kind in (list, tuple):
        return "sequence"
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return "namedtuple"
    if dataclasses.is_dataclass(kind) and all(field.init for field in dataclasses.fields(kind)):
        return "dataclass"
    return "function" if issubclass(kind, (types.FunctionType, types.BuiltinFunctionType)) else "object"


def _is_free(function: Any) -> bool:
    """Return whether a function has no closure and is bound to no object, as ``[1].pop`` is."""
    bound_to = getattr(function, "__self__", None)
    return not getattr(function, "__closure__", None) and isinstance(
        bound_to, (type(None), type, types.ModuleType)
    )


def _has_more(value: Any, form: str) -> bool:
    """Return whether an object has attributes beside its items or fields."""
    attributes = getattr(value, "__dict__", {})
    if form == "dataclass":
        return len(attributes) > len(dataclasses.fields(value)) or any(
            name not in value.__dataclass_fields__ for name in attributes
        )
    return bool(attributes)


def _key(key: Hashable) -> Hashable:
    """Return a key of a dict, for comparisons: Tensors compare element by element."""
    return (Tensor, id(key)) if isinstance(key, Tensor) else (type(key), key)


def _raise(value: object) -> Hashable:
    raise OpaqueLeafError(type(value).__name__)


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
