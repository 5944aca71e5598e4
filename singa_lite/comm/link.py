# SPDX-License-Identifier: Apache-2.0
"""An emulated network link around ranks of one host: collectives end as late as they would over a slower network.

What lives here: the text of a link, when collectives end on it, and waiting until then. What does not: moving data,
which the wrapped communicator does as ever (local.py, shm.py), and predicting steps (../bench/cost.py).

Note [schedule]: every rank has one full-duplex link. Collectives leave in the order of their calls: T0 is when the last
rank called, start = max(T0, free), free = start + bytes_sent / rate, end = free + hops * latency. The ranks learn T0 by
one small all-gather of CLOCK_MONOTONIC, which all processes of a host share, after every collective, so all compute the
same end. It is part of the emulation and counts in no ``traffic``. Groups share the link of their rank: a rank whose
link is still in use calls as late as that is free. Of collectives in flight in several groups, the first whose end is
asked for leaves first. If the ranks play several hosts (SINGA_LITE_HOST), a group within one host uses no link.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import env
from ..errors import CommError, DTypeError, OptionError
from .base import Communicator, Operation
from .gpu_arrays import is_cuda_array
from .hosts import this_host
from .stop_requests import StopRequests
from .work import Array, Times, Work

EMULATED = ("local", "shm")  # transports whose own links are memory
BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
NANOSECONDS = {"us": 10**3, "ms": 10**6, "s": 10**9}
SECOND_NS = 10**9
MAX_DIGITS = 20  # before the point, and behind it
MAX_BITS_PER_S = 10**15
MAX_LATENCY_S = 3600
NUMBER = rf"\d{{1,{MAX_DIGITS}}}(?:\.\d{{1,{MAX_DIGITS}}})?"
TEXT = re.compile(rf"(?a:({NUMBER})(kbit|mbit|gbit),({NUMBER})(us|ms|s))")


@dataclass(frozen=True)
class Link:
    """The link of each rank, the same in both directions.

    Attributes:
        bits_per_s: rate, 1 .. MAX_BITS_PER_S.
        latency_ns: nanoseconds from a rank to the next, 0 .. those of MAX_LATENCY_S.
    """

    bits_per_s: int
    latency_ns: int

    def __str__(self) -> str:
        """Return the text that ``parse_link`` reads."""
        rate = next(
            unit for unit in ("gbit", "mbit", "kbit") if self.bits_per_s >= BITS[unit] or unit == "kbit"
        )
        return (
            f"{_decimal(self.bits_per_s, BITS[rate])}{rate},{_decimal(self.latency_ns, NANOSECONDS['ms'])}ms"
        )

    def sending_ns(self, num_bytes: int) -> int:
        """Return the nanoseconds that the link is in use for ``num_bytes``, rounded up."""
        return -(-num_bytes * 8 * SECOND_NS // self.bits_per_s)


def parse_link(where: str, text: str) -> Link:
    """Return the Link of a text such as "100mbit,1ms".

    Args:
        where: names the option in errors.
        text: a rate in kbit, mbit or gbit (powers of ten, per second), a comma, a latency per hop in us, ms or s.

    Raises:
        OptionError: another text, a rate below 1 bit/s or above 1 Pbit/s, or a latency above an hour.
    """
    match = TEXT.fullmatch(text)
    expected = "expected RATE,LATENCY such as 100mbit,1ms: a rate in kbit, mbit or gbit, and a latency in us, ms or s"
    if match is None:
        raise OptionError(f"{where}: {expected}; got {text!r}")
    from fractions import Fraction  # Note [imports]

    rate, rate_unit, latency, latency_unit = match.groups()
    link = Link(round(Fraction(rate) * BITS[rate_unit]), round(Fraction(latency) * NANOSECONDS[latency_unit]))
    if link.bits_per_s < 1:
        raise OptionError(f"{where}: {expected}; the rate of {text!r} is less than 1 bit/s")
    if link.bits_per_s > MAX_BITS_PER_S:
        raise OptionError(f"{where}: {expected}; the rate of {text!r} is more than 1 Pbit/s (1000000gbit)")
    if link.latency_ns > MAX_LATENCY_S * SECOND_NS:
        raise OptionError(
            f"{where}: {expected}; the latency of {text!r} is more than an hour ({MAX_LATENCY_S}s)"
        )
    return link


def _decimal(value: int, unit: int) -> str:
    """Return ``value`` / ``unit``, a power of ten, in digits without an exponent, exactly."""
    whole, rest = divmod(value, unit)
    return f"{whole}.{rest:0{len(str(unit)) - 1}}".rstrip("0").rstrip(".")


def link_of_process() -> Link | None:
    """Return the link that SINGA_LITE_LINK asks for; None: the real ones. OptionError: a wrong text."""
    text = env("SINGA_LITE_LINK")
    return None if text is None else parse_link("SINGA_LITE_LINK", text)


def check_emulated(link: Link | None, transport: str) -> None:
    """Raise OptionError for a link around a transport whose links are real."""
    if link is not None and transport not in EMULATED:
        raise OptionError(
            f"connect: SINGA_LITE_LINK={link} is for ranks of one host over {' or '.join(EMULATED)}, and this world's "
            f"transport is {transport!r}, whose links are real; unset it, or start with `singa-lite run` without -H"
        )


def num_hops(kind: str, size: int) -> int:
    """Return how often data of a collective pass from a rank to the next on a ring of ``size`` ranks."""
    return (2 if kind == "all_reduce" else 1) * (size - 1)


class Line:
    """The schedule of the collectives on a rank's link.

    Args:
        link: its rate and latency.

    Attributes:
        free_ns: when the last collective has left.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.free_ns = 0

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
        return times._replace(ended=max(times.ended, self.end_ns / SECOND_NS))


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
