# SPDX-License-Identifier: Apache-2.0
"""What a model's step reads in Python outside of its layers' plain attributes, and whether that has changed.

A replay runs no Python, so all of it must be what it was when the step was recorded, and the step must not change it.

Note [variables]: the functions of the user's classes are read, and those that they name: global variables, variables of
closures, class attributes, attributes of modules and objects. Of an object those attributes count that such a function
names. What installed packages and Python's own modules read is not looked at, nor are clocks, files and print.
"""

from __future__ import annotations

import dis
import itertools
import random
import sys
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..tensor.pytree import PLAIN, flatten

LIBRARIES = {*sys.stdlib_module_names, __name__.partition(".")[0], "numpy", "cupy", "mpi4py"}
INSTALLED = ("site-packages", "dist-packages")
MAX_ITEMS = 1000  # of a container; larger ones are compared by identity and length
EMPTY = object()  # what an unset variable holds
CONTAINERS = (
    list, tuple, dict, set, frozenset, deque, np.ndarray, np.random.Generator, np.random.RandomState, random.Random,
    itertools.count, partial, MethodType,
)  # fmt: skip
UNCHANGING = (*PLAIN, FunctionType, BuiltinFunctionType, ModuleType)


Location = tuple[
    str, "Mapping[str, Any] | SlotsOf | CellType", str
]  # label for people, what holds a variable, its name


class Variable(NamedTuple):
    """A variable at one moment.

    Attributes:
        label: for people.
        namespace: what holds it by name, or a closure's cell.
        value: what it held.
        content: what a container or an object held; None for what cannot change.
    """

    label: str
    namespace: Mapping[str, Any] | SlotsOf | CellType
    name: str
    value: object
    content: Hashable


