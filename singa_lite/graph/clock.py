# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step goes: laps that code of a step ends, eagerly and at every replay.

What lives here: the clock of a thread. What does not: what counts as which phase (autograd/engine.py, sync/buckets.py,
opt/dist.py), and the times of collectives (comm/work.py).

Note [laps]: a step is cut into laps without holes. ``lap("pack")`` says that the time since the last lap ended went
into packing, but for what the host waited for collectives meanwhile, which counts as "wait". In a recorded step a
lap is a node, so a replay measures by the same calls; compiled kernels are cut there. It says nothing of kernels that
run behind the host, and a CUDA graph has no laps.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from ..config import this_thread
from .nodes import ClockCall, Node
from .trace import TraceWriter, trace_of_process

MAX_WAITED = 4096  # of one step that are kept
MAX_SPANS = 4096  # of one step that are not written yet
WAIT = "wait"


class Span(NamedTuple):
    """A phase of the host from ``start`` to ``end``, in seconds of ``time.perf_counter``."""

    phase: str  # that of a lap, or "wait"
    name: str  # of what it was done to, such as the parameters of a bucket
    start: float
    end: float


class Waited(NamedTuple):
    """A collective that the host waited for, from ``start`` to ``end``."""

    name: str  # what its caller called it
    kind: str  # such as "all_reduce"
    bytes_sent: int  # what this rank put on a ring
    # when it was posted, all ranks were there and it ended (comm.work.Times); None if unknown, or if it failed
    times: tuple[float, float, float] | None
    start: float
    end: float
    number: int = 0  # of the collectives of its communicator, the same on all ranks
    members: tuple[int, ...] = ()  # of a group's communicator, its ranks in the world; () of a world's


@dataclass
class StepTimes:
    """The times of one step, from its beginning to its end."""

    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    waited: list[Waited] = field(default_factory=list)  # in order, the first MAX_WAITED
    spans: list[Span] = field(default_factory=list)  # of the laps and the waits, in order, not written yet


class StepClock:
    """The clock of one thread, see Note [laps].

    Args:
        writer: gets every step that ends, with its spans; None: steps have no spans.

    Attributes:
        is_running: whether a step has begun.
    """

    def __init__(self, writer: TraceWriter | None = None) -> None:
        self.is_running = False
        self._writer = writer
        self._start = 0.0  # of the lap that runs
        self._waits: list[Waited] = []  # in it
        self._times = StepTimes()
        self._num_written = 0  # of the collectives

    def begin(self) -> None:
        """Start the first lap of a step, or go on with a step that was paused; nothing if a lap runs."""
        if not self.is_running:
            self.is_running, self._start = True, perf_counter()
            self._waits.clear()

    def lap(self, phase: str, name: str) -> None:
        """End a lap and start the next one; nothing if no step runs."""
        if not self.is_running:
            return
        now = perf_counter()
        seconds = self._times.seconds
        if self._writer is not None:
            self._add_spans(phase, name, now)
        spent, self._start = now - self._start, now
        for wait in self._waits:
            waited = wait.end - wait.start
            spent -= waited
            seconds[WAIT] = seconds.get(WAIT, 0.0) + waited
        seconds[phase] = seconds.get(phase, 0.0) + spent
        self._waits.clear()

    def waited(self, wait: Waited) -> None:
        """Count a wait of the host for a collective, since the lap began."""
        if not self.is_running:
            return
        while self._waits and self._waits[-1].start >= wait.start:  # one that was part of this one
            self._waits.pop()
        self._waits.append(wait)
        if len(self._times.waited) < MAX_WAITED:
            self._times.waited.append(wait)

    def pause(self) -> None:
        """End a part of a step: what comes before the next ``begin`` does not count."""
        self.is_running = False

    def end(self) -> StepTimes:
        """End a step; return what was measured since the last one ended."""
        self.is_running = False
        self._write()
        times, self._times = self._times, StepTimes()
        self._num_written = 0
        return times

    def abandon(self) -> None:
        """End a step that an error, or the end of the process, cuts off; nothing if none runs."""
        self.lap("unfinished", "")
        if self.is_running:
            self.end()

    def _write(self) -> None:
        """Write the spans so far, and the collectives since the last time."""
        times = self._times
        if self._writer is not None and times.spans:  # without laps nothing was a step
            self._writer.add_step(times.spans, times.waited[self._num_written :])
            times.spans, self._num_written = [], len(times.waited)

    def _add_spans(self, phase: str, name: str, now: float) -> None:
        """Add the spans of the lap that ends; write them if they are many."""
        spans, since = self._times.spans, self._start
        for wait in self._waits:
            spans += [Span(phase, name, since, wait.start), Span(WAIT, wait.name, wait.start, wait.end)]
            since = wait.end
        spans.append(Span(phase, name, since, now))
        if len(spans) >= MAX_SPANS:
            self._write()


def without_empty_laps(nodes: list[Node]) -> list[Node]:
    """Return ``nodes`` without laps in which a replay does nothing."""
    is_lap = [isinstance(node, ClockCall) and node.function is StepClock.lap for node in nodes]
    return [
        node for number, node in enumerate(nodes) if not (is_lap[number] and number and is_lap[number - 1])
    ]


def clock_of_thread() -> StepClock:
    """Return the clock of this thread, made at first use."""
    if this_thread.clock is None:
        writer = trace_of_process()
        this_thread.clock = StepClock(writer)
        if writer is not None:
            atexit.register(this_thread.clock.abandon)
    clock: StepClock = this_thread.clock
    return clock


def begin_step() -> None:
    """Begin a step, unless one runs, now and at this point of every replay."""
    clock = clock_of_thread()
    if not clock.is_running:
        _call_and_record(clock, StepClock.begin)


def lap(phase: str, name: str = "") -> None:
    """Count the time since the last lap as that of ``phase``, now and at this point of every replay, see Note [laps].

    Args:
        phase: "forward", "backward", "pack", "compress", "decompress" or "update".
        name: of what it was done to, such as the parameters of a bucket.
    """
    clock = clock_of_thread()
    if clock.is_running:
        _call_and_record(clock, StepClock.lap, phase, name)


def pause_step() -> None:
    """Continue the step at the next ``begin_step``, now and at this point of every replay."""
    _call_and_record(clock_of_thread(), StepClock.pause)


def end_step() -> StepTimes:
    """End the step of this thread's clock; return what was measured since the last one ended."""
    return clock_of_thread().end()


def drop_step() -> None:
    """End a step that nobody has ended."""
    if this_thread.clock is not None and this_thread.clock.is_running:
        this_thread.clock.end()


def abandon_step() -> None:
    """End a step that an error cuts off, so that its time does not count for the next one."""
    if this_thread.clock is not None:
        this_thread.clock.abandon()


def _call_and_record(clock: StepClock, function: Callable[..., None], *arguments: str) -> None:
    if this_thread.recorder is not None:
        this_thread.recorder.nodes.append(ClockCall(function, arguments))
    function(clock, *arguments)
