# SPDX-License-Identifier: Apache-2.0
"""Messages between workers and servers over MPI through mpi4py, on one host or many.

What lives here: moving heads and arrays. What does not: the job around the processes (mpi_job.py).

Note [tags]: a message is its head, then its arrays in pieces, with a tag for each kind; MPI keeps the order of one
sender and tag. So heads of any source can be probed for, while the arrays of a message are received where they belong
as soon as that is known: by ``read``, or in memory of this process, see Note [both directions] in native/comm/p2p.h.
Nothing here blocks in MPI, so every wait has a deadline.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import CommError
from .base import TIMEOUT_S
from .job import Job
from .mpi_job import check_versions, is_running, load_mpi, within
from .mpi_pauses import Pauses
from .p2p import Arrival, Messenger, SendWork, new_arrays
from .work import Array

PIECE_BYTES = 64 << 20  # every MPI takes 2**31 - 1; less, as a time-out counts from the last piece
HEADS_AT_ONCE = 100  # taken before this process looks at anything else
HEAD_TAG, ARRAY_TAG, JOIN_TAG = 1, 2, 32766  # the last on COMM_WORLD; 32767 is the largest that every MPI has
MESSAGE, LEFT = b"m", b"l"  # first byte of a head


class MpiSendWork(SendWork):
    """A message of an MpiMessenger on its way."""

    def __init__(self, messenger: MpiMessenger, to: int, requests: deque[Any]) -> None:  # of mpi4py
        self._owning, self._to, self._requests = messenger, to, requests

    def _is_sent_within(self, limit_s: float) -> bool:
        is_sent = self._owning._poll(self._move, limit_s)
        if not is_sent:
            self._owning._late.append(self._requests)
        return is_sent

    def _is_done(self) -> bool:
        self._move()
        return self._has_ended()

    def _has_ended(self) -> bool:
        return not self._requests or bool(self.failure)

    def _move(self) -> tuple[bool, bool]:
        has_moved = self._owning._move(takes_all=True)
        has_moved |= _advance(self._requests)
        if self._requests and self._to in self._owning.left:
            self.failure = self._owning.left[self._to]
            self._owning._lost.append(self)  # MPI may still read its arrays
        return self._has_ended(), has_moved


@dataclass(eq=False)
class _Incoming:
    """A message, or the news that its source has left, while it comes."""

    source: int
    head: bytearray
    head_request: Any
    arrays: list[Array] | None = None  # where its arrays are received
    requests: deque[Any] = field(default_factory=deque)
    is_handed_out: bool = False


class MpiMessenger(Messenger):
    """Processes of an MPI job; messages go over a duplicate of COMM_WORLD.

    Args:
        job: its ranks are those of COMM_WORLD.
        timeout_s: see ``Messenger``.

    Attributes:
        left: why each peer that has left has done so, as soon as that is known.
    """

    # Any in this file: types of mpi4py, which need not be installed

    transport = "mpi"

    def __init__(self, job: Job, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(job, timeout_s)
        self._mpi = load_mpi()
        self.left: dict[int, str] = {}
        self._coming: dict[int, deque[_Incoming]] = {peer: deque() for peer in job.peers}  # heads in flight
        self._arrived: dict[int, deque[_Incoming]] = {peer: deque() for peer in job.peers}  # not handed out
        # no receive of their arrays is posted yet
        self._unposted: dict[int, deque[_Incoming]] = {peer: deque() for peer in job.peers}
        self._next_peer = 0
        self._status = self._mpi.Status()
        self._lost: list[Any] = []  # what MPI may still read or write after an error
        self._late: list[deque[Any]] = []  # requests that did not end in time, and may have since
        self._has_failed = False
        self._last_requests: list[Any] = []
        self._comm = self._join()

    @property
    def is_stuck(self) -> bool:  # type: ignore[override]
        return self._has_failed or any(self._late)

    def _join(self) -> Any:
        """Return the communicator, once all processes of the job are here."""
        world, nothing = self._mpi.COMM_WORLD, bytearray()
        others = [rank for rank in range(self.job.size) if rank != self.job.rank]
        missing = {rank: world.Irecv([nothing, "B"], rank, JOIN_TAG) for rank in others}
        sends = [world.Isend([nothing, "B"], rank, JOIN_TAG) for rank in others]

        def look() -> tuple[bool, bool]:
            here = [rank for rank, request in missing.items() if request.Test()]
            for rank in here:
                del missing[rank]
            return not missing, bool(here)

        if not self._poll(look, self.timeout_s):
            raise CommError(
                f"{self.name}: waited {self.timeout_s:g} s for {self.job.names_of(list(missing))} to make a messenger"
            )
        comm = within(self.timeout_s, "connect", world.Dup)
        self._mpi.Request.Waitall(sends)
        check_versions(comm, self.timeout_s)
        shared = self._mpi.COMM_TYPE_SHARED
        host = within(self.timeout_s, "connect", lambda: comm.Split_type(shared, key=self.job.rank))
        here = host.Get_group().Translate_ranks(None, comm.Get_group())
        self.local_workers = sum(rank < self.job.num_workers for rank in here)
        self.local_servers = len(here) - self.local_workers
        host.Free()
        return comm

    def _send(self, to: int, head: bytes, arrays: list[Array]) -> MpiSendWork:
        requests = deque([self._comm.Isend([MESSAGE + head, "B"], to, HEAD_TAG)])
        requests += [self._comm.Isend(piece, to, ARRAY_TAG) for array in arrays for piece in _pieces(array)]
        work = MpiSendWork(self, to, requests)
        _advance(requests)
        return work

    def _receive(self, limit_s: float) -> Arrival | None:
        for unposted in self._unposted.values():  # what was not read must not hold up its sender
            while unposted and unposted[0].is_handed_out:
                self._post_receives(unposted[0])
        received: list[_Incoming] = []

        def look() -> tuple[bool, bool]:
            has_moved = self._move(takes_all=False)
            received.extend(self._next_arrival())
            return bool(received), has_moved

        if not self._poll(look, limit_s):
            return None
        incoming = received[0]
        incoming.is_handed_out = True
        if incoming.head[:1] == LEFT:
            return Arrival(incoming.source, b"", self.left[incoming.source])
        return Arrival(incoming.source, bytes(incoming.head[1:]), "", incoming)

    def _read(self, arrival: Arrival, into: list[Array], limit_s: float) -> str | None:
        incoming: _Incoming = arrival.handle
        if incoming.arrays is None:
            self._post_receives(incoming, into)

        def look() -> tuple[bool, bool]:
            has_moved = _advance(incoming.requests)
            has_moved |= self._move(takes_all=False)
            return not incoming.requests, has_moved

        is_read = False
        try:
            is_read = self._poll(look, limit_s)
        finally:
            if not is_read:
                self._lost.append((incoming, into))
                self._late.append(incoming.requests)
        if is_read and incoming.arrays is not into:
            for array, own in zip(into, incoming.arrays or [], strict=True):
                array[...] = own
        return "" if is_read else None

    def _check_usable(self) -> None:
        super()._check_usable()
        if not is_running(self._mpi):
            raise CommError(
                f"{self.name}: the script has called MPI.Finalize(), after which nothing can be sent"
            )

    def _leave(self, reason: str) -> None:
        if not is_running(self._mpi):
            return
        head = LEFT + reason.encode(errors="replace")
        self._last_requests = [self._comm.Isend([head, "B"], peer, HEAD_TAG) for peer in self.job.peers]

    def drain(self, seconds: float) -> None:
        """Take what the peers have sent until they have left too, so that MPI ends with nothing in flight."""
        deadline = time.monotonic() + seconds
        while is_running(self._mpi) and time.monotonic() < deadline:
            self._move(takes_all=True)
            self._arrived = {peer: deque() for peer in self.job.peers}
            if len(self.left) == len(self.job.peers) and self._mpi.Request.Testall(self._last_requests):
                return
            time.sleep(0.001)

    # ---- moving ------------------------------------------------------------------------------------

    def _poll(self, look: Callable[[], tuple[bool, bool]], limit_s: float) -> bool:
        """Call ``look`` until it returns that it is done; False if nothing has moved for ``limit_s`` seconds.

        ``look`` returns whether it is done, and whether something has moved.
        """
        moved_s, pauses = time.monotonic(), Pauses()
        while True:
            try:
                is_done, has_moved = look()
            except self._mpi.Exception as error:
                self._has_failed = True
                raise CommError(f"{self.name}: MPI failed: {error}") from error
            if is_done:
                return True
            self._check_usable()  # another thread may have closed it
            if has_moved:
                moved_s, pauses = time.monotonic(), Pauses()
            if time.monotonic() - moved_s >= limit_s:
                return False
            pauses.pause()

    def _move(self, *, takes_all: bool) -> bool:
        """Take the heads that have come; ``takes_all``: have all arrays received."""
        has_moved = False
        for _ in range(HEADS_AT_ONCE):
            found = self._comm.Improbe(self._mpi.ANY_SOURCE, HEAD_TAG, self._status)
            if found is None:
                break
            source, head = self._status.Get_source(), bytearray(self._status.Get_count(self._mpi.BYTE))
            self._coming[source].append(_Incoming(source, head, found.Irecv([head, "B"])))
            has_moved = True
        for source, coming in self._coming.items():
            while coming and coming[0].head_request.Test():
                self._arrive(source, coming.popleft())
                has_moved = True
            if takes_all:
                for incoming in list(self._unposted[source]):
                    self._post_receives(incoming)
        return has_moved

    def _arrive(self, source: int, incoming: _Incoming) -> None:
        self._arrived[source].append(incoming)
        if incoming.head[:1] == LEFT:
            name, reason = self.job.name_of(source), incoming.head[1:].decode(errors="replace")
            self.left[source] = f"{name} aborted: {reason}" if reason else f"{name} has closed its messenger"
        else:
            self._unposted[source].append(incoming)

    def _next_arrival(self) -> list[_Incoming]:
        peers = self.job.peers
        for index in range(self._next_peer, self._next_peer + len(peers)):
            if arrived := self._arrived[peers[index % len(peers)]]:
                self._next_peer = (index + 1) % len(peers)
                return [arrived.popleft()]
        return []

    def _post_receives(self, incoming: _Incoming, into: list[Array] | None = None) -> None:
        """Post the receives of the arrays of ``incoming``, the next message without, into these or into new arrays."""
        first = self._unposted[incoming.source].popleft()
        assert first is incoming, "MPI gives the arrays of a source in the order of its messages"
        incoming.arrays = new_arrays(bytes(incoming.head[1:])) if into is None else into
        pieces = [piece for array in incoming.arrays for piece in _pieces(array)]
        incoming.requests.extend(self._comm.Irecv(piece, incoming.source, ARRAY_TAG) for piece in pieces)


def _pieces(array: Array) -> list[list[Any]]:
    """mpi4py's buffers of an array's bytes (mpi4py knows no float16); none if it is empty."""
    raw = array.reshape(-1).view(np.uint8)
    return [[raw[start : start + PIECE_BYTES], "B"] for start in range(0, raw.size, PIECE_BYTES)]


def _advance(requests: deque[Any]) -> bool:
    """Forget the first requests as far as they have ended; return whether any had."""
    has_moved = False
    while requests and requests[0].Test():
        requests.popleft()
        has_moved = True
    return has_moved
