# SPDX-License-Identifier: Apache-2.0
"""A world of N ranks in one process that moves nothing: what a rank would receive is what it sends itself.

A training step over it computes all that a rank of N computes (packing, compressing, decompressing, merging N
messages), so that it can be timed without a network.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from ..comm.base import Communicator, Operation, World
from ..comm.work import Array, FinishedWork, Times, Work


class Call(NamedTuple):
    """A collective that was called.

    Attributes:
        name: of its Operation: of a bucket the options, ": ", and the names of its parameters, with ", " between.
        called_s: when, in seconds of ``time.perf_counter``, as all times here.
    """

    name: str
    called_s: float


class LoopbackCommunicator(Communicator):
    """Rank ``world.rank`` of ``world.size`` ranks that all hold what this one holds; no other process is needed.

    What travels in a narrower type (``wire_dtype``) is not rounded: transports do that while they move data.

    Args:
        world: which rank of how many; its transport is not used.

    Attributes:
        calls: all collectives since the list was cleared.
        moved_s: seconds that copying took, which is a transport's work.
        waited_at_s: when a collective was waited for last.
    """

    joins_worlds = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.calls: list[Call] = []
        self.moved_s = 0.0
        self.waited_at_s = time.perf_counter()

    def split_by_host(self, *, name: str = "hosts") -> tuple[Communicator, Communicator | None]:
        """Return a group of this rank and one of all: each rank is the leader of a host of its own."""
        return LoopbackCommunicator(World()), self

    def _start(self, operation: Operation, array: Array, out: Array, scale: Array | None) -> Work:
        start = time.perf_counter()
        self.calls.append(Call(operation.name, start))
        rows = array.shape[0] // self.size if array.ndim else 0
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        match operation.kind:
            case "all_to_all":
                out.reshape(self.size, rows, *array.shape[1:])[...] = array[mine]
            case "reduce_scatter":
                out[...] = array[mine]
            case _ if out is not array:
                out[...] = array
        if operation.op == "sum" and not (operation.kind == "reduce" and operation.root != self.rank):
            out *= self.size
        self.moved_s += time.perf_counter() - start
        return LoopbackWork(self, start)

    def _new_group(self, ranks: list[int], name: str) -> LoopbackCommunicator | None:
        if self.rank not in ranks:
            return None
        rank = ranks.index(self.rank)
        return LoopbackCommunicator(World(rank, len(ranks), rank, len(ranks)))


class LoopbackWork(FinishedWork):
    """A collective of a LoopbackCommunicator; notes when it is waited for."""

    def __init__(self, communicator: LoopbackCommunicator, called_s: float) -> None:
        super().__init__(Times(called_s, called_s, called_s), communicator.stop_requests.is_sent)
        self._communicator = communicator

    def _wait(self, timeout_s: float | None) -> None:
        self._communicator.waited_at_s = time.perf_counter()
