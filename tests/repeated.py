# SPDX-License-Identifier: Apache-2.0
"""Tests that another one repeats: with three ranks, the fewest with which most mistakes of ranks show, or over shm.

A world is a number of ranks, or a job of a key-value store: (transport, workers, servers).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import pytest


def repeated(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield those for which the same test with the same other parameters runs in the world that stands for theirs."""
    worlds = [(item, *world_of(item)) for item in items]
    known = {(test, world) for _, test, world in worlds}
    for item, test, world in worlds:
        if (other := stands_for(world)) != world and (test, other) in known:
            yield item


def stands_for(world: Any) -> Any:
    """The world in which a test is run each time, rather than in ``world``; itself where none stands for it."""
    if not isinstance(world, tuple):
        return 3 if world in (2, 4) else world
    transport, workers, servers = world
    is_smaller = transport == "mpi" or (workers, servers) == (2, 1)
    return ("shm", 3, 2 if servers else 0) if is_smaller else world


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