class Variables:
    """What the step of a model reads, see Note [variables], as it is now.

    Args:
        layers: of the model.
        attributes: those that are neither Tensors nor plain values: label for people, name, value.
    """

    def __init__(self, layers: Iterable[object], attributes: Iterable[tuple[str, str, object]]) -> None:
        self._layers = {id(layer) for layer in layers}
        self._random = _random_states()
        self._names: set[str] = set()  # that functions use of objects
        self._seen: set[int] = set()
        self._found: list[Location] = []
        held = list(attributes)
        for value in (*(type(layer) for layer in layers), *(value for _, _, value in held)):
            self._follow(value)
        self._found += [
            (label, {name: value}, name) for label, name, value in held if name.lstrip("_") in self._names
        ]
        expanded = set(self._layers)
        for label, namespace, name in self._found:  # which grows
            value = _held(namespace, name)
            if _is_object(value) and id(value) not in expanded:
                expanded.add(id(value))
                self._found += self._attributes(label, value)
        self._variables = [
            Variable(*found, value := _held(*found[1:]), self._content(value)) for found in self._found
        ]

    def changed_by_step(self) -> str | None:
        """Return the label of what is not as it was before the step, random states of the process included."""
        for (name, before), now in zip(self._random.items(), _random_states().values(), strict=True):
            if before != now:
                return f"the random state of {name}"
        return self.changed()

    def changed(self) -> str | None:
        """Return the label of a variable that is not as it was, or None."""
        for label, namespace, name, value, content in self._variables:
            now = _held(namespace, name)
            if (now is not value and not _are_equal_plain(now, value)) or (
                content is not None and self._content(now) != content
            ):
                return label
        return None

    def iterator(self) -> str | None:
        """Return the label of a variable that holds an iterator, whose position cannot be compared, or None."""
        return next((v.label for v in self._variables if _is_opaque_iterator(v.value)), None)

    # ---- which variables there are -------------------------------------------------------------------

    def _follow(self, value: Any) -> None:
        """Find what functions read that ``value`` is, holds, or has as methods."""
        if (isinstance(value, PLAIN) and not isinstance(value, type)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            if _is_users(value):
                self._follow_function(value)
            self._follow(getattr(value, "__wrapped__", None))
        elif isinstance(value, type):
            if not hasattr(value, "is_recordable"):  # an optimizer, which the recorder itself looks after
                for kind in filter(_is_users, value.__mro__):
                    self._follow_class(kind)
        elif isinstance(value, (list, tuple, set, frozenset, dict)):
            if len(value) <= MAX_ITEMS:
                for item in value.values() if isinstance(value, dict) else value:
                    self._follow(item)
        elif isinstance(value, (partial, MethodType, property, classmethod, staticmethod)):
            parts = ("func", "args", "keywords", "__func__", "__self__", "fget", "__wrapped__")
            for part in parts:
                self._follow(getattr(value, part, None))
        elif not isinstance(value, ModuleType):
            self._follow(getattr(value, "__wrapped__", None))
            self._follow(type(value))

    def _follow_class(self, kind: type) -> None:
        for name, value in vars(kind).items():
            if name != "__init__":
                self._follow(value)
            if not name.startswith("__"):
                self._found.append((f"{kind.__name__}.{name}", vars(kind), name))

    def _follow_function(self, function: FunctionType) -> None:
        names, attributes = _names_of(function.__code__)
        self._names |= attributes
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            self._found.append((f"the global variable {name}", function.__globals__, name))
            self._follow(value)
            if isinstance(value, ModuleType) and _is_users(value):
                for attribute in sorted(attributes & vars(value).keys()):
                    self._found.append((f"the variable {name}.{attribute}", vars(value), attribute))
                    self._follow(vars(value)[attribute])
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._found.append((f"the variable {name} outside of {function.__name__}", cell, name))
            self._follow(_held(cell, name))

    # ---- what they hold ------------------------------------------------------------------------------

    def _content(self, value: object) -> Hashable:
        """Return what tells a changed container from an unchanged one; None for what has no content of its own."""
        return self._describe(value, ()) if isinstance(value, CONTAINERS) else None

    def _describe(self, value: object, within: tuple[int, ...]) -> Hashable:
        if isinstance(value, (list, dict)) and len(value) > MAX_ITEMS:
            return id(value), len(value)
        structure, tensors = flatten(value, lambda other: self._describe_object(other, within))
        return structure, tuple((id(tensor), id(tensor.array)) for tensor in tensors)

    def _describe_object(self, value: Any, within: tuple[int, ...]) -> Hashable:
        if isinstance(value, (set, frozenset)):
            return id(value), frozenset(value)
        if isinstance(value, deque):
            return id(value), self._describe(list(value), within)
        if isinstance(value, np.ndarray) and value.size <= MAX_ITEMS:
            return id(value), value.tobytes()
        if isinstance(value, np.random.Generator):
            return id(value), repr(value.bit_generator.state)
        if isinstance(value, np.random.RandomState):
            return id(value), repr(value.get_state(legacy=False))
        if isinstance(value, random.Random):
            return id(value), value.getstate()
        if isinstance(value, itertools.count):
            return id(value), repr(value)
        if isinstance(value, partial):
            return id(value), self._describe([value.args, value.keywords], within)
        if isinstance(value, MethodType):
            return id(value.__func__), self._describe_object(value.__self__, within)
        if id(value) in self._layers or id(value) in within:
            return id(value)
        entries = self._attributes("", value)
        return id(value), tuple(
            (name, self._describe(_held(namespace, name), (*within, id(value))))
            for _, namespace, name in entries
        )

    def _attributes(self, label: str, value: Any) -> list[Location]:
        """Return where the attributes of an object are that functions name; of another model's layer all of them."""
        held = vars(value) if hasattr(value, "__dict__") else {}
        names = {name for name in self._names if name in held or hasattr(type(value), name)}
        if hasattr(value, "unrecorded_attributes"):
            names |= {name for name in held if not name.startswith("_")} - {*value.unrecorded_attributes}
        slots = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
        return [
            (f"{label}.{name}", SlotsOf(value) if name in slots else held, name) for name in sorted(names)
        ]


class SlotsOf:
    """The attributes in ``__slots__`` of an object, which has no dict of them."""

    def __init__(self, value: object) -> None:
        self._object = value

    def get(self, name: str, default: object) -> object:
        return getattr(self._object, name, default)


def _names_of(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the global variables and the attributes that ``code``, and what is defined in it, names."""
    names, attributes = set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"):
            names.add(str(instruction.argval))
        elif "ATTR" in instruction.opname or instruction.opname == "LOAD_METHOD":
            attributes.add(str(instruction.argval))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner_names, inner_attributes = _names_of(constant)
            names, attributes = names | inner_names, attributes | inner_attributes
        elif isinstance(constant, str):
            attributes.add(constant)  # of getattr
    return names, attributes


def _is_users(value: Any) -> bool:
    """Return whether a function, class or module belongs to no installed package."""
    if isinstance(value, ModuleType):
        name = value.__name__
    elif isinstance(value, FunctionType):  # whose __module__ may be that of a function it wraps
        name = str(value.__globals__.get("__name__"))
    else:
        name = value.__module__ or ""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name.partition(".")[0] not in LIBRARIES and not any(folder in file for folder in INSTALLED)


def _is_opaque_iterator(value: object) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, itertools.count)


def _is_object(value: object) -> bool:
    """Return whether ``value`` is an object that its attributes alone describe."""
    return not isinstance(value, (*UNCHANGING, *CONTAINERS)) and value is not EMPTY


def _held(namespace: Mapping[str, Any] | SlotsOf | CellType, name: str) -> object:
    if not isinstance(namespace, CellType):
        return namespace.get(name, EMPTY)
    try:
        return namespace.cell_contents
    except ValueError:
        return EMPTY


def _are_equal_plain(a: object, b: object) -> bool:
    return isinstance(a, PLAIN) and type(a) is type(b) and bool(a == b)


def _random_states() -> dict[str, Hashable]:
    """Return the states of the generators that Python and numpy share among all code."""
    _, key, position, *_ = np.random.get_state()
    return {"numpy.random": (np.asarray(key).tobytes(), position), "random": random.getstate()}
