# SPDX-License-Identifier: Apache-2.0
"""The clock of a thread: laps without holes, waits apart, steps that are paused and resumed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from singa_lite.config import this_thread
from singa_lite.graph import clock as clock_module
from singa_lite.graph.clock import (
    StepClock,
    Waited,
    begin_step,
    clock_of_thread,
    end_step,
    without_empty_laps,
)
from singa_lite.graph.nodes import ClockCall, Host
from singa_lite.sync.step_seconds import covered, step_seconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A time that tests set."""
    time = [0.0]
    monkeypatch.setattr(clock_module, "perf_counter", lambda: time[0])
    return time


class Written:
    """Stands for a TraceWriter."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def add_step(self, spans: Any, waited: Any) -> None:
        self.spans += spans


def wait(start: float, end: float, num_bytes: int = 8, times: Any = None) -> Waited:
    return Waited("w", "all_reduce", num_bytes, times, start, end)


def test_laps_and_waits_add_up_to_the_step(now):
    written = Written()
    clock = StepClock(written)
    now[0] = 10.0
    clock.begin()
    now[0] = 13.0
    clock.lap("forward", "")
    clock.waited(wait(14.0, 16.0))
    clock.waited(wait(16.5, 17.0))
    now[0] = 20.0
    clock.lap("compress", "b")
    times = clock.end()
    assert times.seconds == {"forward": 3.0, "compress": 4.5, "wait": 2.5}
    assert [tuple(span) for span in written.spans] == [
        ("forward", "", 10.0, 13.0),
        ("compress", "b", 13.0, 14.0),
        ("wait", "w", 14.0, 16.0),
        ("compress", "b", 16.0, 16.5),
        ("wait", "w", 16.5, 17.0),
        ("compress", "b", 17.0, 20.0),
    ]
    assert all(one.end == other.start for one, other in pairwise(written.spans))


def test_a_wait_within_another_counts_once(now):
    written = Written()
    clock = StepClock(written)
    clock.begin()
    clock.waited(wait(2.0, 3.0))
    clock.waited(wait(1.0, 4.0))
    now[0] = 5.0
    clock.lap("update", "")
    assert clock.end().seconds == {"update": 2.0, "wait": 3.0}
    assert [(span.phase, span.start, span.end) for span in written.spans] == [
        ("update", 0.0, 1.0),
        ("wait", 1.0, 4.0),
        ("update", 4.0, 5.0),
    ]


def test_a_pause_does_not_count(now):
    clock = StepClock()
    clock.begin()
    now[0] = 1.0
    clock.lap("backward", "")
    clock.pause()
    now[0] = 5.0
    clock.lap("backward", "")
    clock.waited(wait(4.0, 5.0))
    clock.begin()
    now[0] = 7.0
    clock.lap("backward", "")
    assert clock.end().seconds == {"backward": 3.0}
    assert clock.end().seconds == {}


def test_begin_leaves_a_lap_that_runs_alone(now):
    clock = StepClock()
    clock.begin()
    now[0] = 2.0
    clock.begin()
    now[0] = 3.0
    clock.lap("forward", "")
    assert clock.end().seconds == {"forward": 3.0}


def test_a_recorded_lap_is_of_the_thread_that_replays(now):
    node = ClockCall(StepClock.lap, ("pack", "b"))
    before, this_thread.clock = this_thread.clock, None
    try:
        begin_step()
        now[0] = 4.0
        node()
        assert end_step().seconds == {"pack": 4.0}
        assert clock_of_thread() is this_thread.clock
    finally:
        this_thread.clock = before


def test_laps_with_nothing_between_become_one():
    laps = [ClockCall(StepClock.lap, (phase, "")) for phase in ("backward", "pack", "compress", "update")]
    host = Host(print, (), sees_arrays=False)
    assert without_empty_laps([laps[0], laps[1], host, laps[2], laps[3]]) == [laps[0], host, laps[2]]
    pause = ClockCall(StepClock.pause, ())
    assert without_empty_laps([laps[0], pause]) == [laps[0], pause]


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [([], 0.0), ([(1, 3)], 2.0), ([(2, 5), (1, 3)], 4.0), ([(1, 9), (2, 3)], 8.0), ([(1, 2), (4, 6)], 3.0)],
)
def test_the_union_of_intervals(intervals, expected):
    assert covered(intervals) == expected


def test_what_is_hidden_of_the_wire():
    clock = StepClock()
    clock.begin()
    clock.waited(wait(5.0, 8.0, 30, (1.0, 2.0, 6.0)))
    clock.waited(wait(8.0, 9.0, 12, (3.0, 8.5, 9.0)))
    times = clock.end()
    seconds = step_seconds(times, 42)
    assert seconds.wire == 4.0 + 0.5
    assert seconds.hidden == 3.0  # from 2 to 5
    assert seconds.overlap == 3.0 / 4.5
    assert step_seconds(times, 43).wire is None  # another collective was not waited for
    assert step_seconds(times, 43).overlap is None


def test_times_that_are_not_known():
    clock = StepClock()
    clock.begin()
    clock.waited(wait(5.0, 8.0, 30, (1.0, 2.0, 6.0)))
    clock.waited(wait(8.0, 9.0, 12))
    assert step_seconds(clock.end(), 42).wire is None


def test_a_step_without_an_end_is_written_all_the_same(now, monkeypatch):
    monkeypatch.setattr(clock_module, "MAX_SPANS", 3)
    written = Written()
    clock = StepClock(written)
    clock.begin()
    for number in range(10):
        now[0] = float(number)
        clock.lap("backward", "")
    assert len(written.spans) == 9
    clock.end()
    assert [span.end for span in written.spans] == list(range(10))
