# SPDX-License-Identifier: Apache-2.0
"""Collectives over MPI through mpi4py, on one host or many.

What lives here: moving arrays. What does not: the message each collective begins with (mpi_call.py), the job around
the ranks (mpi_job.py), deciding that this is an MPI world (rendezvous.py).

Note [agreement]: MPI hangs, or mixes up bytes, when ranks call different collectives. So each collective begins
with a message from every rank to every other: its call in words, and the data themselves if they are small.
These messages are polled with a deadline, so a rank that is missing, disagrees or has left is known by name.
Only after all agree does a large collective start MPI's blocking calls, in a worker thread: non-blocking ones
make no progress in the background.
Note [sums]: MPI only recommends that a reduction give equal bits on all ranks and in each run, and lets MPI_MAX
drop NaN. So MPI just moves bytes here (all-to-all, then all-gather, 1 MB at a time, which also is faster than
MPICH's own all-reduce above 1 MB) and numpy adds them in rank order: all transports give the same bits.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from .. import _native
from ..error_stream import sendable
from ..errors import CommError
from .base import TIMEOUT_S, Communicator, Operation, ReduceOp, World
from .codes import codes_of
from .combine import combine
from .flight_recorder import WARN_SHARE, FileRecorder, is_recording, title_of
from .host import this_host
from .mpi_call import Call, call_of, clear, difference, message_in, message_of, rows_for
from .mpi_job import check_versions, describe_mpi, is_running, load_mpi, within, workers_of, world_of
from .mpi_pauses import Pauses
from .wire import WIRE_DTYPES, narrow, widen
from .work import Array, FinishedWork, Times, Work

SMALL_BYTES = 8192  # sent with the call's description; above, the worker's 50 us are less than the copies
CHUNK_ELEMENTS = 1 << 18  # stays in cache; 1 MB chunks were fastest of 0.5 to 16 MB for a 16 MB all-reduce
COPY_BYTES = 1 << 30  # a count that every MPI takes (int, at most 2**31 - 1)
LEFT = "left"  # the call of a rank that closes
CLOSED = "has closed its communicator: it ended, or made fewer calls than this rank"
# Of a small collective: called with the data of all ranks in rank order; of a large one: called once all agree
Transfers = tuple[Callable[[list[Array]], None], Callable[[], None]]
Ended = tuple[Times, bool]  # when, and whether a rank asked to stop


class MpiCommunicator(Communicator):
    """Collectives among the ranks of an MPI world.

    Arrays up to ``SMALL_BYTES`` have been exchanged when the call returns, larger ones continue in a thread.
    Bytes are as documented in base.py for large arrays; a small one goes whole to every rank.

    Args:
        world: this process's ranks, from ``mpi_world``.
        timeout_s: seconds a collective waits for its peers.
        comm: mpi4py communicator to own; None: one of the first ``world.size`` processes of COMM_WORLD, the workers.
        name, world_id: a group's own and its world's, for reports.
    """

    # Any below: types of mpi4py, which need not be installed

    transport = "mpi"

    @classmethod
    def describe(cls) -> str:
        return describe_mpi()

    def __init__(
        self, world: World, timeout_s: float = TIMEOUT_S, comm: Any = None, name: str = "", world_id: str = ""
    ) -> None:
        super().__init__(world, timeout_s)
        self._mpi = load_mpi()
        self._process, self._name = os.getpid(), world.name_of(world.rank)
        self._comm = comm or workers_of(self._mpi, world.size, timeout_s)
        if comm is None:
            check_versions(self._comm, timeout_s)
        self._peers = [rank for rank in range(self.size) if rank != self.rank]
        self._rows = rows_for(self.size, SMALL_BYTES)
        self._num_calls = 0
        self._sequence = -1  # number of the call whose messages self._rows holds
        self._queue: queue.SimpleQueue[_Transfer] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        # whether the newest transfer has ended; the transfer itself would keep its result alive
        self._newest_ended = threading.Event()
        self._newest_ended.set()
        self._spare: Array | None = None
        self._leave_requests: list[Any] = []
        self.error: CommError | None = None  # the first failure; every later call repeats it
        self.is_stuck = False  # a peer is late or a transfer did not end, so MPI_Finalize would not either
        self._recorder = self._make_recorder(name, world_id)
        self.flight_recorder = self._recorder

    def _make_recorder(self, name: str, world_id: str) -> FileRecorder | None:
        mine = (this_host(), os.getpid(), os.urandom(8).hex())
        processes = within(self.timeout_s, "connect", lambda: self._comm.allgather(mine))
        native, _ = _native.load("_comm")
        if native is None or not is_recording() or self.size == 1:
            return None
        members = self.world.members or range(self.size)
        title = title_of(self.world.members, name)
        hosts = [(host, pid) for host, pid, _ in processes]
        return FileRecorder(native, self.rank, members, hosts, processes[0][2], title, world_id)

    # ---- collectives -------------------------------------------------------------------------------

    def _start(self, operation: Operation, array: Array, out: Array, scale: Array | None) -> Work:
        flat, result = array.reshape(-1), out.reshape(-1)
        run: Callable[..., Transfers] = getattr(self, f"_{operation.kind}")
        wire = WIRE_DTYPES[operation.wire_dtype] if operation.wire_dtype else array.dtype
        small, large = run(operation, flat, result, wire, scale)
        kind, name, op, root, wire_dtype = operation
        words = f"{op} " * (op is not None) + f"{array.dtype}[{array.size}]"
        words += f" as {wire_dtype}" * bool(wire_dtype) + f" root {root}" * (kind in ("reduce", "broadcast"))
        words += "" if scale is None or scale[0] == 1 else f" scaled by {scale[0]!s}"
        call = call_of(self._name, self._num_calls, kind, name, words)
        self._check_usable(call)
        if self._recorder is not None:
            codes = codes_of(operation, array.dtype)
            self._recorder.start(codes, array.shape, array.size, call.number, kind, name)
        self._num_calls += 1
        return self._collective(call, flat, wire, scale, small, large)

    def _all_reduce(
        self, operation: Operation, flat: Array, out: Array, wire: np.dtype[Any], scale: Array | None
    ) -> Transfers:
        op = operation.op

        def small(rows: list[Array]) -> None:
            out[...] = widen(combine(rows, op), scale)

        def large() -> None:
            for chunk, target in zip(self._chunks(flat), self._chunks(out), strict=True):
                counts = self._counts(chunk.size)
                block = self._reduced_block(narrow(chunk, wire, scale), counts, op)
                whole = target if target.dtype == wire else np.empty(chunk.size, wire)
                if counts[0] == counts[-1]:
                    self._comm.Allgather(_bytes(block), _bytes(whole))
                else:
                    self._comm.Allgatherv(_bytes(block), _blocks(whole, counts))
                if whole is not target:
                    widen(whole, scale, out=target)

        return small, large

    def _reduce(self, operation: Operation, flat: Array, *_: Any) -> Transfers:
        op, root = operation.op, operation.root

        def small(rows: list[Array]) -> None:
            if self.rank == root:
                flat[...] = combine(rows, op)

        def large() -> None:
            for chunk in self._chunks(flat):
                counts = self._counts(chunk.size)
                block = self._reduced_block(chunk, counts, op)
                whole = _blocks(chunk, counts) if self.rank == root else None
                self._comm.Gatherv(_bytes(block), whole, root)

        return small, large

    def _broadcast(self, operation: Operation, flat: Array, *_: Any) -> Transfers:
        root = operation.root

        def small(rows: list[Array]) -> None:
            flat[...] = rows[root]

        return small, lambda: self._copy_from(root, flat)

    def _all_gather(self, operation: Operation, flat: Array, out: Array, *_: Any) -> Transfers:
        rows_out = out.reshape(self.size, flat.size)

        def small(rows: list[Array]) -> None:
            rows_out[...] = np.stack(rows)

        def large() -> None:
            if out.nbytes <= COPY_BYTES:
                self._comm.Allgather(_bytes(flat), _bytes(out))
                return
            rows_out[self.rank] = flat
            for root in range(self.size):
                self._copy_from(root, rows_out[root])

        return small, large

    def _reduce_scatter(self, operation: Operation, flat: Array, out: Array, *_: Any) -> Transfers:
        op = operation.op
        share = slice(self.rank * out.size, (self.rank + 1) * out.size)

        def small(rows: list[Array]) -> None:
            out[...] = combine([row[share] for row in rows], op)

        def large() -> None:
            blocks = flat.reshape(self.size, -1)
            step = CHUNK_ELEMENTS // self.size
            for start in range(0, out.size, step):
                sends = np.ascontiguousarray(blocks[:, start : start + step])
                received = self._scratch(sends.size, sends.dtype).reshape(sends.shape)
                self._comm.Alltoall(_bytes(sends.reshape(-1)), _bytes(received.reshape(-1)))
                out[start : start + step] = combine(list(received), op)

        return small, large

    def _all_to_all(self, operation: Operation, flat: Array, out: Array, *_: Any) -> Transfers:
        block = flat.size // self.size
        share = slice(self.rank * block, (self.rank + 1) * block)

        def small(rows: list[Array]) -> None:
            out[...] = np.concatenate([row[share] for row in rows])

        def large() -> None:
            sends, receives = flat.reshape(self.size, block), out.reshape(self.size, block)
            step = COPY_BYTES // (self.size * flat.itemsize)
            for start in range(0, block, step):
                # copies only where it takes several pieces
                part = np.ascontiguousarray(sends[:, start : start + step])
                received = out if block <= step else np.empty(part.size, part.dtype)
                self._comm.Alltoall(_bytes(part.reshape(-1)), _bytes(received))
                receives[:, start : start + step] = received.reshape(part.shape)

        return small, large

    def _new_group(self, ranks: list[int], name: str) -> MpiCommunicator | None:
        if self.rank not in ranks:
            return None
        group = self._comm.Get_group().Incl(ranks)
        try:
            comm = within(self.timeout_s, f"new_group {name!r}", lambda: self._comm.Create_group(group))
            world = replace(world_of(self._mpi, comm, self.timeout_s), members=self.world.members_of(ranks))
        except self._mpi.Exception as error:
            raise CommError(f"new_group {name!r}: MPI failed: {error}") from error
        recorder = self.flight_recorder
        return MpiCommunicator(world, self.timeout_s, comm, name, recorder.world_id if recorder else "")

    def close(self) -> None:
        self.abort("")

    def abort(self, reason: str) -> None:
        if self._process != os.getpid():
            return  # the messages are the parent's
        if not self._leave_requests and self._peers and is_running(self._mpi):
            message = message_of(self._num_calls, f"{LEFT} {sendable(reason)}".strip(), b"")
            self._leave_requests = [self._comm.Isend(_bytes(message), peer) for peer in self._peers]
        why = f"this rank aborted: {reason}" if reason else "make no collective after close()"
        self.error = self.error or CommError(f"{self!r} is closed; {why}")

    def drain(self, seconds: float) -> None:
        """Take the peers' last messages for at most ``seconds``, so that MPI ends with none in flight."""
        deadline = time.monotonic() + seconds
        while is_running(self._mpi) and time.monotonic() < deadline:
            here = [peer for peer in self._peers if not message_in(self._rows[peer]).text.startswith(LEFT)]
            if not here:
                return
            for peer in here:
                if self._comm.Iprobe(peer):
                    self._comm.Recv(_bytes(self._rows[peer]), peer)
            time.sleep(0.001)

    # ---- one collective ----------------------------------------------------------------------------

    def _collective(
        self,
        call: Call,
        flat: Array,
        wire: np.dtype[Any],
        scale: Array | None,
        small: Callable[[list[Array]], None],
        large: Callable[[], None],
    ) -> Work:
        """Run ``small(rows of all ranks)`` here at once, or agree and run ``large()`` in the worker."""
        is_small = flat.size * wire.itemsize <= SMALL_BYTES
        posted, asks_to_stop = time.perf_counter(), self.stop_requests.is_sent

        def run(timeout_s: float) -> Ended:
            with np.errstate(all="ignore"):  # infinities and NaN are sent as they are
                sends = narrow(flat, wire, scale) if is_small else flat[:0]
                rows, is_asked = self._exchange(call, sends.tobytes(), asks_to_stop, timeout_s)
                all_there = time.perf_counter()
                if self._recorder is not None:
                    self._recorder.all_there(call.number)
                if is_small:
                    small([np.frombuffer(row, wire) for row in rows])
                else:
                    large()
            return Times(posted, all_there, time.perf_counter()), is_asked

        if is_small and self._newest_ended.is_set():
            return FinishedWork(*self._guarded(call, lambda: run(self.timeout_s)))
        if self._worker is None:
            self._worker = self._start_worker(call)
        # without a deadline in the worker: wait() has one, and fails the communicator when it passes
        transfer = _Transfer(self, call, lambda: self._guarded(call, lambda: run(float("inf"))))
        self._newest_ended = transfer.ended
        self._queue.put(transfer)
        return transfer

    def _start_worker(self, call: Call) -> threading.Thread:
        worker = threading.Thread(target=self._work, name="singa_lite mpi", daemon=True)
        try:
            worker.start()
        except RuntimeError as error:
            raise CommError(f"{call.where}: the system gives no thread to send in: {error}") from error
        return worker

    def _check_usable(self, call: Call) -> None:
        """Raise CommError in a forked child, or where the communicator has failed."""
        if self._process != os.getpid():
            raise CommError(
                f"{call.where}: an MPI communicator made before fork() is not usable in the child (process "
                f"{os.getpid()}); make the world after"
            )
        if not is_running(self._mpi):
            raise CommError(
                f"{call.where}: the script has called MPI.Finalize(), after which nothing can be sent; leave it out, "
                "it is called at the end"
            )
        if self.error is not None:
            raise CommError(f"{call.where}: {self.error}")

    def _work(self) -> None:
        while True:
            transfer = self._queue.get()
            transfer.run()
            del transfer  # or its arrays would live until the next collective

    def _guarded(self, call: Call, run: Callable[[], Ended]) -> Ended:
        """Run, and remember the first failure of this communicator."""
        is_good = False
        try:
            if self.error is not None:
                raise self.error
            times = run()
            is_good = True
            return times
        except CommError as error:
            self.error = self.error or error
            raise
        except self._mpi.Exception as error:
            self.is_stuck = True
            self.error = self.error or CommError(f"{self!r}: MPI failed: {error}")
            raise self.error from error
        finally:
            if self._recorder is not None:
                self._recorder.end(call.number, is_good)

    def _exchange(
        self, call: Call, data: bytes, asks_to_stop: bool, timeout_s: float
    ) -> tuple[list[bytes], bool]:
        """Give ``call`` and the rest to every rank, see Note [agreement].

        Returns:
            Their data in rank order, and whether a rank asks to stop.
        """
        start = time.monotonic()
        deadline, warning = start + timeout_s, start + WARN_SHARE * timeout_s
        self._sequence = call.number
        message = message_of(call.number, call.text, data, asks_to_stop)
        clear(self._rows)
        requests = [self._comm.Irecv(_bytes(self._rows[peer]), peer) for peer in self._peers]
        requests += [self._comm.Isend(_bytes(message), peer) for peer in self._peers]
        pauses = Pauses()
        while not self._mpi.Request.Testall(requests):
            if not pauses.pause():
                continue
            if self.error is not None:
                raise self.error
            if (now := time.monotonic()) > deadline:
                raise self.late(call, timeout_s)
            if now > warning:
                warning = float("inf")
                self.warn(call, now - start)
        came = {peer: message_in(self._rows[peer]) for peer in self._peers}
        for peer, theirs in came.items():
            self._check_call(call, peer, theirs.text)
        is_asked = asks_to_stop or any(theirs.asks_to_stop for theirs in came.values())
        return [came[rank].data if rank in came else data for rank in range(self.size)], is_asked

    def _check_call(self, call: Call, peer: int, theirs: str) -> None:
        if theirs.startswith(LEFT):
            reason = theirs.removeprefix(LEFT).strip()
            how = f"aborted: {reason}" if reason else CLOSED
            self._note_own_failure(not reason)
            raise CommError(f"{call.where}: rank {self.world.name_of(peer)} {how}")
        if theirs != call.text:
            self._note_own_failure()
            mine, theirs = difference(call.text, theirs), difference(theirs, call.text)
            raise CommError(
                f"{call.where}: the ranks disagree: rank {self._name} calls {mine}, rank {self.world.name_of(peer)} "
                f"calls {theirs}; all ranks must make the same calls in the same order"
            )

    def late(self, call: Call, timeout_s: float) -> CommError:
        """Return the error of a collective that did not end within ``timeout_s``; the communicator is lost."""
        self.is_stuck = True
        self._note_own_failure(self.error is None)
        missing = ", ".join(map(str, self._missing()))
        who = f"rank {missing}" if missing else "data of ranks that have all called it"
        self.error = self.error or CommError(
            f"{call.where}: waited {timeout_s:g} s for {who}, which is stopped, too slow, or does not make this call"
        )
        return self.error

    def warn(self, call: Call, waited_s: float) -> None:
        """Describe which ranks have not made a call that this one waits for."""
        missing = self._missing()
        if missing and self.flight_recorder is not None:
            self.flight_recorder.warn(call.kind, call.number, call.name, self._name, missing, waited_s)

    def _missing(self) -> list[int]:
        """Return the ranks from which the messages of the newest exchange have not come."""
        missing = [peer for peer in self._peers if message_in(self._rows[peer]).number != self._sequence]
        return [self.world.name_of(peer) for peer in missing]

    def _note_own_failure(self, is_own: bool = True) -> None:
        """Report the failure that follows by the recorder, unless it repeats that of another rank."""
        if is_own and self._recorder is not None:
            self._recorder.has_failed = True

    # ---- moving large arrays -----------------------------------------------------------------------

    def _chunks(self, flat: Array) -> Iterator[Array]:
        """Cut ``flat``, all but the last divisible by the ranks, as MPICH moves equal blocks up to twice as fast."""
        step = CHUNK_ELEMENTS // self.size * self.size
        for start in range(0, flat.size, step):
            yield flat[start : start + step]

    def _counts(self, num_elements: int) -> list[int]:
        """Return how many of ``num_elements`` each rank adds up."""
        return [(num_elements + rank) // self.size for rank in range(self.size)]

    def _reduced_block(self, chunk: Array, counts: list[int], op: ReduceOp | None) -> Array:
        """Send each rank its block of ``chunk``; return this rank's, combined over the ranks."""
        mine = counts[self.rank]
        received = self._scratch(self.size * mine, chunk.dtype).reshape(self.size, mine)
        if counts[0] == counts[-1]:
            self._comm.Alltoall(_bytes(chunk), _bytes(received.reshape(-1)))
        else:
            self._comm.Alltoallv(_blocks(chunk, counts), _blocks(received.reshape(-1), [mine] * self.size))
        return combine(list(received), op)

    def _scratch(self, num_elements: int, dtype: np.dtype[Any]) -> Array:
        """Memory of one chunk, valid until the next call; fresh memory would cost more than the sum."""
        if self._spare is None or self._spare.nbytes < num_elements * dtype.itemsize:
            self._spare = np.empty(num_elements * dtype.itemsize, np.uint8)
        return self._spare[: num_elements * dtype.itemsize].view(dtype)

    def _copy_from(self, root: int, flat: Array) -> None:
        raw = flat.view(np.uint8)
        for start in range(0, raw.size, COPY_BYTES):
            self._comm.Bcast(_bytes(raw[start : start + COPY_BYTES]), root)


class _Transfer(Work):
    """A collective in the worker's queue; ``ended`` is set once it was carried out or has failed."""

    def __init__(self, communicator: MpiCommunicator, call: Call, task: Callable[[], Ended]) -> None:
        self._communicator, self._call = communicator, call
        self._task: Callable[[], Ended] | None = task
        self._known: Times | None = None
        self._is_asked: bool | None = None
        self.ended = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        """Carry the transfer out; called by the worker."""
        assert self._task is not None
        try:
            self._known, self._is_asked = self._task()
        except Exception as error:  # whatever it is, it belongs to the thread that waits
            self._error = error
        self._task = None  # releases the arrays
        self.ended.set()

    def _wait(self, timeout_s: float | None) -> None:
        limit = self._communicator.timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        if not self.ended.wait(min(WARN_SHARE * limit, threading.TIMEOUT_MAX)):
            self._communicator.warn(self._call, time.monotonic() - start)
        if not self.ended.wait(min(max(start + limit - time.monotonic(), 0), threading.TIMEOUT_MAX)):
            raise self._communicator.late(self._call, limit)
        if self._error is not None:
            raise self._error

    def _is_done(self) -> bool:
        return self.ended.is_set()

    def _times(self) -> Times | None:
        return self._known

    def _is_asked_to_stop(self) -> bool | None:
        return self._is_asked


def _bytes(flat: Array) -> list[Any]:
    """mpi4py's buffer of a flat array's bytes (mpi4py knows no float16)."""
    return [flat.view(np.uint8), "B"]


def _blocks(flat: Array, counts: list[int]) -> list[Any]:
    """mpi4py's buffer of a flat array split into blocks of ``counts`` elements."""
    sizes = [count * flat.itemsize for count in counts]
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [flat.view(np.uint8), sizes, starts, "B"]
