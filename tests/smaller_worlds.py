# SPDX-License-Identifier: Apache-2.0
"""Tests that another one repeats in a world of three ranks, the smallest in which most mistakes of ranks show."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import pytest

# a world -> the one for which it is left out: ranks, or workers and servers
STAND_FOR: dict[Any, Any] = {2: 3, 4: 3, (2, 1): (3, 2)}


def repeated(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield those that are in STAND_FOR, where the same test with the same other parameters runs in the other world."""
    worlds = [(item, *world_of(item)) for item in items]
    known = {(test, world) for _, test, world in worlds}
    for item, test, world in worlds:
        if world in STAND_FOR and (test, STAND_FOR[world]) in known:
            yield item


def world_of(item: pytest.Item) -> tuple[Hashable, Any]:
    """Return what a test is besides its world, and that; None if it has none."""
    others = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    world = others.pop("size", None)
    for name in ("launch", "job"):  # (transport, workers, servers)
        if isinstance(job := others.get(name), tuple) and len(job) == 3:
            others[name], world = job[0], job[1:]
    if not isinstance(world, (int, tuple)):
        return item.nodeid, None
    return (item.nodeid.partition("[")[0], repr(sorted(others.items()))), world
