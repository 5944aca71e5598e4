# SPDX-License-Identifier: Apache-2.0
"""Stopping all ranks at the end of the same step: signals become requests, and the end of each step decides.

What lives here: ``stop_on_signals`` and its kin, which DistOpt inherits. What does not: how a request travels with the
collectives of a step (stop_requests.py).
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from abc import ABC
from collections.abc import Iterable
from types import FrameType
from typing import Any

from ..errors import OptionError
from ..graph.recorder import break_graph, unrecorded
from .base import Communicator
from .progress import Progress, progress_of_process
from .stop_requests import StopRequests

# no SIGUSR1 on Windows
STOP_SIGNALS = (signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
REPEAT_S = 1.0  # schedulers signal every process of a job, and the launcher passes it on: that is one request
ONLY_REQUESTS = {getattr(signal, name, None) for name in ("SIGUSR1", "SIGUSR2")}
DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class StopHandler:
    """The handler of one signal, which asks to stop.

    The same signal again, ``REPEAT_S`` later or more, does what it did before there was this handler, but for SIGUSR1
    and SIGUSR2; in a process that was forked from this one it does so at once.

    Args:
        before: the handler that this one replaces.
        requests: of a world that this process is a rank of.

    Attributes:
        requests: of all such worlds.
    """

    def __init__(self, before: Any, *requests: StopRequests) -> None:  # Any: what signal.getsignal returns
        self.requests = list(requests)
        self._before = before
        self._pid = os.getpid()
        self._first_s: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_repeated = self._first_s is not None and now - self._first_s >= REPEAT_S
        if os.getpid() != self._pid or (is_repeated and number not in ONLY_REQUESTS):
            signal.signal(number, self._before)
            signal.raise_signal(number)
            return
        self._first_s = now if self._first_s is None else self._first_s
        for requests in self.requests:
            requests.is_requested = True


class StopAgreement:
    """Whether the ranks have agreed to stop, as of the last step that ended.

    Args:
        communicator: whose collectives carry the requests.

    Attributes:
        is_decided: a rank has asked to stop, and all ranks know; changes at the end of a step alone, on all ranks of
            the same one.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.is_decided = False
        self._communicator = communicator
        self._is_listening = False
        self._progress: Progress | None = progress_of_process()

    def listen(self, signals: Iterable[int]) -> None:
        """Turn ``signals`` into requests to stop; see ``DistOpt.stop_on_signals``."""
        try:
            numbers = [_signal(number) for number in signals]
        except TypeError as error:
            raise OptionError(f"stop_on_signals: expected a list of signals, got {signals!r}") from error
        if numbers and threading.current_thread() is not threading.main_thread():
            raise OptionError("stop_on_signals: Python handles signals in the main thread; call it there")
        for number in numbers:
            _check_handler(number)
        for number in numbers:
            handler = signal.getsignal(number)
            if handler is signal.SIG_IGN:
                continue
            requests = self._communicator.stop_requests
            if isinstance(handler, StopHandler):
                handler.requests.append(requests)
            else:
                signal.signal(number, StopHandler(handler, requests))
                atexit.register(_ignore, number)
        self._is_listening = True
        if self._progress is not None:
            self._progress.note_takes_requests()
        with unrecorded():
            self._communicator.barrier(name="stop_on_signals")

    def request(self) -> None:
        """Ask to stop."""
        self._communicator.stop_requests.is_requested = True

    def end_step(self, step: int) -> None:
        """Decide, and tell the launcher that ``step`` steps are made."""
        requests = self._communicator.stop_requests
        received = requests.end_step()
        if self._communicator.is_alone:
            received = requests.is_requested
        elif not self._communicator.carries_requests:  # whatever collectives of the host some ranks have made
            received = self._ask_over_host(requests)
        self.is_decided |= bool(received)
        if self._progress is not None:
            self._progress.note_step(step)

    def _ask_over_host(self, requests: StopRequests) -> bool | None:
        """Exchange the requests by a collective of the host, as those over NCCL carry none."""
        if self._is_listening:
            with unrecorded():
                self._communicator.barrier(name="stop requests")
            return requests.end_step()
        if requests.is_requested:
            raise OptionError(
                "DistOpt: this rank was asked to stop, but collectives over NCCL carry no requests; call "
                "stop_on_signals() on every rank before training"
            )
        return None


class StopCalls(ABC):
    """Ask to stop, and whether a rank did; a subclass sets ``_stop`` and tells it when steps end."""

    _stop: StopAgreement

    @property
    def should_stop(self) -> bool:
        """Whether a rank was asked to stop, equal on all ranks: it becomes True at the end of the same step on each.

        A request is decided by the collectives of the first step that begins after it, and is True from the end of that
        step on; where steps are made by hand, of the one after. A scheme whose steps have no collective (localSGD)
        decides at its next average.
        """
        break_graph("it reads should_stop, which a replay would not do")
        return self._stop.is_decided

    def stop_on_signals(self, signals: Iterable[int] = STOP_SIGNALS) -> None:
        """Turn signals into requests to stop (``should_stop``), instead of ending this process; all ranks call it.

        One process that gets a signal is enough. The same signal a second or more later ends the process as ever, but
        SIGUSR1 and SIGUSR2, which only ask. `singa-lite run` passes SIGTERM and SIGUSR1 on, and then waits
        --stop-timeout seconds. Signals that the process ignores stay ignored. Over NCCL, whose collectives carry no
        requests, each step makes one more small collective of the host from now on.

        Args:
            signals: those that ask; () for none, if a handler of the script calls ``request_stop``.

        Raises:
            OptionError: no signal, one that cannot be handled, one that has a handler of the script, or this is not
                the main thread. CommError: a rank does not call it.
        """
        self._stop.listen(signals)

    def request_stop(self) -> None:
        """Ask all ranks to stop, on any rank, at any time, also in a signal handler; see ``should_stop``."""
        self._stop.request()


def _ignore(number: int) -> None:
    """Ignore a request that comes when the script has ended: Python would give its signal the default meaning."""
    if isinstance(signal.getsignal(number), StopHandler):
        signal.signal(number, signal.SIG_IGN)


def _signal(number: int) -> signal.Signals:
    try:
        return signal.Signals(number)
    except ValueError as error:
        raise OptionError(
            f"stop_on_signals: expected a signal, such as signal.SIGTERM, got {number!r}"
        ) from error


def _check_handler(number: signal.Signals) -> None:
    if number in (getattr(signal, "SIGKILL", None), getattr(signal, "SIGSTOP", None)):
        raise OptionError(f"stop_on_signals: {number.name} ends or stops a process in any case; use SIGTERM")
    handler = signal.getsignal(number)
    if handler not in (*DEFAULTS, signal.SIG_IGN) and not isinstance(handler, StopHandler):
        raise OptionError(
            f"stop_on_signals: {number.name} has a handler of this script, {handler!r}, which would be lost; leave "
            f"{number.name} out of signals, and call request_stop() in that handler"
        )
