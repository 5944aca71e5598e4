# SPDX-License-Identifier: Apache-2.0
"""The contract of messages between the workers and the servers of a job.

What lives here: checks of what is sent, counting, the texts of errors. What does not: moving bytes
(p2p_shm.py, p2p_mpi.py), who is in the job (job.py), what a message means.
"""

from __future__ import annotations

import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..config import this_thread
from ..error_stream import sendable
from ..errors import CommError, DTypeError, OptionError, ShapeError, check_number
from ..graph.clock import Waited
from ..graph.recorder import break_graph
from ..graph.rounded import note_written
from .base import DTYPES, TIMEOUT_S
from .job import Job
from .work import Array, Work

MAX_HEAD_BYTES = 1 << 20  # a header holds names and numbers, one line for each of some thousand parameters


@dataclass
class MessageTraffic:
    """Bytes that a messenger has moved since it was made, and seconds that it waited.

    Attributes:
        bytes_sent: bytes of the arrays of messages that this process has begun to send.
        bytes_received: bytes of the arrays of messages that it has received.
        bytes_heads: bytes of their headers, both ways, with the shapes and dtypes of the arrays.
        wait_s: seconds this process waited in calls.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_heads: int = 0
    wait_s: float = 0.0

    def since(self, before: MessageTraffic) -> MessageTraffic:
        """Return what was moved after ``before``, a copy of this, was."""
        return MessageTraffic(
            self.bytes_sent - before.bytes_sent,
            self.bytes_received - before.bytes_received,
            self.bytes_heads - before.bytes_heads,
            self.wait_s - before.wait_s,
        )


@dataclass(frozen=True)
class Arrival:
    """A message as a transport received it.

    Attributes:
        source: rank of the sender in the job.
        head: the sender's ``Head`` as bytes; b"" if the sender has gone.
        reason: why the sender has gone, else "".
        handle: what the transport needs to read the arrays.
    """

    source: int
    head: bytes
    reason: str = ""
    handle: Any = None  # Any: the transport's own


class Message:
    """A message of another process to this one, or the notice that that process has gone.

    Attributes:
        source: rank of the sender in the job.
        header: what the sender gave, after a round through JSON (tuples are lists); None if the sender has gone.
        dtypes, shapes: of the arrays that came with it, in order.
        num_bytes: of all of them.
        reason: why the sender has gone ("worker 1 (process 4711) died", "worker 1 aborted: ..."), else "".
    """

    def __init__(self, messenger: Messenger, arrival: Arrival) -> None:
        self._messenger, self._arrival = messenger, arrival
        self._is_read = False
        self.source, self.reason = arrival.source, arrival.reason
        content = json.loads(arrival.head) if arrival.head else {"header": None, "arrays": []}
        self.header: Any = content["header"]  # Any: JSON
        self.dtypes = [np.dtype(name) for name, _ in content["arrays"]]
        self.shapes = [tuple(shape) for _, shape in content["arrays"]]
        sizes = zip(self.dtypes, self.shapes, strict=True)
        self.num_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in sizes)

    def __repr__(self) -> str:
        what = self.reason or f"header={self.header!r}, {len(self.shapes)} arrays"
        return f"Message(source={self.source}, {what})"

    def read(self, into: Sequence[Array] | None = None, timeout_s: float | None = None) -> list[Array]:
        """Wait for the arrays and return them; once for each message.

        Args:
            into: arrays to write them to, C-contiguous, with the shapes and dtypes of those that were sent; None makes
                new ones.
            timeout_s: seconds in which nothing of them comes after which this is an error; None: the messenger's.

        Raises:
            OptionError: the message was read before.
            DTypeError, ShapeError: ``into`` does not fit what was sent; nothing was moved.
            CommError: the sender has gone before all had come, or is late.
        """
        messenger, name = self._messenger, self._messenger.job.name_of(self.source)
        if self._is_read:
            raise OptionError(f"{messenger.name}: read: this message from {name} was read before")
        arrays = new_arrays(self._arrival.head) if into is None else list(into)
        messenger._check_into(self, arrays)
        messenger._check_usable()
        limit_s = messenger._limit("read", timeout_s)
        self._is_read = True
        if self.num_bytes:
            with _Waiting(messenger.traffic):
                failure = messenger._read(self._arrival, arrays, limit_s)
            if failure is None:
                raise CommError(
                    f"{messenger.name}: waited {limit_s:g} s for the arrays of a message from {name}, which is "
                    "stopped, too slow, or makes no call that sends the rest"
                )
            if failure:
                raise CommError(f"{messenger.name}: a message from {name} is not complete: {failure}")
        messenger.traffic.bytes_received += self.num_bytes
        return arrays


def new_arrays(head: bytes) -> list[Array]:
    """Return arrays, of undefined content, for those of a message with this head."""
    return [np.empty(shape, dtype) for dtype, shape in json.loads(head)["arrays"]] if head else []


class SendWork(Work):
    """A message on its way; keeps its arrays alive until it has been sent.

    Attributes:
        name: to whom it goes, for errors.
        failure: why it cannot be sent any more, else "".
    """

    failure: str = ""
    _messenger: Messenger | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the arrays may be touched again. The message may be on its way still.

        Args:
            timeout_s: seconds in which nothing of it moves after which this is an error; None: the messenger's.

        Raises:
            CommError: the receiver has gone, or takes nothing, or this messenger was closed.
        """
        break_graph("it sends a message")
        messenger = self._messenger
        assert messenger is not None
        if not self._has_ended():
            messenger._check_usable()
            limit_s = messenger._limit("wait", timeout_s)
            with _Waiting(messenger.traffic):
                has_ended = self._is_sent_within(limit_s)
            if not has_ended:
                raise CommError(
                    f"{messenger.name}: waited {limit_s:g} s for {self.name} to take a message; it is stopped, "
                    "too slow, or neither receives nor reads"
                )
        messenger._sent.pop(id(self), None)
        self._arrays = ()
        if self.failure:
            raise CommError(f"{messenger.name}: cannot send to {self.name}: {self.failure}")

    def _is_sent_within(self, limit_s: float) -> bool:
        """Wait until the message has been sent or has failed; False if nothing of it moves for ``limit_s``."""
        raise NotImplementedError

    def _has_ended(self) -> bool:
        """Return whether it was found to have been sent or failed. Moves nothing."""
        raise NotImplementedError


