# SPDX-License-Identifier: Apache-2.0
"""A transport in one file, as CONTRIBUTING.md describes: sockets of one host, on which rank 0 sends all to everyone.

test_transports.py puts it into the folder comm/ of a copy of the package.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np

from singa_lite.comm.base import TIMEOUT_S, Communicator, Operation, World
from singa_lite.comm.combine import combine
from singa_lite.comm.wire import WIRE_DTYPES, narrow, widen
from singa_lite.comm.work import Array, Times, Work
from singa_lite.errors import CommError

NUMBER = struct.Struct("<q")
ABORT = b"abort"


class SocketWork(Work):
    """A collective that a thread makes."""

    def __init__(self, future: Future[tuple[Times, bool]], timeout_s: float, where: str) -> None:
        self._future, self._timeout_s, self._where = future, timeout_s, where

    def _wait(self, timeout_s: float | None) -> None:
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            self._future.result(limit)
        except TimeoutError:
            raise CommError(f"{self._where}: waited {limit} s") from None

    def _is_done(self) -> bool:
        return self._future.done()

    def _times(self) -> Times | None:
        return None if self._future.exception() else self._future.result()[0]

    def _is_asked_to_stop(self) -> bool:
        return self._future.result()[1]


class SocketCommunicator(Communicator):
    """Ranks of one host; rank 0 receives what all have sent, and sends everything to all."""

    transport = "sockets"

    @classmethod
    def describe(cls) -> str:
        return "works: for tests"

    def __init__(self, world: World, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(world, timeout_s)
        self._links = join(world, timeout_s)  # of rank 0 to each other rank; of others to rank 0
        self._thread_pool = ThreadPoolExecutor(1)
        self._failure = ""  # the first one, which later calls repeat

    # ---- what a transport writes ---------------------------------------------------------------------

    def _start(self, operation: Operation, array: Array, out: Array, scale: Array | None) -> Work:
        where = f"rank {self.world.name_of(self.rank)}: {operation.kind} {operation.name!r}"
        asks, posted = self.stop_requests.is_sent, time.perf_counter()
        future = self._thread_pool.submit(self._run, where, operation, array, out, scale, asks, posted)
        return SocketWork(future, self.timeout_s, where)

    def _new_group(self, ranks: list[int], name: str) -> SocketCommunicator | None:
        ids = self.all_gather_object(secrets.token_hex(8), name=f"new_group {name}")
        if self.rank not in ranks:
            return None
        rank, size = ranks.index(self.rank), len(ranks)
        members = self.world.members_of(ranks)
        mine = World(rank, size, rank, size, ids[ranks[0]], self.transport, members)
        return SocketCommunicator(mine, self.timeout_s)

    def close(self) -> None:
        super().close()
        links, self._links = self._links, []
        for link in links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # wakes the thread as well
            link.close()

    def abort(self, reason: str) -> None:
        for link in self._links:
            with suppress(OSError):
                send(link, ABORT + reason.encode(errors="replace"))
        self.close()

    # ---- one collective, in the thread ---------------------------------------------------------------

    def _run(
        self,
        where: str,
        operation: Operation,
        array: Array,
        out: Array,
        scale: Array | None,
        asks: bool,
        posted: float,
    ) -> tuple[Times, bool]:
        try:
            if self._failure:
                raise CommError(f"this communicator is broken by an earlier failure: {self._failure}")
            with np.errstate(all="ignore"):  # infinities and NaN are sent as they are
                rows, is_asked = self._exchange(operation, array, scale, asks)
                all_there = time.perf_counter()
                self._finish(operation, rows, out, scale)
        except (CommError, OSError) as error:
            is_late = isinstance(error, TimeoutError)
            why = f"waited {self.timeout_s} s" if is_late else str(error) or "another rank has closed"
            self._failure = self._failure or f"{where}: {why}"
            raise CommError(f"{where}: {why}") from None
        return Times(posted, all_there, time.perf_counter()), is_asked

    def _exchange(
        self, operation: Operation, array: Array, scale: Array | None, asks: bool
    ) -> tuple[list[Array], bool]:
        """Return what every rank has sent, and whether one asks to stop; CommError where calls differ."""
        wire = WIRE_DTYPES[operation.wire_dtype] if operation.wire_dtype else array.dtype
        factor = 1.0 if scale is None else scale[0]
        call = f"{operation} {array.dtype}[{array.size}] scaled by {factor}".encode()
        data = narrow(array.reshape(-1), wire, scale).tobytes()
        mine = bytes([asks]) + NUMBER.pack(len(call)) + call + data
        rows, is_asked = [], False
        for rank, message in enumerate(self._everyones(mine)):
            if message.startswith(ABORT):
                raise CommError(message.decode(errors="replace").replace("abort", "a rank aborted: ", 1))
            end = 9 + NUMBER.unpack(message[1:9])[0]
            if message[9:end] != call:
                raise CommError(
                    f"the ranks disagree: this one calls {call!r}, rank {rank} calls {message[9:end]!r}"
                )
            is_asked |= message[0] == 1
            rows.append(np.frombuffer(message[end:], wire))
        return rows, is_asked

    def _everyones(self, mine: bytes) -> list[bytes]:
        if self.rank:
            send(self._links[0], mine)
            return [receive(self._links[0]) for _ in range(self.size)]
        messages = [mine, *map(receive, self._links)]
        for link in self._links:
            for message in messages:
                send(link, message)
        return messages

    def _finish(self, operation: Operation, rows: list[Array], out: Array, scale: Array | None) -> None:
        kind, _, op, root, _ = operation
        flat, rank = out.reshape(-1), self.rank
        if kind == "all_reduce":
            flat[...] = widen(combine(rows, op), scale)
        elif kind == "reduce" and rank == root:
            flat[...] = combine(rows, op)
        elif kind == "broadcast":
            flat[...] = rows[root]
        elif kind == "all_gather":
            flat[...] = np.concatenate(rows)
        elif kind == "reduce_scatter":
            flat[...] = combine([row.reshape(self.size, -1)[rank] for row in rows], op)
        elif kind == "all_to_all":
            flat[...] = np.concatenate([row.reshape(self.size, -1)[rank] for row in rows])


def join(world: World, timeout_s: float) -> list[socket.socket]:
    """Return the sockets to the other ranks, when all have joined."""
    path, deadline = f"{tempfile.gettempdir()}/{world.rendezvous_id}", time.monotonic() + timeout_s
    links: dict[int, Any] = {}
    if world.rank == 0:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(world.size)
            server.settimeout(timeout_s)
            for _ in range(1, world.size):
                link, _ = server.accept()
                link.settimeout(timeout_s)
                links[NUMBER.unpack(read(link, NUMBER.size))[0]] = link
        os.unlink(path)
        return [links[rank] for rank in sorted(links)]
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(timeout_s)
    while link.connect_ex(path):  # rank 0 is not there yet
        if time.monotonic() > deadline:
            raise CommError(f"connect: rank 0 has not come within {timeout_s} s")
        time.sleep(0.002)
    link.sendall(NUMBER.pack(world.rank))
    return [link]


def send(link: socket.socket, data: bytes) -> None:
    link.sendall(NUMBER.pack(len(data)) + data)


def receive(link: socket.socket) -> bytes:
    return read(link, NUMBER.unpack(read(link, NUMBER.size))[0])


def read(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = link.recv(min(size - len(data), 1 << 20))
        if not part:
            raise CommError("another rank has closed its communicator")
        data += part
    return bytes(data)
