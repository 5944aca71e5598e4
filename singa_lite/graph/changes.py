# SPDX-License-Identifier: Apache-2.0
"""Which memory was changed in place, and when, among the numbers of recorded calls (``config.state.numbers``).

What lives here: a ``Changes`` for each piece of memory that was ever changed in place, as long as it is there. What
does not: the backward pass that must not read old memory with new values (autograd/changed.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ..config import state
from .memory import Array, address_of, root_of

MAX_PARTS = 64  # of which the changes are kept apart


class Changes:
    """The changes of a piece of memory.

    Args:
        root: the array that owns it.

    Attributes:
        key: the root's id.
        name: that of the Tensor by which it was changed last.
        last: number of its last change; 0: none.
        of_all: number of the last change of all of it.
    """

    __slots__ = ("_parts", "_root", "key", "last", "name", "of_all")

    def __init__(self, root: Array) -> None:
        key = id(root)
        self._root = weakref.ref(root, lambda _: state.changes.pop(key, None))
        self.key, self.last, self.of_all = key, 0, 0
        self.name: str | None = None
        self._parts: dict[tuple[int, int], int] = {}  # first byte and end of a part -> its last change

    def note(self, array: Array, is_whole: bool, name: str | None) -> None:
        """Note that ``array``, in this memory, changes now; ``is_whole``: it is all of it."""
        self.name, self.last = name, next(state.numbers)
        if is_whole or len(self._parts) == MAX_PARTS:
            self.of_all = self.last
            self._parts.clear()
        else:
            first = address_of(array)
            self._parts[first, first + array.nbytes] = self.last

    def is_after(self, number: int, array: Array) -> bool:
        """Return whether ``array`` is in this memory and has changed after ``number``."""
        # another array may have the id of one that is gone
        if self.last <= number or self._root() is not root_of(array):
            return False
        if self.of_all > number:
            return True
        first = address_of(array)
        return any(
            changed > number and start < first + array.nbytes and first < end
            for (start, end), changed in list(self._parts.items())
        )


def changes_of(root: Array) -> Changes:
    """Return the changes of the memory that ``root`` owns."""
    found: Changes | None = state.changes.get(id(root))
    return state.changes.setdefault(id(root), Changes(root)) if found is None else found


def note_change(array: Array, name: str | None) -> None:
    """Note that ``array``, of a Tensor called ``name``, changes in place now."""
    root = root_of(array)
    changes = changes_of(root)
    changes.note(array, root is array or root.nbytes == array.nbytes, name)
    for noticed in state.noticed_changes:
        noticed.append(changes)


def note_replay(written: Iterable[Changes]) -> None:
    """Note that a replay has changed all of the memory that it writes."""
    number = next(state.numbers)
    for changes in written:
        changes.last = changes.of_all = number
    for noticed in state.noticed_changes:
        noticed.extend(written)


def changed_after(number: int) -> dict[int, Changes]:
    """Return by their keys what has changed after ``number``."""
    return {changes.key: changes for changes in list(state.changes.values()) if changes.last > number}


@contextmanager
def noticed_changes() -> Iterator[list[Changes]]:
    """Inside: a list to which all changes are appended, those of other threads too."""
    noticed: list[Changes] = []
    state.noticed_changes = (*state.noticed_changes, noticed)
    try:
        yield noticed
    finally:
        state.noticed_changes = tuple(each for each in state.noticed_changes if each is not noticed)
