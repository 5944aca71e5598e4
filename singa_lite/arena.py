# SPDX-License-Identifier: Apache-2.0
"""Where buffers with known lifetimes go in one arena: a pure plan, no memory is touched."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclass(frozen=True)
class Lifetime:
    """One buffer.

    Attributes:
        num_bytes: its size, >= 0.
        first: number of the call that writes it first.
        last: number of the last call that reads or writes it, >= first.
    """

    num_bytes: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        """Whether both are alive during some call."""
        return self.first <= other.last and other.first <= self.last


def plan_offsets(lifetimes: list[Lifetime]) -> tuple[list[int], int]:
    """Give every buffer an offset so that no two share a byte while both are alive.

    The largest goes first, each into the lowest gap that holds it.

    Returns:
        (offset of each, in bytes, multiples of ALIGNMENT; bytes of the arena).
    """
    offsets = [0] * len(lifetimes)
    placed: list[tuple[int, int, Lifetime]] = []  # (offset, end, lifetime), by offset
    for index in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].num_bytes, i)):
        lifetime = lifetimes[index]
        size = -(-lifetime.num_bytes // ALIGNMENT) * ALIGNMENT
        offset = 0
        for start, end, other in placed:
            if not other.overlaps(lifetime):
                continue
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets[index] = offset
        placed.append((offset, offset + size, lifetime))
        placed.sort(key=lambda entry: entry[0])
    return offsets, max((end for _, end, _ in placed), default=0)
