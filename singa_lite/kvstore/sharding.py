# SPDX-License-Identifier: Apache-2.0
"""Which server keeps which elements of a key."""

from __future__ import annotations

from typing import NamedTuple

from .calls import Spec


class Part(NamedTuple):
    """Elements start .. stop-1 of a key, kept by a server."""

    server: int
    start: int
    stop: int


class Sharding:
    """Places keys in the order in which they are made, the same on every worker.

    A key of ``big_array`` elements or more, and as many as servers, is cut into one part for each server, of sizes that
    differ by at most one; another goes whole to the server with the fewest elements so far, of several to the first.

    Args:
        num_servers: >= 1.
        big_array: elements, >= 1.
    """

    def __init__(self, num_servers: int, big_array: int) -> None:
        self._big_array = big_array
        self.loads = [0] * num_servers  # elements on each server

    def place(self, spec: Spec) -> list[Part]:
        """Return the parts of a new key, in the order of its elements."""
        num_servers = len(self.loads)
        if spec.size >= max(self._big_array, num_servers):
            cuts = [round(spec.size * server / num_servers) for server in range(num_servers + 1)]
            parts = [Part(server, cuts[server], cuts[server + 1]) for server in range(num_servers)]
        else:
            parts = [Part(self.loads.index(min(self.loads)), 0, spec.size)]
        for part in parts:
            self.loads[part.server] += part.stop - part.start
        return parts
