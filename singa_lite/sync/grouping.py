# SPDX-License-Identifier: Apache-2.0
"""How parameters are joined into groups: a pure plan, the same on every rank that sees the same sizes."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Grouping(Generic[Item]):
    """SINGA's rule, online: a large item alone, smaller ones joined in order until their sum exceeds a limit.

    An item of more than ``limit`` elements does not close the group that is being filled, so those beside a
    large parameter are still sent together.

    Args:
        limit: elements, >= 0.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: list[Item] = []
        self._open_size = 0

    def add(self, item: Item, size: int) -> list[Item] | None:
        """Take an item of ``size`` elements; returns the group that is complete now, if any."""
        if size > self._limit:
            return [item]
        self._open.append(item)
        self._open_size += size
        return self.flush() if self._open_size > self._limit else None

    def flush(self) -> list[Item] | None:
        """Return the group being filled, or None if it is empty; starts a new one."""
        group, self._open, self._open_size = self._open, [], 0
        return group or None


def group_all(items: list[Item], sizes: list[int], limit: int) -> list[list[Item]]:
    """Return all groups of a known list, in the order in which ``Grouping`` completes them."""
    grouping: Grouping[Item] = Grouping(limit)
    groups = [grouping.add(item, size) for item, size in zip(items, sizes, strict=True)]
    return [group for group in [*groups, grouping.flush()] if group]


def layout(shapes: Iterable[tuple[int, ...]], alignment: int = 1) -> tuple[list[slice], int]:
    """Return the slice of each array in a flat one, from a multiple of ``alignment`` elements on, and the flat size."""
    spans, end = [], 0
    for size in map(prod, shapes):
        spans.append(slice(end, end + size))
        end += -(-size // alignment) * alignment
    return spans, end