class Messenger(ABC):
    """Messages between this process and each of its peers: all servers for a worker, all workers for a server.

    A message is a header and arrays. Those of one sender arrive in the order in which they were sent; several
    senders are served round-robin. Bytes move inside calls alone, and every call moves whatever can move, both ways: a
    large message is on its way only while sender and receiver both are in one, so wait for what was sent, and receive
    what was asked for, before a collective or anything long. A peer that has closed, aborted or died is one ``Message``
    with its reason, after all that it had sent; sending to it is a CommError. Not for use by two threads at once, nor
    after a fork.

    Args:
        job: this process's rank in the job, and who else is in it.
        timeout_s: seconds the constructor waits for all processes of the job, and a call for a peer.

    Attributes:
        traffic: what was moved so far.
        transport: the word of ``Job.transport`` for this class.
        name: "worker 1" or "server 0": this process in errors.
        local_workers, local_servers: how many of the job are on this host.
        is_stuck: something did not end in time, so the transport would not end either.
    """

    transport: ClassVar[str] = ""
    is_stuck: bool = False

    def __init__(self, job: Job, timeout_s: float = TIMEOUT_S) -> None:
        if not check_number(type(self).__name__, "timeout_s", timeout_s) > 0:
            raise OptionError(f"{type(self).__name__}: timeout_s = {timeout_s} must be > 0")
        self.job = job
        self.name = job.name_of(job.rank)
        self.timeout_s = float(timeout_s)
        self.local_workers, self.local_servers = job.num_workers, job.num_servers
        self.traffic = MessageTraffic()
        self._gone: dict[int, str] = {}  # rank -> reason, of those whose last message was received
        self._sent: dict[int, SendWork] = {}  # in flight, by id
        self._is_closed = False
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name} of {self.job.num_workers} + {self.job.num_servers})"

    def send(self, to: int, header: Any, arrays: Sequence[Array] = ()) -> SendWork:
        """Begin to send a message; never waits.

        Args:
            to: rank of the receiver in the job, one of ``job.peers``.
            header: what JSON can hold, small: up to 1 MB as text.
            arrays: numpy arrays, C-contiguous, of float16/32/64 or int32/64, any size, 0 allowed. Not to be touched
                before the Work has ended.

        Returns:
            SendWork; its wait() returns None.

        Raises:
            OptionError: no such peer, or the header is too large or nothing for JSON.
            DTypeError, ShapeError: an array cannot be sent.
            CommError: the receiver has gone, or this messenger is closed.
        """
        self._check_usable()
        if isinstance(to, bool) or not isinstance(to, (int, np.integer)) or to not in self.job.peers:
            peers = f"{self.job.peers.start}..{self.job.peers.stop - 1}" if self.job.peers else "none"
            raise OptionError(f"{self.name}: send: to = {to!r} is not a rank that it sends to ({peers})")
        arrays = list(arrays)
        for array in arrays:
            self._check_array("send", array)
        head = self._head_of(header, arrays)
        if to in self._gone:
            raise CommError(f"{self.name}: cannot send to {self.job.name_of(to)}: {self._gone[to]}")
        break_graph("it sends a message")
        work = self._send(int(to), head, arrays)
        work._messenger, work.name, work._arrays = self, self.job.name_of(to), tuple(arrays)
        work.bytes_payload = work.bytes_sent = sum(array.nbytes for array in arrays)
        self.traffic.bytes_sent += work.bytes_sent
        self.traffic.bytes_heads += len(head)
        self._sent = {key: other for key, other in self._sent.items() if not other._has_ended()}
        self._sent[id(work)] = work
        return work

    def receive(self, timeout_s: float | None = None) -> Message:
        """Return the next message, round-robin over the senders that have one; wait for it if there is none.

        What was not read of an earlier message is kept, and may still be read.

        Args:
            timeout_s: seconds to wait; None: the messenger's own; ``math.inf``: as long as a peer is there.

        Raises:
            CommError: none came in time, or every peer has gone.
        """
        self._check_usable()
        break_graph("it receives a message")
        limit_s = self._limit("receive", timeout_s)
        waits_for = [peer for peer in self.job.peers if peer not in self._gone]
        if not waits_for:
            reasons = "; ".join(self._gone.values()) or "it has none"
            raise CommError(f"{self.name}: receive: no peer is left that could send a message: {reasons}")
        with _Waiting(self.traffic):
            arrival = self._receive(limit_s)
        if arrival is None:
            raise CommError(
                f"{self.name}: waited {limit_s:g} s for a message from {self.job.names_of(waits_for)}, which is "
                "stopped, too slow, or sends none"
            )
        if arrival.reason:
            self._gone[arrival.source] = arrival.reason
        self.traffic.bytes_heads += len(arrival.head)
        return Message(self, arrival)

    def close(self) -> None:
        """Leave the job; the peers get that as a last message. What is still in flight is lost: wait for it before."""
        if not self._is_closed and self._pid == os.getpid():
            self._is_closed = True
            self._leave("")

    def abort(self, reason: str) -> None:
        """Leave because of an error: close() that gives the peers ``reason``. Never waits."""
        if not self._is_closed and self._pid == os.getpid():
            self._is_closed = True
            self._leave(sendable(reason) or "unknown")

    def drain(self, seconds: float) -> None:
        """Take, after close(), what is on its way from the peers, for at most ``seconds``."""

    # ---- what a transport writes -------------------------------------------------------------------

    @abstractmethod
    def _send(self, to: int, head: bytes, arrays: list[Array]) -> SendWork:
        """Begin to send what was checked."""

    @abstractmethod
    def _receive(self, limit_s: float) -> Arrival | None:
        """Return what comes next; None if nothing does within ``limit_s``."""

    @abstractmethod
    def _read(self, arrival: Arrival, into: list[Array], limit_s: float) -> str | None:
        """Write its arrays to ``into``; return "", why they will not come, or None if nothing moves for ``limit_s``."""

    @abstractmethod
    def _leave(self, reason: str) -> None:
        """Report the end to the peers, with the reason for an abort ("": none), and free what this process holds."""

    # ---- one message -------------------------------------------------------------------------------

    def _head_of(self, header: Any, arrays: list[Array]) -> bytes:
        manifest = [[array.dtype.name, array.shape] for array in arrays]
        try:
            head = json.dumps({"header": header, "arrays": manifest}, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"{self.name}: send: the header cannot be written as JSON: {error}") from error
        if len(head) > MAX_HEAD_BYTES:
            raise OptionError(
                f"{self.name}: send: the header has {len(head)} bytes as JSON, more than {MAX_HEAD_BYTES}; "
                "send what is large as arrays"
            )
        return head

    def _limit(self, where: str, timeout_s: float | None) -> float:
        """Return the seconds that a call waits; OptionError unless they are a number >= 0, or None."""
        return self.timeout_s if timeout_s is None else check_number(where, "timeout_s", timeout_s, 0.0)

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise CommError(
                f"{self.name}: a messenger made before fork() is not usable in the child (process {os.getpid()})"
            )
        if self._is_closed:
            raise CommError(f"{self.name}: this messenger is closed")

    def _check_array(self, where: str, array: Any) -> None:
        if not isinstance(array, np.ndarray):
            raise DTypeError(f"{self.name}: {where}: expected a numpy array, got {type(array).__name__}")
        if array.dtype not in DTYPES:
            known = ", ".join(str(dtype) for dtype in DTYPES)
            raise DTypeError(f"{self.name}: {where}: dtype {array.dtype} cannot be sent; use one of {known}")
        if not array.flags.c_contiguous:
            raise ShapeError(
                f"{self.name}: {where}: array of shape {array.shape} is not contiguous; pass a copy"
            )

    def _check_into(self, message: Message, into: list[Array]) -> None:
        where = f"read from {self.job.name_of(message.source)}"
        if len(into) != len(message.shapes):
            raise ShapeError(
                f"{self.name}: {where}: {len(message.shapes)} arrays were sent but {len(into)} given to read into"
            )
        for array, shape, dtype in zip(into, message.shapes, message.dtypes, strict=True):
            self._check_array(where, array)
            if array.dtype != dtype:
                raise DTypeError(f"{self.name}: {where}: expected an array of {dtype}, got {array.dtype}")
            if array.shape != shape:
                raise ShapeError(f"{self.name}: {where}: expected shape {shape}, got {array.shape}")
            note_written(array)
            if not array.flags.writeable:
                raise ShapeError(f"{self.name}: {where}: array of shape {shape} is read-only; pass another")


class _Waiting:
    """Counts the seconds inside a ``with`` block as waited."""

    def __init__(self, traffic: MessageTraffic) -> None:
        self._traffic = traffic

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        end = time.perf_counter()
        self._traffic.wait_s += end - self._start
        if this_thread.clock is not None:
            this_thread.clock.waited(Waited("messages", "message", 0, None, self._start, end))
