# SPDX-License-Identifier: Apache-2.0
"""A collective in flight: waiting for it, when it was called and ended, and the bytes it counts.

What lives here: what callers of a collective get. What does not: the collectives (base.py), what a transport does while
one is in flight (shm.py, mpi.py, nccl.py).
Note [bytes]: a collective reports the bytes one rank puts on a ring, whatever the transport does:
all-reduce 2(N-1)/N*B, reduce-scatter and all-to-all (N-1)/N*B, all-gather (N-1)*B, broadcast and reduce
(N-1)/N*B, rounded up to a whole byte, where B is the payload in bytes as sent (wire dtype).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..config import this_thread
from ..errors import CommError, OptionError, check_number
from ..graph.clock import Waited
from ..graph.recorder import break_graph
from .stop_requests import StopRequests

Array = np.ndarray[Any, Any]  # or a CUDA array with numpy's attributes, such as cupy's; see is_cuda_array


@dataclass
class Traffic:
    """Bytes that a communicator has sent since it was made, and seconds that the host waited.

    Attributes:
        bytes_sent: bytes this rank puts on a ring, see Note [bytes].
        bytes_payload: bytes of the arrays as sent.
        wait_s: seconds the host waited for collectives.
    """

    bytes_sent: int = 0
    bytes_payload: int = 0
    wait_s: float = 0.0

    def copy(self) -> Traffic:
        """Return what was counted so far."""
        return Traffic(self.bytes_sent, self.bytes_payload, self.wait_s)

    def add(self, other: Traffic) -> None:
        """Count what another one counts as well."""
        self.bytes_sent += other.bytes_sent
        self.bytes_payload += other.bytes_payload
        self.wait_s += other.wait_s

    def since(self, before: Traffic) -> Traffic:
        """Return what was counted after ``before`` was."""
        return Traffic(
            self.bytes_sent - before.bytes_sent,
            self.bytes_payload - before.bytes_payload,
            self.wait_s - before.wait_s,
        )


class Counting(Protocol):
    """What counts its traffic: a communicator."""

    traffic: Traffic


@contextmanager
def uncounted(communicator: Counting) -> Iterator[None]:
    """Leave what is sent inside, to make groups or begin with NCCL, out of the traffic of ``communicator``."""
    before = communicator.traffic.copy()
    try:
        yield
    finally:
        communicator.traffic = before


class Times(NamedTuple):
    """When a collective was called and ended, in seconds of ``time.perf_counter``.

    On Linux that is CLOCK_MONOTONIC, which all processes of a host share.

    Attributes:
        posted: when this rank called it.
        all_there: when the last rank had called it, as far as this rank can know: that rank's own time where all are on
            this host (shm), else when this rank had got every rank's message (mpi).
        ended: when the result was there.
    """

    posted: float
    all_there: float
    ended: float


class Launcher(Protocol):
    """The communicator that launched a collective."""

    def _forget(self, work: Work, seconds: float) -> None:
        """Note that ``work`` has ended, after the host waited ``seconds`` for it."""

    def _note_failure(self, error: CommError) -> None:
        """Note that a wait has raised ``error``."""


class Work:
    """A collective in flight; keeps its arrays alive until it has ended. A transport writes ``_wait`` and ``_is_done``.

    Attributes:
        name: what the caller called it, e.g. the parameters of a bucket.
        kind: such as "all_reduce" (base.KINDS).
        bytes_sent: bytes this rank puts on a ring, see Note [bytes].
        bytes_payload: bytes of the array as sent.
        has_times: whether ``times`` knows anything; False over NCCL.
    """

    name: str = ""
    kind: str = ""
    bytes_sent: int = 0
    bytes_payload: int = 0
    has_times: bool = True
    _launcher: Launcher | None = None
    _number: int = 0  # of the collectives of its communicator
    _members: tuple[int, ...] = ()  # of its communicator (base.World)
    _thread: int = 0  # which has started it
    _arrays: tuple[Array | None, ...] = ()
    _stop_requests: StopRequests | None = None  # of its communicator
    _result: Array | None = None
    _was_waited: bool = False

    def wait(self, timeout_s: float | None = None) -> Array | None:
        """Block until the collective has ended; return the result of one with a new array, else None.

        Raises:
            CommError: a peer died, closed, disagrees or did not call it within ``timeout_s`` seconds
                (None: the communicator's own time-out).
            OptionError: ``timeout_s`` is not a number >= 0.
        """
        if timeout_s is not None:
            check_number("wait", "timeout_s", timeout_s, 0.0)
        if this_thread.recorder is not None:
            this_thread.recorder.wait(self, timeout_s)
        launcher = self._launcher
        start = time.perf_counter()
        try:
            self._wait(timeout_s)
        except CommError as error:
            if launcher is not None:
                launcher._note_failure(error)
            raise
        finally:
            end = time.perf_counter()
            if launcher is not None:
                launcher._forget(self, end - start)
            if this_thread.clock is not None:
                self._report(start, end)
        requests = self._stop_requests
        if requests is not None and (is_asked := self._is_asked_to_stop()) is not None:
            if is_asked:
                requests.receive(True)
            elif requests.received is None:
                requests.received = False
        return self._result

    def _report(self, start: float, end: float) -> None:
        """Report to the clock of this thread's step that the host has waited, once: a second wait does not wait."""
        clock = this_thread.clock
        if clock is not None and clock.is_running and not self._was_waited:
            self._was_waited = True
            times = self._times() if self.has_times and self._is_done() else None
            facts = (self.name, self.kind, self.bytes_sent, times, start, end)
            clock.waited(Waited(*facts, self._number, self._members))

    def done(self) -> bool:
        """Return whether wait() would return at once. Never blocks."""
        break_graph("it reads whether a collective has ended")
        return self._is_done()

    def times(self) -> Times | None:
        """Return when it was called and ended; None over NCCL, where the host does not see it end.

        Raises:
            OptionError: it has not ended, or has failed.
        """
        break_graph("it reads when a collective ended")
        times = self._times() if self._is_done() else None
        if times is None and self.has_times:
            raise OptionError(f"times: {self.name or 'the collective'} has not ended; wait() for it first")
        return times

    def _wait(self, timeout_s: float | None) -> None:
        raise NotImplementedError

    def _is_done(self) -> bool:
        raise NotImplementedError

    def _times(self) -> Times | None:
        """Return the times of one that is done; None if it failed."""
        return None

    def _is_asked_to_stop(self) -> bool | None:
        """Return whether a rank asked to stop in this collective, which has ended; None if it carries no requests."""
        return None


class FinishedWork(Work):
    """A collective that had ended when its call returned."""

    def __init__(self, times: Times | None = None, is_asked_to_stop: bool | None = None) -> None:
        self._known, self.has_times = times, times is not None
        self._is_asked = is_asked_to_stop

    def report_call(self) -> float:
        """Count the time of the call itself as waited; return its seconds, 0 where they are not known."""
        if self._known is None:
            return 0.0
        self._report(self._known.posted, self._known.ended)
        return self._known.ended - self._known.posted

    def _times(self) -> Times | None:
        return self._known

    def _wait(self, timeout_s: float | None) -> None:
        return None

    def _is_done(self) -> bool:
        return True

    def _is_asked_to_stop(self) -> bool | None:
        return self._is_asked


class WorkList(Work):
    """The collectives of one call with a list of arrays; wait() waits for all and returns None."""

    def __init__(self, works: list[Work], name: str) -> None:
        self._works = works
        self.name = name
        self.bytes_sent = sum(work.bytes_sent for work in works)
        self.bytes_payload = sum(work.bytes_payload for work in works)

    def wait(self, timeout_s: float | None = None) -> None:
        for work in self._works:
            work.wait(timeout_s)

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def times(self) -> Times | None:
        """Return the first call, and the last of the others."""
        known = [times for work in self._works if (times := work.times()) is not None]
        if not known:
            return None
        posted, all_there, ended = zip(*known, strict=True)
        return Times(min(posted), max(all_there), max(ended))


def ring_bytes(collective: str, payload: int, size: int) -> int:
    """Bytes one rank puts on a ring of ``size`` ranks for ``payload`` bytes, see Note [bytes]."""
    if collective == "all_gather":
        return (size - 1) * payload
    share = 2 if collective == "all_reduce" else 1
    return -(-share * (size - 1) * payload // size)
