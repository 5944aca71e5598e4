# SPDX-License-Identifier: Apache-2.0
"""Which memory was changed in place, and when, among the numbers of recorded calls (``config.state.numbers``).

What lives here: a ``Changes`` for each piece of memory that was ever changed in place, as long as it is there. What
does not: the backward pass that must not read old memory with new values (autograd/changed.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile

from ..config import state
from .memory import Array, View, address_of, root_of

MAX_PARTS = 4096  # of a piece of memory; where more of them have changed, all of it counts as changed
Part = tuple[int, int]  # address of its first byte, and its end


class Changes:
    """The changes of a piece of memory.

    Args:
        root: the array that owns it.

    Attributes:
        key: the root's id.
        name: that of the Tensor by which it was changed last.
        last: number of its last change; 0: none.
    """

    __slots__ = ("_parts", "_root", "key", "last", "name")

    def __init__(self, root: Array) -> None:
        key = id(root)
        self._root = weakref.ref(root, lambda _: state.changes.pop(key, None))
        self.key, self.last = key, 0
        self.name: str | None = None
        self._parts: dict[Part | None, int] = {}  # a part, or None for all of it -> its last change

    def note(self, part: Part | None, number: int) -> None:
        """Note that a part of it, or with None all of it, has changed at ``number``."""
        if len(self._parts) >= MAX_PARTS and part not in self._parts:
            part = None
        self._parts[part] = max(number, self._parts.get(part, 0))
        self.last = max(self.last, number)

    def is_after(self, number: int, array: Array) -> bool:
        """Return whether ``array`` is in this memory and has changed after ``number``."""
        # another array may have the id of one that is gone
        if self.last <= number or self._root() is not root_of(array):
            return False
        first, end = _extent(array)
        return any(
            changed > number and (part is None or (part[0] < end and first < part[1]))
            for part, changed in list(self._parts.items())
        )


class ReplayedChanges:
    """The memory that replays of a record write, which is noted when it is asked for, or at ``end``.

    Args:
        written: what its tape writes; memory without an owner is left out.

    Attributes:
        last: number of the last replay; 0: none.
    """

    def __init__(self, written: Iterable[View]) -> None:
        self.last = 0
        self._parts: dict[tuple[int, Part], Changes] = {}
        for view in written:
            if (owner := view.memory.owner) is not None:
                first = address_of(owner) + view.offset
                self._parts[id(owner), (first, first + view.num_bytes)] = _changes_of(owner)
        state.replayed_changes[id(self)] = self

    def note_replay(self) -> None:
        """Note that all of it changes now."""
        self.last = next(state.numbers)
        if state.noticed_changes:
            self.note()

    def end(self) -> None:
        """Note the last replay, as the record is dropped."""
        self.note()
        del state.replayed_changes[id(self)]

    def note(self) -> None:
        """Note the last replay with each piece of memory."""
        for (_, part), changes in self._parts.items():
            changes.note(part, self.last)
            _notice(changes)


def note_change(array: Array, name: str | None) -> None:
    """Note that ``array``, of a Tensor called ``name``, changes in place now."""
    root = root_of(array)
    changes = _changes_of(root)
    is_all = root is array or root.nbytes == array.nbytes
    changes.note(None if is_all else _extent(array), next(state.numbers))
    changes.name = name
    _notice(changes)


def changed_after(number: int) -> dict[int, Changes]:
    """Return by their keys what has changed after ``number``."""
    for replayed in list(state.replayed_changes.values()):
        if replayed.last > number:
            replayed.note()
    while True:
        try:
            latest = takewhile(lambda changes: changes.last > number, reversed(state.changes.values()))
            return {changes.key: changes for changes in latest}
        except RuntimeError:  # another thread has noted a change meanwhile, or memory was freed
            continue


@contextmanager
def noticed_changes() -> Iterator[dict[int, Changes]]:
    """Inside: a dict that gets all that changes, by its key, by other threads too."""
    noticed: dict[int, Changes] = {}
    state.noticed_changes[id(noticed)] = noticed
    try:
        yield noticed
    finally:
        del state.noticed_changes[id(noticed)]


def _changes_of(root: Array) -> Changes:
    found: Changes | None = state.changes.get(id(root))
    return state.changes.setdefault(id(root), Changes(root)) if found is None else found


def _notice(changes: Changes) -> None:
    """Make ``changes`` the latest, and give it to the backward passes that run."""
    if changes.key in state.changes:
        state.changes.move_to_end(changes.key)
    for noticed in list(state.noticed_changes.values()):
        noticed[changes.key] = changes


def _extent(array: Array) -> Part:
    """Return the part of memory that ``array`` lies in, with what is between its elements."""
    first = address_of(array)
    if array.flags.c_contiguous:
        return first, first + array.nbytes
    reach = [
        stride * (length - 1) for length, stride in zip(array.shape, array.strides, strict=True) if length
    ]
    return (
        first + sum(step for step in reach if step < 0),
        first + sum(step for step in reach if step > 0) + array.itemsize,
    )
