# SPDX-License-Identifier: Apache-2.0
"""The arguments of a step while it is recorded: copies, and giving what the step does to them back to the caller.

What lives here: copying arguments, finding and repeating changes of them, which of them share memory. What does not:
which calls are alike (records.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import combinations
from operator import is_not
from typing import Any

from ..graph.memory import address_of, root_of
from ..graph.recorder import Recorder
from ..layer.base import Layer
from ..tensor import Tensor
from ..tensor.pytree import is_container, mapped, nodes


class Arguments:
    """Copies of a caller's arguments; an object that is given twice is one object in the copies, too.

    Args:
        given: a pytree.

    Attributes:
        value: the copy, for the step.
        given, tensors: each Tensor of the caller once, and its clone.
        changes_containers: whether the step has set, added or removed items or attributes of others.
    """

    def __init__(self, given: Any) -> None:
        self.changes_containers = False
        self._copies: dict[int, tuple[Any, Any]] = {}  # by the id of what the caller gave: it and its copy
        self.value = self._copy(given)
        pairs = [pair for pair in self._copies.values() if isinstance(pair[0], Tensor)]
        self.given, self.tensors = [tensor for tensor, _ in pairs], [clone for _, clone in pairs]
        self._given_for = {id(copy): given for given, copy in self._copies.values()}
        self._given_for |= {id(clone.array): tensor.array for tensor, clone in pairs}
        self._parts = {key: _parts_of(copy) for key, (_, copy) in self._copies.items()}

    def _copy(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, Tensor):
            copy = value.clone()
            vars(copy).update(vars(value) | {"array": copy.array})
        else:
            copy = mapped(value, self._copy)
        if copy is not value:
            self._copies[id(value)] = value, copy
        return copy

    def write_back(self, recorder: Recorder) -> None:
        """Break the graph if the step has changed an argument, but for values of Tensors, and change the caller's."""
        for key, (given, copy) in self._copies.items():
            parts = _parts_of(copy)
            if len(parts) != len(self._parts[key]) or any(map(is_not, parts, self._parts[key])):
                is_tensor = isinstance(given, Tensor)
                self.changes_containers |= not is_tensor
                what = "an attribute of a Tensor" if is_tensor else f"a {type(given).__name__}"
                recorder.break_graph(f"it changes an argument, {what}, which a replay would not do")
                self._change(given, copy)

    def write_values_back(self, recorder: Recorder) -> None:
        """Break the graph if the step has changed an input in place; after any break, change the caller's, too."""
        if recorder.writes(clone.array for clone in self.tensors):
            recorder.break_graph("it changes an input in place")
        if recorder.break_reason is not None:  # which may be that it read the array of an input
            for tensor, clone in zip(self.given, self.tensors, strict=True):
                values, changed = (each.device.backend.to_numpy(each.array) for each in (tensor, clone))
                if values.tobytes() != changed.tobytes():
                    tensor.copy_data(clone)

    def give_attributes_back(self, layer: Layer, recorder: Recorder) -> None:
        """Break the graph if the step has kept an input in an attribute of a layer, and have it hold the caller's."""
        for name, value in list(vars(layer).items()):
            if name not in layer.unrecorded_attributes and self._has_copies(value):
                recorder.break_graph(f"it keeps an input in {type(layer).__name__}.{name}; keep its clone()")
                vars(layer)[name] = self._as_given(value)

    def _change(self, given: Any, copy: Any) -> None:
        """Change ``given`` to hold what its copy holds."""
        if isinstance(copy, list):
            given[:] = map(self._as_given, copy)
        elif isinstance(copy, dict):
            items = {key: self._as_given(item) for key, item in copy.items()}
            given.clear()
            given.update(items)
        before, now = _attributes_of(given), _attributes_of(copy)
        for name in before.keys() - now.keys():
            object.__delattr__(given, name)
        for name, value in now.items():
            object.__setattr__(given, name, self._as_given(value))  # of a frozen dataclass, too

    def _as_given(self, value: Any) -> Any:
        """Return ``value`` with what the caller gave in the place of its copies."""
        if id(value) in self._given_for:
            return self._given_for[id(value)]
        if not self._has_copies(value):
            return value
        if is_container(value):
            self._change(value, value)
            return value
        return mapped(value, self._as_given)

    def _has_copies(self, value: Any) -> bool:
        """Return whether ``value`` is or holds a copy of what the caller gave."""
        return any(id(node) in self._given_for for node in nodes(value))

    def is_copied(self, value: object) -> bool:
        """Return whether the caller gave ``value``, and the step has a copy of it."""
        return id(value) in self._copies


def _parts_of(value: Any) -> list[Any]:
    """Return all that a container or a Tensor refers to; two such lists hold the same objects if nothing was set."""
    pairs = [*(value.items() if isinstance(value, dict) else ()), *_attributes_of(value).items()]
    return [*(value if isinstance(value, (list, tuple)) else ()), *(part for pair in pairs for part in pair)]


def _attributes_of(value: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    in_slots = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return in_slots | getattr(value, "__dict__", {})


def repeats(tensors: list[Tensor], others: Mapping[int, Any]) -> tuple[tuple[int, ...], bool] | None:
    """Return which Tensors of a call are one object, as numbers, and whether others share memory; None if none do.

    Args:
        others: arrays by their ids, with which none may share memory.
    """
    roots = set[int]()
    for tensor in tensors:  # no comprehension: before Python 3.12 that is one more call at every replay
        array = tensor.array
        roots.add(id(array if array.base is None else root_of(array)))
    if len(roots) == len(tensors) and roots.isdisjoint(others):
        return None
    numbers = aliases(tensors)
    different = [tensors[number].array for number in dict.fromkeys(numbers)]
    has_overlap = not roots.isdisjoint(others) or any(_overlap(a, b) for a, b in combinations(different, 2))
    return tuple(numbers), has_overlap


def aliases(objects: Sequence[object]) -> list[int]:
    """Return for each of ``objects`` the number of the first that is the same one."""
    first: dict[int, int] = {}
    return [first.setdefault(id(each), number) for number, each in enumerate(objects)]


def _overlap(a: Any, b: Any) -> bool:  # Any: arrays
    """Return whether two row-major arrays have bytes in common."""
    return root_of(a) is root_of(b) and (
        address_of(a) < address_of(b) + b.nbytes and address_of(b) < address_of(a) + a.nbytes
    )
