# SPDX-License-Identifier: Apache-2.0
"""An emulated network link around ranks of one host: collectives end as late as they would over a slower network.

What lives here: when collectives end on a link, and waiting until then. What does not: the link (link.py), moving data,
which the wrapped communicator does as ever (local.py, shm.py), and predicting steps (../bench/cost.py).

Note [schedule]: every rank has one full-duplex link. Collectives leave in the order of their calls: T0 is when the last
rank called, start = max(T0, free), free = start + bytes_sent / rate, end = free + hops * latency. The ranks learn T0 by
one small all-gather of CLOCK_MONOTONIC, which all processes of a host share, after every collective, so all compute the
same end. It is part of the emulation and counts in no ``traffic``. Groups share the link of their rank: a rank whose
link is still in use calls as late as that is free. Of collectives in flight in several groups, the first whose end is
asked for leaves first. If the ranks play several hosts (SINGA_LITE_HOST), a group within one host uses no link.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import CommError, DTypeError
from .base import Communicator, Operation
from .gpu_arrays import is_cuda_array
from .host import this_host
from .link import SECOND_NS, Link
from .stop_requests import StopRequests
from .work import Array, Times, Work


def num_hops(kind: str, size: int) -> int:
    """Return how often data of a collective pass from a rank to the next on a ring of ``size`` ranks."""
    return (2 if kind == "all_reduce" else 1) * (size - 1)


@dataclass(eq=False)
class Line:
    """The schedule of the collectives on a rank's link; ``free_ns``: when the last one has left."""

    link: Link
    free_ns: int = 0

    def send(self, called_ns: int, num_bytes: int, hops: int) -> int:
        """Take one more collective; return when it ends, see Note [schedule].

        Args:
            called_ns: when the last rank called it.
            num_bytes: what this rank sends.
            hops: see ``num_hops``.
        """
        self.free_ns = max(called_ns, self.free_ns) + self.link.sending_ns(num_bytes)
        return self.free_ns + hops * self.link.latency_ns


class LinkWork(Work):
    """A collective in flight over an emulated link.

    Attributes:
        end_ns: when it ends; None while a rank has not called it, or that is not known here.
    """

    def __init__(
        self, communicator: LinkCommunicator, kind: str, moved: Work, timing: Work, calls: Array
    ) -> None:
        self._communicator, self._moved = communicator, moved
        self.timing, self.calls = timing, calls  # the all-gather of the ranks' times, and its result
        self.hops = num_hops(kind, communicator.size)
        self.end_ns: int | None = None

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for the peers, of whom alone ``timeout_s`` is, and then for the link."""
        self._moved._wait(timeout_s)
        self._communicator.schedule(self, timeout_s)
        assert self.end_ns is not None
        self._communicator.sleep_until(self.end_ns)

    def _is_done(self) -> bool:
        if not self._moved._is_done():
            return False
        try:
            is_scheduled = self._communicator.try_to_schedule(self)
        except CommError:  # as wait() will raise at once
            return True
        return is_scheduled and self._communicator.clock() >= (self.end_ns or 0)

    def _is_asked_to_stop(self) -> bool | None:
        return self._moved._is_asked_to_stop()

    def _times(self) -> Times | None:
        times = self._moved._times()
        if times is None or self.end_ns is None:
            return None
        # where the link was not in use a rank called before it called what moves the data, maybe long before
        called_s = (self.calls.ravel() / SECOND_NS).tolist()
        posted = min(times.posted, called_s[self._communicator.rank])
        return Times(posted, min(times.all_there, max(called_s)), max(times.ended, self.end_ns / SECOND_NS))


class LinkCommunicator(Communicator):
    """The ranks of ``host``, with an emulated link each; all results have the same bits, but later.

    Args:
        host: moves the data; closed with this one. Of transport "local" or "shm".
        link: equal on all ranks.
        line: that of the communicator which this one is a group of; None makes one.
        hosts: of each rank, if this is a group.
        clock: gives nanoseconds of CLOCK_MONOTONIC.
        sleep: waits for a number of seconds.

    Raises:
        CommError: on all ranks, where they have different links.
    """

    joins_worlds = False

    def __init__(
        self,
        host: Communicator,
        link: Link,
        *,
        line: Line | None = None,
        hosts: Sequence[str] = (),
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(host.world, host.timeout_s)
        self.stop_requests = host.stop_requests
        self.host, self.link, self.clock, self._sleep = host, link, clock, sleep
        self.flight_recorder = host.flight_recorder
        self._unscheduled: deque[LinkWork] = deque()
        self._line, self._hosts = Line(link) if line is None else line, list(hosts)
        if line is None:
            # ranks with another link, or none, call a collective of another name: the error has both
            self._hosts = host.all_gather_object(this_host(), name=f"SINGA_LITE_LINK={link}")

    def __repr__(self) -> str:
        return f"{self.host!r} over {self.link}"

    def schedule(self, work: LinkWork, timeout_s: float | None) -> None:
        """Find out when ``work`` ends, and what was called before it; waits until all ranks have called it."""
        while work.end_ns is None:
            first = self._unscheduled[0]
            first.timing._wait(timeout_s)
            first.end_ns = self._line.send(int(first.calls.max()), first.bytes_sent, first.hops)
            self._unscheduled.popleft()

    def try_to_schedule(self, work: LinkWork) -> bool:
        """Return whether it is known when ``work`` ends; never waits."""
        while work.end_ns is None and self._unscheduled[0].timing._is_done():
            self.schedule(self._unscheduled[0], None)
        return work.end_ns is not None

    def sleep_until(self, end_ns: int) -> None:
        """Return when the clock shows ``end_ns``."""
        while (left_ns := end_ns - self.clock()) > 0:
            self._sleep(left_ns / SECOND_NS)

    def share_stop_requests(self, requests: StopRequests) -> None:
        super().share_stop_requests(requests)
        self.host.share_stop_requests(requests)

    def abort(self, reason: str) -> None:
        self.host.abort(reason)

    def close(self) -> None:
        self.host.close()

    def _start(self, operation: Operation, array: Array, out: Array, scale: Array | None) -> Work:
        if self.is_alone:
            return self.host._start(operation, array, out, scale)
        called = np.array([max(self.clock(), self._line.free_ns)], np.int64)
        calls = np.empty((self.size, 1), np.int64)
        # first, so that ranks that disagree get its error
        moved = self.host._start(operation, array, out, scale)
        timing = self.host._start(Operation("all_gather", f"times of {operation.name}"), called, calls, None)
        timing._arrays = (called, calls)
        work = LinkWork(self, operation.kind, moved, timing, calls)
        self._unscheduled.append(work)
        return work

    def _new_array(self, shape: tuple[int, ...], like: Array) -> Array:
        return self.host._new_array(shape, like)

    def _new_group(self, ranks: list[int], name: str) -> Communicator | None:
        group = self.host._new_group(ranks, name)
        if group is None:
            return None
        hosts = [self._hosts[rank] for rank in ranks]
        if len(set(self._hosts)) > 1 and len(set(hosts)) == 1:
            return group
        return LinkCommunicator(
            group, self.link, line=self._line, hosts=hosts, clock=self.clock, sleep=self._sleep
        )

    def _check_kind(self, array: Any) -> None:
        if is_cuda_array(array):
            raise DTypeError(
                f"{self!r}: a {type(array).__name__} lives on a GPU, whose links are real; leave out --link "
                "(SINGA_LITE_LINK), or train on the CPU"
            )
        self.host._check_kind(array)
