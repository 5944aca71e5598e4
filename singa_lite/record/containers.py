# SPDX-License-Identifier: Apache-2.0
"""What each kind of container holds, and values by which a changed one is found.

What lives here: limits and functions for Note [variables] in variables.py. What does not: which containers a step
reads (variables.py).
"""

from __future__ import annotations

import ctypes
import itertools
import random
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from functools import cache, partial
from operator import is_
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any
from weakref import ref

import numpy as np

from ..tensor.pytree import PLAIN

MAX_ITEMS = 1000  # of a container that are looked into; of larger ones their identities are compared
# which takes 0.8 ms for 50,000; beyond, a container is compared by identity and length
MAX_IDENTITIES = 100_000
MAX_BYTES = 1 << 20  # of an array, which takes 0.1 ms; a larger one is compared by identity
CData: Any = ctypes.Structure.__base__  # of all values of ctypes
UNCHANGING = (*PLAIN, FunctionType, ModuleType)
BOUND = (BuiltinFunctionType, MethodWrapperType)  # such as [1].pop, iter([1]).__next__
HOLDERS = (deque, partial, ref, *BOUND)  # whose content is what ``items_of`` gives


@cache
def states() -> dict[type, Callable[[Any], Hashable]]:
    """Return types whose values can change and hold no other objects, and what gives their state."""
    # a function, as numpy imports np.random when it is first named, see Note [imports]
    return {
        np.ndarray: lambda value: (
            value.shape,
            value.dtype,
            value.tobytes() if value.nbytes <= MAX_BYTES else None,
        ),
        **dict.fromkeys((memoryview, CData, bytearray, array), bytes_of),
        np.random.Generator: lambda value: repr(value.bit_generator.state),
        np.random.BitGenerator: lambda value: repr(value.state),
        np.random.SeedSequence: lambda value: repr(value.state),
        np.random.RandomState: lambda value: repr(value.get_state(legacy=False)),
        random.SystemRandom: lambda value: object(),  # each draw is another one, so no two states are equal
        random.Random: random.Random.getstate,
        itertools.count: repr,
    }


@cache
def containers() -> tuple[type, ...]:
    """Return the types whose values can change without being replaced."""
    return (*HOLDERS, list, tuple, dict, set, frozenset, MethodType, MappingProxyType, *states())


class Same:
    """Equal for one object alone, which it keeps, so that no other gets its id.

    Args:
        value: the object.
    """

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class SameItems:
    """Equal for containers that hold the same objects in the same order, which it keeps as ``Same`` does.

    Args:
        items: what a container holds; of a dict its values.
    """

    __slots__ = ("items",)

    def __init__(self, items: Iterable[object]) -> None:
        self.items = tuple(items)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SameItems)
            and len(self.items) == len(other.items)
            and all(map(is_, self.items, other.items))
        )

    def __hash__(self) -> int:
        return len(self.items)


def bound_to(function: Any) -> object:
    """Return the object that a builtin function is bound to; None for one whose state is compared anyway."""
    target = function.__self__
    # whose states Variables compares
    shared = random.random.__self__, np.random.rand.__self__  # type: ignore[attr-defined]
    return None if isinstance(target, ModuleType) or any(target is other for other in shared) else target


def describe_large(value: Any) -> Hashable:
    """Return a value that differs once a large list, dict or deque holds other objects, whatever these hold."""
    items = value.values() if isinstance(value, (dict, MappingProxyType)) else value
    return Same(value), SameItems(items) if len(value) <= MAX_IDENTITIES else len(value)


def bytes_of(value: Any) -> bytes | int | None:
    """Return the bytes of a memoryview or of what gives one; of a large one how many; None of a released one."""
    try:
        view = memoryview(value)
    except ValueError:
        return None
    return view.tobytes() if view.nbytes <= MAX_BYTES else view.nbytes


def items_of(value: Any) -> Iterable[Any]:
    """Return what a container holds; nothing of a large one."""
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, BOUND):
        return () if (target := bound_to(value)) is None else (target,)
    if isinstance(value, np.ndarray) and value.dtype.hasobject and value.size <= MAX_ITEMS:
        return value.ravel().tolist()  # type: ignore[no-any-return]
    if isinstance(value, MappingProxyType):
        return items_of(dict(value))
    if isinstance(value, ref):
        return (value(),)
    if isinstance(value, (list, tuple, set, frozenset, dict, deque)) and len(value) <= MAX_ITEMS:
        return value.values() if isinstance(value, dict) else value
    return ()


def keys_of(value: object) -> list[Any]:
    """Return the keys of a dict and the elements of a set that are objects, whose own attributes may change."""
    if isinstance(value, (dict, set, frozenset)) and len(value) <= MAX_ITEMS:
        return [key for key in value if not isinstance(key, (*UNCHANGING, *containers()))]
    return []
