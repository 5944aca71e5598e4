# SPDX-License-Identifier: Apache-2.0
"""What a model's step reads in Python outside of its layers' plain attributes, and whether that has changed.

A replay runs no Python, so all of it must be what it was when the step was recorded, and the step must not change it.

Note [variables]: the functions of the user's classes are read, and those that they name: global variables, variables of
closures, code and defaults of functions, attributes of functions, classes, modules and objects. Of an object its class
counts, and those attributes that such a function names (where one names vars, all of a namespace of argparse or types),
at any depth: the functions of the class of what an attribute or a container holds are read too. Of a Tensor those count
that not every Tensor has, and its name; of the user's optimizers and schedules what they add to those of the package. A
container of up to MAX_ITEMS is compared with all that it holds; of a list, dict (its values) or deque of up to
MAX_IDENTITIES whether it holds the same objects; of a larger one the length. Arrays of up to MAX_BYTES are compared by
content, larger ones by identity. What installed packages and Python's own modules read is not looked at, nor are
clocks, files and print, names that only exist at run time (eval, globals(), getattr of a computed name, vars() of other
objects, imports inside functions), attributes that an object got after the step was recorded, and what Python that runs
in replays sets for the rest of the step. Of a class of this package counts what the user has set on it. Functions that
make a generator without a seed, or ask the system for numbers, break the graph.

What lives here: finding the variables and comparing them. What does not: reading one function's code (user_code.py),
and what each kind of container holds (containers.py).
"""

from __future__ import annotations

import io
import random
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property, partial, partialmethod, singledispatchmethod
from itertools import chain, count, repeat
from operator import attrgetter, is_, methodcaller
from types import FunctionType, GenericAlias, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np

from ..graph.recorder import Recorder
from ..layer.base import Layer
from ..opt.base import Optimizer
from ..opt.schedule import DecayScheduler
from ..tensor import Tensor
from ..tensor.pytree import PLAIN, TOLD_APART, flatten, leaves, nodes
from .attributes import Absent, Attribute
from .containers import (
    BOUND,
    HOLDERS,
    MAX_ITEMS,
    UNCHANGING,
    Same,
    containers,
    describe_large,
    items_of,
    keys_of,
    states,
)
from .user_code import (
    PARTS,
    compares_identities,
    defaults_of,
    is_users,
    names_of,
    unseeded_calls,
    value_of_cell,
)

# whose own code, which is Python's, reads their attributes
WRAPPERS = (UserDict, UserList, ChainMap, WeakKeyDictionary, WeakValueDictionary, WeakSet)
DESCRIPTORS = (property, classmethod, staticmethod, cached_property, partialmethod, singledispatchmethod)
NAMESPACES = ("types.SimpleNamespace", "argparse.Namespace")
# attributes of Tensors that are looked at elsewhere; a name is not
OF_ALL_TENSORS = frozenset(
    {"device", "array", "requires_grad", "stores_grad", "creator", "creator_output"}
    | {"_grad", "_has_fresh_grad", "_is_parameter"}
)
MODES = {"_has_mode", "_is_compiled", "_precision"}  # of a Model, by which it chooses what a call does
MAKES_CLASSES = ("__new__", "__init__", "__prepare__")  # of a metaclass
OF_ENUMS = (
    "_member_names_",
    "_member_map_",
    "_value2member_map_",
    "_unhashable_values_",
    "_hashable_values_",
)
LAZY = ("__slotnames__", "__annotations__")  # of a class, what Python adds when it is copied or asked for

# label of a variable, for people; what reads it, or returns Absent
Location = tuple[str, Callable[[], object]]


