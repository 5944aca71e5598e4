# SPDX-License-Identifier: Apache-2.0
"""One arena for the memory that only a step itself needs: pieces that are never in use together share bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .memory import Memory, View, view_of
from .nodes import Node, StreamSwitch

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclass(frozen=True)
class Lifetime:
    """One buffer."""

    num_bytes: int  # >= 0
    first: int  # number of the call that writes it first
    last: int  # of the last call that reads or writes it, >= first


def plan_offsets(lifetimes: list[Lifetime]) -> tuple[list[int], int]:
    """Give every buffer an offset so that no two share a byte while both are alive.

    The largest goes first, each into the lowest gap that holds it.

    Returns:
        (offset of each, in bytes, multiples of ALIGNMENT; bytes of the arena).
    """
    offsets = [0] * len(lifetimes)
    # of those that have an offset, sorted by it; rows: offset, end, first call, last call
    placed = np.empty((4, len(lifetimes)), np.int64)
    order = sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].num_bytes, i))
    for count, index in enumerate(order):
        lifetime = lifetimes[index]
        size = -(-lifetime.num_bytes // ALIGNMENT) * ALIGNMENT
        starts, ends, first, last = placed[:, :count]
        is_beside = (first <= lifetime.last) & (last >= lifetime.first)
        # a gap begins behind all that lies before it
        gaps = np.maximum.accumulate(np.concatenate(([0], ends[is_beside])))
        fits = gaps[:-1] + size <= starts[is_beside]
        offset = int(gaps[fits.argmax()] if fits.any() else gaps[-1])
        offsets[index] = offset
        place = int(np.searchsorted(starts, offset, "right"))
        placed[:, place + 1 : count + 1] = placed[:, place:count].copy()
        placed[:, place] = offset, offset + size, lifetime.first, lifetime.last
    return offsets, int(placed[1].max(initial=0))


def lifetimes_of(nodes: list[Node], inputs: list[Memory]) -> dict[Memory, Lifetime]:
    """Return when each piece of memory without an owner is in use; ``inputs`` are from the start.

    Work on another stream, between two StreamSwitch nodes, runs beside what the tape has before and after it: what it
    uses is in use all the time.
    """
    lifetimes = {memory: Lifetime(memory.num_bytes, -1, -1) for memory in inputs if memory.owner is None}
    is_beside = False
    for number, node in enumerate(nodes):
        is_beside ^= isinstance(node, StreamSwitch)  # they come in pairs
        for view in (*node.inputs, *node.outputs):
            memory = view.memory
            if memory.owner is not None:
                continue
            if is_beside:
                lifetimes[memory] = Lifetime(memory.num_bytes, -1, len(nodes))
            else:
                before = lifetimes.get(memory, Lifetime(memory.num_bytes, number, number))
                lifetimes[memory] = replace(before, last=max(before.last, number))
    return lifetimes


def share_memory(
    nodes: list[Node], inputs: list[Memory], make: Callable[[int], Any]
) -> tuple[Callable[[View], Any], int]:
    """Plan the memory of a tape.

    Args:
        nodes: the tape.
        inputs: memory that is written before the first node.
        make: gives a uint8 array of at least so many bytes.

    Returns:
        (what gives the array of a View: in its owner, or in the arena; bytes of the arena).
    """
    lifetimes = lifetimes_of(nodes, inputs)
    starts, num_bytes = plan_offsets(list(lifetimes.values()))
    offset_of = dict(zip(lifetimes, starts, strict=True))
    arena = make(num_bytes)

    def array_of(view: View) -> Any:
        if view.memory.owner is not None:
            return view_of(view.memory.owner, view)
        return view_of(arena, replace(view, offset=view.offset + offset_of[view.memory]))

    return array_of, num_bytes
