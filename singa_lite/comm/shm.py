# SPDX-License-Identifier: Apache-2.0
"""Collectives among the processes of one host over shared memory: no MPI, no port, Linux only.

What lives here: numpy arrays, groups, the lifetime of arrays in flight. What does not: moving data, noticing
dead peers and everything that waits, which is native (native/comm/engine.h).
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from typing import Any

from .. import _native
from ..error_stream import sendable
from ..errors import CommError
from .base import HAS_BLOCKS, TIMEOUT_S, Communicator, Operation, World
from .call_site import CallSites
from .codes import DTYPE_CODES, KIND_CODES, OP_CODES, WIRE_CODES
from .flight_recorder import EngineRecorder, is_recording, title_of
from .lost_ranks import forget_members, has_living_parent, lost_rank
from .work import Array, Times, Work

SHM = "/dev/shm"
LEAST_MB = 1.1  # of a world of two ranks


def _lack_of(folder: str) -> str:
    """Return why two ranks cannot share memory in ``folder``, as "no: why"; "" if they can."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no: {folder} {'cannot be written' if os.path.isdir(folder) else 'is not there'}"
    space = os.statvfs(folder)
    free_mb = space.f_bavail * space.f_frsize / 1e6
    return "" if free_mb >= LEAST_MB else f"no: {folder} has {free_mb:.1f} MB free, of {LEAST_MB} MB needed"


def load_native() -> Any:
    """Return the compiled module of shared memory; CommError where there is none."""
    if sys.platform != "linux":
        raise CommError(f"connect: transport shm works on Linux only, not on {sys.platform}; use MPI there")
    native, reason = _native.load("_comm")
    if native is None:
        raise CommError(f"shm: the native module is missing ({reason}); use mpi or a single process")
    return native


class ShmWork(Work):
    """A collective of a ShmCommunicator in flight."""

    def __init__(self, communicator: ShmCommunicator, operation: Operation, op: Any) -> None:  # native
        self._communicator, self._engine = communicator, communicator._engine
        self._operation, self._op = operation, op

    def _wait(self, timeout_s: float | None) -> None:
        limit_s = -1.0 if timeout_s is None else timeout_s
        since_s = self._engine.wait(self._op, limit_s, 0.0)
        if since_s:  # a tenth of the time-out is over
            self._communicator._warn(self._operation, self._op, time.monotonic() - since_s)
            self._engine.wait(self._op, limit_s, since_s)

    def _is_done(self) -> bool:
        return bool(self._engine.is_done(self._op))

    def _times(self) -> Times | None:
        return Times(*self._op.times) if self._op.has_succeeded else None

    def _is_asked_to_stop(self) -> bool:
        return bool(self._op.is_asked_to_stop)


