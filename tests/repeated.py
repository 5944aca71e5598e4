# SPDX-License-Identifier: Apache-2.0
"""Which tests repeat another: one of three ranks, the fewest with which most mistakes of ranks show, or one over shm.

A world is a number of ranks, or a job of a key-value store: (transport, workers, servers).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import pytest


def repeated(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield those for which a test that is not slow is the same, with the same other parameters, in another world."""
    worlds = [(item, *world_of(item)) for item in items]
    known = {(test, world) for item, test, world in worlds if not item.get_closest_marker("slow")}
    for item, test, world in worlds:
        if any((test, other) in known for other in stand_ins(world)):
            yield item


def stand_ins(world: Any) -> list[Any]:
    """The worlds in which a test makes it needless to run the same test in ``world`` each time."""
    if not isinstance(world, tuple):
        return [3] if world in (2, 4) else []
    transport, workers, servers = world
    larger = ("shm", 3, 2 if servers else 0)
    if transport == "mpi":
        return [larger, ("shm", workers, servers)]
    return [larger] if (workers, servers) in ((2, 0), (2, 1)) else []


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
