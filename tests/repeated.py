# SPDX-License-Identifier: Apache-2.0
"""Tests that another one repeats: with three ranks, the fewest with which most mistakes of ranks show, or over shm.

A world is a number of ranks, or a job of a key-value store: (transport, workers, servers).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import pytest


def repeated(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield those whose test, with the same other parameters, runs in a world that stands for theirs too."""
    worlds = [(item, *world_of(item)) for item in items]
    known = {(test, world) for _, test, world in worlds}
    for item, test, world in worlds:
        if any((test, other) in known for other in that_stand_for(world)):
            yield item


def that_stand_for(world: Any) -> list[Any]:
    """The worlds each of which makes it enough to run a test there each time, rather than in ``world``."""
    if not isinstance(world, tuple):
        return [3] if world in (2, 4) else []
    transport, workers, servers = world
    larger = [("shm", 3, 2 if servers else 0)] if (workers, servers) in ((2, 0), (2, 1)) else []
    return (
        [*larger, ("shm", workers, servers), ("shm", 3, 0), ("shm", 3, 2)] if transport == "mpi" else larger
    )


def world_of(item: pytest.Item) -> tuple[Hashable, Any]:
    """Return what a test is besides its world, and that; None if it has none."""
    others = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    world = others.pop("size", None)
    if not isinstance(world, int):
        world = None
    for name in ("launch", "job"):
        if isinstance(job := others.get(name), tuple) and len(job) == 3:
            del others[name]
            world = tuple(job)
    if world is None:
        return item.nodeid, None
    return (item.nodeid.partition("[")[0], repr(sorted(others.items()))), world