class ShmCommunicator(Communicator):
    """Ranks of one host over /dev/shm/singa_lite-<rendezvous_id>: 0.5 MB a rank, at most 32 MB, and 20 KB for calls.

    The file is readable by this user only, really allocated, and gone from /dev/shm once all ranks have
    attached. A peer's death is noticed by the lock it held. After the first CommError the communicator
    stays broken. Not usable in a forked child: make the world there.

    Args:
        world: this process's ranks; ``world.rendezvous_id`` must be equal on all ranks and new for every world.
        timeout_s: seconds the constructor waits for all ranks, and a collective for its peers.

    Raises:
        CommError: not on Linux or not compiled, /dev/shm full, ranks missing, sizes or ranks in conflict.
    """

    transport = "shm"

    @classmethod
    def describe(cls) -> str:
        if sys.platform != "linux":
            return "no: it needs Linux; use mpi"
        native, reason = _native.load("_comm")
        return (_lack_of(SHM) or "works: processes of this host") if native else f"no: {reason}"

    def __init__(self, world: World, timeout_s: float = TIMEOUT_S) -> None:
        is_complete = False
        try:
            self._open(world, timeout_s)
            self._engine.wait_for_all(self._lost_rank)
            is_complete = True
        finally:  # a rank that comes after a failure needs the list to notice it; the parent removes it when it ends
            if is_complete or not has_living_parent():
                forget_members(world.rendezvous_id)

    def _open(self, world: World, timeout_s: float, name: str = "", world_id: str = "") -> None:
        """First half of construction: create the segment (rank 0) or attach to it.

        ``name`` and ``world_id`` are a group's own and its world's, for reports.
        """
        super().__init__(world, timeout_s)
        self._engine = load_native().Engine(
            world.rendezvous_id, world.rank, world.size, self.timeout_s, self._lost_rank
        )
        if world.members:
            self._engine.name_ranks(list(world.members))
        self._sites: CallSites | None = None
        if is_recording():
            self._engine.record(title_of(world.members, name))
            self.flight_recorder = EngineRecorder(self._engine, world_id or world.rendezvous_id)
            self._sites = self.flight_recorder.sites
        # Runs when this object goes or the interpreter exits, whichever is first; close() is idempotent.
        self._finalizer = weakref.finalize(self, self._engine.close)

    def abort(self, reason: str) -> None:
        self._engine.abort(sendable(reason))
        self.close()

    def close(self) -> None:
        self._engine.close()

    def _start(self, operation: Operation, array: Array, out: Array, scale: Array | None) -> ShmWork:
        kind, name, op, root, wire_dtype = operation
        count = array.size // self.size if kind in HAS_BLOCKS else array.size
        dtype = DTYPE_CODES[array.dtype]
        wire = dtype if wire_dtype is None else WIRE_CODES[wire_dtype]
        factor, asks = 1.0 if scale is None else float(scale[0]), self.stop_requests.is_sent
        file, line = "", 0
        if self._sites is not None:
            file, line = self._sites.known.get((kind, name)) or self._sites.find(kind, name)
        native = self._engine.start(
            KIND_CODES[kind],
            OP_CODES[op],
            dtype,
            wire,
            root,
            array,
            out,
            count,
            name,
            factor,
            asks,
            file,
            line,
        )
        return ShmWork(self, operation, native)

    def _warn(self, operation: Operation, op: Any, waited_s: float) -> None:
        late = self._engine.late_ranks(op)
        if late and self.flight_recorder is not None:
            rank = self.world.name_of(self.rank)
            self.flight_recorder.warn(operation.kind, op.number, operation.name, rank, late, waited_s)

    def _new_group(self, ranks: list[int], name: str) -> ShmCommunicator | None:
        """Make the segment on the group's first rank, which sends all its name, or why it failed; attach the others."""
        group: ShmCommunicator | None = None
        rendezvous_id, failure = "", ""
        if self.rank == ranks[0]:
            # nobody else knows the name before the file is there, so nobody can take it
            rendezvous_id = f"{self.world.rendezvous_id}-{os.urandom(8).hex()}"
            try:
                group = self._open_group(ranks, name, rendezvous_id)
            except CommError as error:
                failure = str(error)
        gathered = self.all_gather_object([rendezvous_id, failure], name=f"new_group {name}")
        rendezvous_id, failure = gathered[ranks[0]]
        if failure:
            raise CommError(f"new_group {name!r}: {failure}")
        if self.rank in ranks[1:]:
            group = self._open_group(ranks, name, rendezvous_id)
        if group is not None:
            group._engine.wait_for_all(group._lost_rank)
        return group

    def _open_group(self, ranks: list[int], name: str, rendezvous_id: str) -> ShmCommunicator:
        rank, size, recorder = ranks.index(self.rank), len(ranks), self.flight_recorder
        world = World(rank, size, rank, size, rendezvous_id, "shm", self.world.members_of(ranks))
        group = ShmCommunicator.__new__(ShmCommunicator)
        group._open(world, self.timeout_s, name, recorder.world_id if recorder else "")
        return group

    def _lost_rank(self) -> str:
        """Return why the world cannot become complete, or ""; called while this rank waits for that."""
        return lost_rank(self.world.rendezvous_id, self.size)
