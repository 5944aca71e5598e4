# SPDX-License-Identifier: Apache-2.0
"""Notice reads of attributes that a step sets by Python that runs at every replay: methods of optimizers, schedules.

A replay sets attributes when its tape has ended (Note [attributes] in attributes.py), so such code would read those of
the step before. In a recorded step a read breaks the graph; a first read in a replay is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ..config import this_thread
from ..layer.base import Layer


@contextmanager
def watched(attributes: Iterable[tuple[Any, str]], on_read: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_read(name)`` before this thread reads one of ``attributes``, each a layer and a name.

    At once where reads of a layer cannot be noticed.
    """
    names: dict[int, tuple[Layer, set[str]]] = {}
    for layer, name in attributes:
        names.setdefault(id(layer), (layer, set()))[1].add(name)
    kinds: list[tuple[Layer, Any]] = [(layer, type(layer)) for layer, _ in names.values()]
    before, this_thread.on_read = this_thread.on_read, on_read
    try:
        for layer, kind in kinds:
            found = tuple(sorted(names[id(layer)][1]))
            try:
                object.__setattr__(layer, "__class__", _watching(kind, found))
            except TypeError:  # its metaclass, or what it has in C, lets it have no other class
                for name in found:
                    on_read(name)
        yield
    finally:
        this_thread.on_read = before
        for layer, kind in kinds:
            object.__setattr__(layer, "__class__", kind)


@lru_cache(maxsize=100)
def _watching(kind: type, names: tuple[str, ...]) -> type:
    """Return a class like ``kind`` whose objects report reads of ``names``."""
    like = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made: type = type(kind)(kind.__name__, (kind,), like | {name: _reported(name) for name in names})
    return made


def _reported(name: str) -> property:
    """Return a property over the attribute of this name that an object has."""

    def read(self: Any) -> Any:
        if this_thread.on_read is not None:
            this_thread.on_read(name)
        if name in vars(self):
            return vars(self)[name]
        raise AttributeError(f"{self!r} has no attribute {name!r}")

    return property(
        read,
        lambda self, value: vars(self).__setitem__(name, value),
        lambda self: vars(self).__delitem__(name),
    )