class Variables:
    """What the step of a model reads, see Note [variables], as it is now.

    Args:
        layers: of the model.
        attributes: of the layers.
        arguments: of the step, pytrees.

    Attributes:
        tensors: those that variables hold, by their ids.
        compares_identities: whether a function asks if two objects are one, or a Tensor is a key of a dict.
    """

    def __init__(
        self, layers: Collection[Layer], attributes: Collection[Attribute], arguments: Iterable[object]
    ) -> None:
        self._layers = {id(layer) for layer in layers}
        self._random = _random_states()
        self._names: set[str] = set()  # that functions use of objects
        self._reads_all = False  # by vars(), or as __dict__
        self._changed: str | None = None  # the label of one that the step has changed
        self._unseeded: dict[str, str] = {}  # calls that draw new numbers, and the functions they are in
        self._seen: set[int] = set()
        # classes of this package, whose own attributes count where the user has set them
        self._kinds = set(map(type, layers))
        self._functions: list[FunctionType] = []  # of the user
        self._globals: set[tuple[int, str]] = set()  # that have a location, by the id of a namespace and name
        self._locations: list[Location] = [
            (f"the class of {type(layer).__name__}", partial(type, layer)) for layer in layers
        ]
        # of each object, by its id: its label, its attributes, and the names of those that it had
        self._names_at_start: dict[int, tuple[str, Mapping[str, Any], frozenset[str]]] = {}
        self._metaclasses: dict[type, None] = {}
        self._iterators: dict[str, None] = {}  # labels of variables that are or hold one
        self.tensors: dict[int, Tensor] = {}
        self.compares_identities = False
        # of attributes, what they hold beside Tensors and plain values
        held = [
            (found, value)
            for found in attributes
            for value in (*found.objects, *leaves(found.value, (FunctionType, DecayScheduler)))
        ]
        held += [(found, key) for found in attributes for each in found.containers for key in keys_of(each)]
        given = chain.from_iterable(map(nodes, [*arguments, *(found.value for found in attributes)]))
        for value in (*map(type, layers), *(value for _, value in held), *given):
            self._follow(value)
        known, nested = -1, list[Location]()
        while known != (known := len(self._names) + len(self._seen) + len(self._locations)):
            nested = [
                _constant(found.label, value)
                for found, value in held
                # the latter by a property
                if not self._names.isdisjoint((found.name, found.name.lstrip("_")))
            ]
            for found in attributes:
                nested += [
                    _constant(found.label, each) for each in found.tensors if self._names_of_tensor(each)
                ]
            self._expand(nested)  # which may name more
            for kind in [*self._metaclasses]:
                self._follow_metaclass(kind)
        self._locations += self._locations_in_package()
        # where each is, what it held, and the content of that
        self._variables = [
            (label, read, value := read(), self._content(value))
            for label, read in (*self._locations, *nested)
        ]
        self._parts = list(map(PARTS, self._functions))

    def finish(self, recorder: Recorder) -> None:
        """Break the graph of a step that has changed a variable, or may have advanced an iterator."""
        now = _random_states()
        drawn = (f"the random state of {name}" for name in now if now[name] != self._random[name])
        self.note_changed()
        changed = next(drawn, None) or self._changed
        if changed is not None:
            recorder.break_graph(f"it changes {changed}", is_lasting=False)
        for name, function in self._unseeded.items():
            recorder.break_graph(
                f"{function} has numbers from {name}, which a replay would not draw; make and seed a generator once, "
                "for an attribute or a global variable"
            )
        for label, held, names in self._names_at_start.values():
            if made := sorted((held.keys() - names) & self._names):
                recorder.break_graph(f"it makes the attribute {label}.{made[0]}", is_lasting=False)
        self._names_at_start.clear()
        for label in self._iterators:  # the position of one cannot be compared
            recorder.break_graph(f"it reads {label}, an iterator, which it may advance")

    def note_changed(self) -> None:
        """Note whether the step has changed a variable so far: it may be set back later."""
        self._changed = self._changed or self.changed()

    def changed(self) -> str | None:
        """Return the label of a variable that is not as it was, or None."""
        for label, read, value, content in self._variables:
            now = read()
            if (now is not value and not _are_equal_plain(now, value)) or (
                content is not None and self._content(now) != content
            ):
                return label
        for function, parts in zip(self._functions, self._parts, strict=True):
            if not all(map(is_, PARTS(function), parts)):
                return f"the code or the defaults of {function.__name__}"
        return None

    # ---- which variables there are -------------------------------------------------------------------

    def _expand(self, nested: list[Location]) -> None:
        """Follow what variables hold, at any depth, and append to ``nested`` where attributes of objects are."""
        expanded = set(self._layers)
        within: list[Location] = []  # what containers hold, which is a part of their content
        for locations in (self._locations, nested, within):
            for label, read in locations:  # which grows
                value = read()
                self._follow(value)
                if isinstance(value, Tensor):
                    self.tensors[id(value)] = value
                if isinstance(value, (Iterator, Coroutine)) and not isinstance(value, (count, io.IOBase)):
                    self._iterators[label] = None
                if _is_fixed(value) or id(value) in expanded:
                    continue
                expanded.add(id(value))
                self._follow_kind(type(value))
                if id(value) not in self._names_at_start:
                    self._names_at_start[id(value)] = label, (held := held_by(value)), frozenset(held)
                if isinstance(value, containers()):
                    if held_by(value) and not isinstance(value, dict):
                        nested += self._attributes(label, value)  # of a subclass
                    within += [_constant(label, item) for item in items_of(value)]
                    for key in keys_of(value):
                        self.compares_identities |= isinstance(key, Tensor)
                        self._follow(key)
                        nested += [_constant(label, key), *self._attributes(label, key)]
                else:
                    (within if locations is within else nested).extend(self._attributes(label, value))

    def _follow(self, value: Any) -> None:
        """Find what functions read that ``value`` is, holds, or has as methods."""
        if id(value) in self._seen:
            return
        if isinstance(value, PLAIN) and not isinstance(value, type):
            if is_users(type(value)):  # an enumeration, a subclass of str
                self._follow(type(value))
            return
        if isinstance(value, GenericAlias):  # list[float], which Python 3.10 takes for a class
            return
        if isinstance(value, type) and (base := self._looked_after(value)) is not None:
            self._follow_added(value, base)
            return
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            if is_users(value):
                self._follow_function(value)
            self._follow(vars(value).get("__wrapped__"))
            if isinstance(registry := getattr(value, "registry", None), MappingProxyType):
                # of functools.singledispatch
                self._locations.append(_constant(f"what {value.__name__} calls by type", registry))
                self._follow(registry)
        elif isinstance(value, type):
            for kind in filter(is_users, value.__mro__):
                self._follow_class(kind)
            if is_users(type(value)):
                self._metaclasses[type(value)] = None
        elif isinstance(value, (attrgetter, methodcaller)):
            given: Any = tuple(value.__reduce__())[1]
            self._names.update(name for text in given if isinstance(text, str) for name in text.split("."))
        elif isinstance(value, containers()):
            self._follow(type(value))  # a subclass of the user
            for item in items_of(value):
                self._follow(item)
        elif isinstance(value, DESCRIPTORS):
            for part in ("fget", "fset", "func", "dispatcher", "__func__", "__wrapped__"):
                self._follow(getattr(value, part, None))
        elif not isinstance(value, ModuleType):
            self._follow(held_by(value).get("__wrapped__"))
            self._follow(type(value))

    def _looked_after(self, kind: type) -> type | None:
        """Return the class whose methods the recorder sees called: of optimizers, of schedules that no step calls."""
        if issubclass(kind, Optimizer):
            return Optimizer
        return DecayScheduler if issubclass(kind, DecayScheduler) and "call" not in self._names else None

    def _follow_added(self, kind: type, base: type) -> None:
        """Follow what the user's classes add to ``base`` and functions name."""
        for each in filter(is_users, kind.__mro__):
            for name in self._names & vars(each).keys() - vars(base).keys():
                if (id(each), name) not in self._globals:
                    self._globals.add((id(each), name))
                    self._add(f"{each.__name__}.{name}", vars(each), name)
                    self._follow(vars(each)[name])

    def _follow_metaclass(self, kind: type) -> None:
        """Follow what functions name of a metaclass, and what Python calls for its classes once they are made."""
        self._follow_added(kind, type)
        for each in filter(is_users, kind.__mro__):
            for name, value in vars(each).items():
                if name.startswith("__") and isinstance(value, FunctionType) and name not in MAKES_CLASSES:
                    self._follow(value)

    def _follow_class(self, kind: type) -> None:
        self._names.update(vars(kind).get("__match_args__", ()))
        for name, value in vars(kind).items():
            if name == "__init__" or (
                issubclass(kind, Enum) and (isinstance(value, kind) or name in OF_ENUMS)
            ):
                continue
            self._follow(value)
            if not name.startswith("__") or isinstance(value, FunctionType):
                self._add(f"{kind.__name__}.{name}", vars(kind), name)
        known = frozenset((*vars(kind), *LAZY))
        self._locations.append((f"the attributes of {kind.__name__}", partial(known.issuperset, vars(kind))))

    def _follow_function(self, function: FunctionType) -> None:
        names, attributes = names_of(function.__code__)
        self._names |= attributes
        self.compares_identities |= compares_identities(function.__code__)
        self._reads_all |= "vars" in names or "__dict__" in attributes
        if function.__name__ != "initialize":
            self._unseeded |= dict.fromkeys(unseeded_calls(function.__code__), function.__qualname__)
        self._functions.append(function)
        for name in sorted(names):
            if (id(function.__globals__), name) not in self._globals:
                self._globals.add((id(function.__globals__), name))
                self._add(f"the global variable {name}", function.__globals__, name)
            self._follow(function.__globals__.get(name))
        for name, value in vars(function).items():
            self._add(f"the variable {function.__name__}.{name}", vars(function), name)
            self._follow(value)
        if defaults := function.__kwdefaults__:
            self._locations.append(_constant(f"the keyword defaults of {function.__name__}", defaults))
        for name, value in defaults_of(function).items():
            if not _is_fixed(value):
                self._locations.append(_constant(f"the default of {name} in {function.__name__}", value))
            self._follow(value)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            read = partial(value_of_cell, cell)
            self._locations.append((f"the variable {name} outside of {function.__name__}", read))
            self._follow(read())

    def _follow_kind(self, kind: type) -> None:
        """Follow what the user has set on a class of this package, and what its properties for settings read."""
        package = str(kind.__module__).partition(".")[0]  # a descriptor on the class of Cython's functions
        if package != __name__.partition(".")[0]:
            return
        self._kinds.add(kind)
        for each in [getattr(kind, name, None) for name in self._names]:
            if isinstance(each, FunctionType) and is_users(each):
                self._follow(each)
            if isinstance(each, property) and each.fset is not None and isinstance(each.fget, FunctionType):
                names, attributes = names_of(each.fget.__code__)
                self._names |= set() if "break_graph" in names else attributes

    def _locations_in_package(self) -> list[Location]:
        """Return where what the user has set on this package's classes may be, where functions name it."""
        found: list[Location] = []
        kinds = {base for kind in self._kinds for base in kind.__mro__ if not is_users(base)}
        for kind in sorted(kinds, key=lambda kind: kind.__qualname__):
            self._names_at_start[id(kind)] = kind.__name__, vars(kind), frozenset(vars(kind))
            for name in sorted(self._names & vars(kind).keys()):
                value = vars(kind)[name]
                if not hasattr(value, "__get__") or (isinstance(value, FunctionType) and is_users(value)):
                    found.append((f"{kind.__name__}.{name}", partial(vars(kind).get, name, Absent)))
        return found

    def _add(self, label: str, namespace: Mapping[str, Any], name: str) -> None:
        self._locations.append((label, partial(namespace.get, name, Absent)))

    # ---- what they hold ------------------------------------------------------------------------------

    def _content(self, value: object) -> Hashable:
        """Return a value that differs once a container or Tensor has changed; None for what cannot change."""
        if isinstance(value, Tensor):
            return Same(value.array), value.requires_grad, value.stores_grad, value.creator is None
        can_change = isinstance(value, containers()) and not (
            isinstance(value, BOUND) and not items_of(value)
        )
        return self._describe(value, set()) if can_change else None

    def _describe(self, value: object, seen: set[int]) -> Hashable:
        if isinstance(value, (list, dict)) and len(value) > MAX_ITEMS:
            return describe_large(value)
        structure, tensors = flatten(value, lambda other: self._describe_object(other, seen))
        return structure, tuple(
            (Same(tensor), Same(tensor.array), self._describe_own(tensor, seen)) for tensor in tensors
        )

    def _describe_own(self, tensor: Tensor, seen: set[int]) -> Hashable:
        """Return the attributes of a Tensor that functions name, but for those that every Tensor has."""
        return tuple(
            (name, self._describe(vars(tensor)[name], seen)) for name in sorted(self._names_of_tensor(tensor))
        )

    def _names_of_tensor(self, tensor: Tensor) -> set[str]:
        return {name for name in vars(tensor).keys() - OF_ALL_TENSORS if name in self._names}

    def _describe_object(self, value: Any, seen: set[int]) -> Hashable:
        if isinstance(value, (set, frozenset)):
            # with their types, as 1, 1.0 and True are equal
            is_large = len(value) > MAX_ITEMS
            return Same(value), frozenset(value if is_large else zip(map(type, value), value, strict=True))
        if isinstance(value, (deque, MappingProxyType)) and len(value) > MAX_ITEMS:
            return describe_large(value)
        if isinstance(value, np.ndarray) and value.dtype.hasobject and value.size <= MAX_ITEMS:
            return Same(value), self._describe(value.tolist(), seen)
        if isinstance(value, MappingProxyType):
            return Same(value), self._describe(dict(value), seen)
        if isinstance(value, HOLDERS):
            return Same(value), self._describe(list(items_of(value)), seen)
        for kind, state_of in states().items():
            if isinstance(value, kind):
                return Same(value), state_of(value)
        if isinstance(value, MethodType):
            return Same(value.__func__), self._describe_object(value.__self__, seen)
        if id(value) in self._layers or id(value) in seen:
            return Same(value)
        seen.add(id(value))
        held = tuple((label, self._describe(read(), seen)) for label, read in self._attributes("", value))
        return Same(value), self._items(value, seen), held

    def _items(self, value: object, seen: set[int]) -> Hashable:
        """Return what an object holds whose class is a subclass of list, tuple or dict, None for other objects."""
        if isinstance(value, (list, tuple, dict)) and len(value) > MAX_ITEMS:
            return describe_large(value)
        # not by an __iter__ of the user's own
        if isinstance(value, list):
            return self._describe(list(list.__iter__(value)), seen)
        if isinstance(value, tuple):
            return self._describe(list(tuple.__iter__(value)), seen)
        return self._describe(dict(dict.items(value)), seen) if isinstance(value, dict) else None

    def _attributes(self, label: str, value: Any) -> list[Location]:
        """Return where the attributes of an object are that functions name; of another model's layer all of them."""
        held = held_by(value)
        names = {name for name in self._names if name in held or hasattr(type(value), name)}
        if isinstance(value, Tensor):
            names = self._names_of_tensor(value)
        is_read_whole = self._reads_all and f"{type(value).__module__}.{type(value).__name__}" in NAMESPACES
        if isinstance(value, Layer):
            names |= {name for name in held if not name.startswith("_")} - {*value.unrecorded_attributes}
            names |= held.keys() & MODES
        elif isinstance(value, WRAPPERS) or type(value).__module__ == "multiprocessing.sharedctypes":
            names |= held.keys() & {"data", "maps", "_obj"}
        elif is_read_whole or (isinstance(value, DecayScheduler) and "call" in self._names):
            names |= held.keys()
        elif isinstance(value, dict) and held is value:
            names.clear()  # they are its items
        found: list[Location] = [(f"the class of {label}", partial(type, value))]
        if is_read_whole:
            found.append((f"the attributes of {label}", partial(" ".join, held)))
        for name in sorted(names):
            is_in_slot = isinstance(getattr(type(value), name, None), MemberDescriptorType)
            read = partial(getattr, value) if is_in_slot else held.get
            found.append((f"{label}.{name}", partial(read, name, Absent)))
        return found


def _constant(label: str, value: object) -> Location:
    """Return the location of an object that nobody replaces."""
    return label, repeat(value).__next__


def _is_fixed(value: object) -> bool:
    """Return whether nothing that ``value`` holds can change, or it is a module of an installed package."""
    return isinstance(value, UNCHANGING) and not (isinstance(value, ModuleType) and is_users(value))


def held_by(value: object) -> Mapping[str, Any]:
    """Return the attributes of an object, without a call of its own ``__getattr__``."""
    try:
        held: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held


def _are_equal_plain(a: object, b: object) -> bool:
    if not isinstance(a, PLAIN) or type(a) is not type(b) or not bool(a == b):
        return False
    may_differ = not a or isinstance(a, TOLD_APART)
    return not may_differ or repr(a) == repr(b)


def _random_states() -> dict[str, Hashable]:
    """Return the states of the generators that Python and numpy share among all code."""
    _, key, position, *_ = np.random.get_state()
    return {"numpy.random": (np.asarray(key).tobytes(), position), "random": random.getstate()}
