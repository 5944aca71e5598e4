# SPDX-License-Identifier: Apache-2.0
"""Compare the tape of a record with that of a later run of the step.

What lives here: finding the first node in which they differ. What does not: when steps are compared (record/).

A record whose guards fit must do what the step does. Where they differ, Python that the guards do not see decides which
nodes the step has, and replays since then gave other results than eager steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from types import MethodType
from typing import Any

import numpy as np

from .memory import Array, Memory, View
from .nodes import ClockCall, Collective, Host, Kernel, Node, Scalar, StreamSwitch


@dataclass(frozen=True)
class Tape:
    """The nodes of one run of a step, with Views, and its inputs and outputs: None for an array that no node uses."""

    nodes: Sequence[Node]
    inputs: Sequence[View | None]  # the Tensors in the arguments
    outputs: Sequence[View | None]  # those that the step returned, set as attributes and gave to host nodes
    # results and changed attributes without values of Tensors; None if the graph is broken
    structure: Hashable
    casts_again: bool  # see Recorder


def difference(old: Tape, new: Tape, to_numpy: Callable[[Array], np.ndarray[Any, Any]]) -> str | None:
    """Return a description of the first difference between two tapes; None if they are alike.

    None as well where they cannot be compared: only one of them casts an array twice, as somebody holds it.

    Args:
        old, new: of the record, and of a later call.
        to_numpy: copies an array to the host (``Backend.to_numpy``).
    """
    if old.casts_again != new.casts_again or len(old.inputs) != len(new.inputs):
        return None
    same = SameMemory(old, new, to_numpy)
    for before, now in zip_longest(_compared(old.nodes), _compared(new.nodes)):
        if before is None or now is None or not _are_alike(before, now, same):
            was, what = _text(before), _text(now)
            return f"{what} instead of {was}" if was != what else f"{what} on other arrays or values"
    if new.structure is None:
        return None
    outputs = zip_longest(old.outputs, new.outputs)
    if old.structure == new.structure and all(same.views(*pair, is_read=True) for pair in outputs):
        return None
    return "what gives other results or attributes"


class SameMemory:
    """The mapping between the memory of one tape and that of the other.

    Args:
        old, new: the tapes, of whose inputs two may share memory.
        to_numpy: copies an array to the host (``Backend.to_numpy``).
    """

    def __init__(self, old: Tape, new: Tape, to_numpy: Callable[[Array], np.ndarray[Any, Any]]) -> None:
        self._to_numpy = to_numpy
        pairs = zip(old.inputs, new.inputs, strict=True)
        self._new = {was.memory: now.memory for was, now in pairs if was is not None and now is not None}
        self._old: dict[Memory, Memory] = {}

    def views(self, old: View | None, new: View | None, is_read: bool = False) -> bool:
        """Return whether two Views are of the same part of the same memory.

        Args:
            is_read: the step reads it; what it has not written before has the same values in both.
        """
        if old is None or new is None:
            return old is new
        if (old.offset, old.shape, old.dtype, old.strides) != (new.offset, new.shape, new.dtype, new.strides):
            return False
        if old.memory in self._new:
            return self._new[old.memory] is new.memory
        if new.memory in self._old:
            return False
        self._new[old.memory], self._old[new.memory] = new.memory, old.memory
        return not is_read or self._holds_same(old.memory.owner, new.memory.owner)

    def _holds_same(self, old: Array, new: Array) -> bool:
        """Return whether both are one array that existed before the step, or equal constants created in each run."""
        if old is new or old is None or new is None:
            return old is new
        return self._to_numpy(old).tobytes() == self._to_numpy(new).tobytes()


def _compared(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes without those that measure time or switch streams."""
    return [node for node in nodes if not isinstance(node, (ClockCall, StreamSwitch))]


def _are_alike(old: Node, new: Node, same: SameMemory) -> bool:
    if type(old) is not type(new) or old.name != new.name:
        return False
    if isinstance(old, Kernel) and isinstance(new, Kernel):
        attributes = zip_longest(old.attributes.items(), new.attributes.items(), fillvalue=("", None))
        if not all(a == b and _are_equal(was, now) for (a, was), (b, now) in attributes):
            return False
    if isinstance(old, Host) and isinstance(new, Host) and not _do_the_same(old.function, new.function):
        return False
    calls = [(node.communicator, node.operation) for node in (old, new) if isinstance(node, Collective)]
    if calls and calls[0] != calls[1]:
        return False
    reads, writes = zip_longest(old.inputs, new.inputs), zip_longest(old.outputs, new.outputs)
    return all(same.views(*pair, is_read=True) for pair in reads) and all(
        same.views(*pair) for pair in writes
    )


def _are_equal(old: Any, new: Any) -> bool:
    """Return whether two values of an attribute are equal; for Scalars, whether they read the same number."""
    if isinstance(old, Scalar) and isinstance(new, Scalar):
        return _do_the_same(old.source, new.source)
    return old is new or repr(old) == repr(new)


def _do_the_same(old: Callable[..., Any], new: Callable[..., Any]) -> bool:
    """Return whether two functions have the same code, or are methods of the same object."""
    if isinstance(old, partial) and isinstance(new, partial):
        return old.func == new.func and all(map(_are_equal, old.args, new.args))
    if isinstance(old, MethodType) and isinstance(new, MethodType):
        return old == new
    return getattr(old, "__code__", None) is getattr(new, "__code__", None)


def _text(node: Node | None) -> str:
    if node is None:
        return "nothing"
    if not isinstance(node, Kernel):
        return node.name + (f" {node.operation.name}" if isinstance(node, Collective) else "")
    fixed = {key: value for key, value in node.attributes.items() if not isinstance(value, Scalar)}
    shapes = " ".join(f"{view.dtype}{list(view.shape)}" for view in (*node.inputs, *node.outputs))
    return f"{node.name}({shapes}{''.join(f' {key}={value!r}' for key, value in fixed.items())})"
