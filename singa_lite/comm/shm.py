# SPDX-License-Identifier: Apache-2.0
"""Collectives among the processes of one host over shared memory: no MPI, no port, Linux only.

What lives here: numpy arrays, groups, the lifetime of arrays in flight. What does not: moving data, noticing
dead peers and everything that waits, which is native (native/comm/engine.h tells how).
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np

from .. import _native
from ..errors import CommError
from .base import DTYPES, TIMEOUT_S, Array, Communicator, ReduceOp, Work, World

# The numbers of native/comm/types.h.
_ALL_REDUCE, _REDUCE, _BROADCAST, _ALL_GATHER, _REDUCE_SCATTER = range(5)
_OPS = {"sum": 0, "mean": 1, "max": 2, "min": 3}
_NO_OP = 4
_DTYPES = {dtype: code for code, dtype in enumerate(DTYPES)}
_WIRES = {"float16": 0, "bfloat16": 5}


class ShmWork(Work):
    """A collective of a ShmCommunicator in flight."""

    def __init__(self, communicator: ShmCommunicator, op: Any, result: Array | None) -> None:
        self._communicator = communicator
        self._op = op  # Any: native
        self._result = result

    def wait(self, timeout_s: float | None = None) -> Array | None:
        self._communicator._engine.wait(self._op, -1.0 if timeout_s is None else timeout_s)
        return self._result

    def done(self) -> bool:
        return self._communicator._engine.is_done(self._op)


class ShmCommunicator(Communicator):
    """Ranks of one host, meeting in /dev/shm/singa_lite-<ticket> (0.5 MB a rank, at most 32 MB).

    The file is readable by this user only, really allocated, and gone from /dev/shm once all ranks have
    attached. A peer's death is noticed by the lock it held. After the first CommError the communicator
    stays broken. Not usable in a forked child: make the world there.

    Args:
        world: this process's place; ``world.ticket`` must be equal on all ranks and new for every world.
        timeout_s: seconds the constructor waits for all ranks, and a collective for its peers.

    Raises:
        CommError: not on Linux or not compiled, /dev/shm full, ranks missing, sizes or ranks in conflict.
    """

    def __init__(self, world: World, timeout_s: float = TIMEOUT_S) -> None:
        self._open(world, timeout_s)
        self._engine.wait_for_all()

    def _open(self, world: World, timeout_s: float) -> None:
        """First half of construction: create the segment (rank 0) or attach to it."""
        super().__init__(world, timeout_s)
        native, reason = _native.load("_comm")
        if native is None:
            raise CommError(f"shm: the native module is missing ({reason}); use mpi or a single process")
        self._engine = native.Engine(world.ticket, world.rank, world.size, self.timeout_s)
        # Runs when this object goes or the interpreter exits, whichever is first; close() is idempotent.
        self._finalizer = weakref.finalize(self, self._engine.close)
        self._in_flight: deque[tuple[Any, Array, Array | None]] = (
            deque()
        )  # keeps arrays of dropped works alive
        self._num_groups = 0

    def abort(self, reason: str) -> None:
        self._engine.abort(reason)
        self.close()

    def close(self) -> None:
        self._engine.close()
        self._in_flight.clear()

    def _all_reduce(self, array: Array, op: ReduceOp, wire_dtype: str | None, name: str) -> Work:
        return self._start(_ALL_REDUCE, _OPS[op], array, array, name, wire_dtype=wire_dtype)

    def _reduce(self, array: Array, op: ReduceOp, root: int, name: str) -> Work:
        return self._start(_REDUCE, _OPS[op], array, array, name, root=root)

    def _broadcast(self, array: Array, root: int, name: str) -> Work:
        return self._start(_BROADCAST, _NO_OP, array, array, name, root=root)

    def _all_gather(self, array: Array, name: str) -> Work:
        result = np.empty((self.size, *array.shape), array.dtype)
        return self._start(_ALL_GATHER, _NO_OP, array, result, name, result=result)

    def _reduce_scatter(self, array: Array, op: ReduceOp, name: str) -> Work:
        result = np.empty((array.shape[0] // self.size, *array.shape[1:]), array.dtype)
        return self._start(_REDUCE_SCATTER, _OPS[op], array, result, name, result=result)

    def _start(
        self,
        kind: int,
        op: int,
        array: Array,
        out: Array,
        name: str,
        *,
        wire_dtype: str | None = None,
        root: int = 0,
        result: Array | None = None,
    ) -> ShmWork:
        in_flight = self._in_flight
        while in_flight and in_flight[0][0].has_ended:
            in_flight.popleft()
        count = array.size if kind != _REDUCE_SCATTER else out.size
        dtype = _DTYPES[array.dtype]
        wire = dtype if wire_dtype is None else _WIRES[wire_dtype]
        native = self._engine.start(kind, op, dtype, wire, root, array, out, count, name)
        if not native.has_ended:
            in_flight.append((native, array, out))
        return ShmWork(self, native, result)

    def _new_group(self, ranks: list[int], name: str) -> ShmCommunicator | None:
        """Let the group's first rank make the segment, tell all how it went, let the others follow."""
        self._num_groups += 1
        group: ShmCommunicator | None = None
        failure = ""
        if self.rank in ranks:
            place = ranks.index(self.rank)
            world = World(
                place, len(ranks), place, len(ranks), f"{self.world.ticket}-{self._num_groups}", "shm"
            )
            group = ShmCommunicator.__new__(ShmCommunicator)
            if place == 0:
                failure = group._try_open(world, self.timeout_s)
        failures = self.all_gather_object(failure, name=f"new_group {name}")
        if any(failures):
            raise CommError(f"new_group {name}: {next(filter(None, failures))}")
        if group is not None:
            if place != 0:
                group._open(world, self.timeout_s)
            group._engine.wait_for_all()
        return group

    def _try_open(self, world: World, timeout_s: float) -> str:
        try:
            self._open(world, timeout_s)
        except CommError as error:
            return str(error)
        return ""
