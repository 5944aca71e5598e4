# SPDX-License-Identifier: Apache-2.0
"""A trace of a job: its processes' parts joined to one file of Chrome trace events.

What lives here: starting a part when a process joins its world, and joining the parts. What does not: what a part holds
(graph/trace.py, graph/clock.py), clocks of other hosts (clock_offset.py).
Format: "Trace Event Format" of Chromium, which chrome://tracing and ui.perfetto.dev open; times are microseconds.

Note [threads of a trace]: a rank is a process of the trace. Its threads are what the host did: "compute" (forward,
backward, update), "exchange" (pack, compress, decompress) and "wait"; and "wire", the collectives, each from its call
until the last rank had called it, and then until it ended. Collectives that overlap are on several wires.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..config import env
from ..errors import CheckpointError, CommError, OptionError
from ..files import atomic_file
from ..graph.clock import Span, Waited
from ..graph.trace import SUFFIX, TraceWriter, trace_of_process
from .base import Communicator
from .clock_offset import Offset, measure_offset, offset_at, pairs_with_rank_0
from .work import Times

Event = dict[str, Any]
LEAVE_S = 2.0  # that a rank waits at its end for each comparison of clocks
COMPUTE, EXCHANGE, WAIT, WIRE = range(4)
THREADS = {COMPUTE: "compute", EXCHANGE: "exchange", WAIT: "wait"}  # from WIRE on: wires
THREAD_OF = {"pack": EXCHANGE, "compress": EXCHANGE, "decompress": EXCHANGE, "wait": WAIT}  # else COMPUTE
LATEST_S = 1e15  # of times and numbers in a part
PER_THREAD = 100  # threads of the trace for each thread of a process


def parts_folder(path: Path) -> Path:
    """Return the folder for the parts of the trace ``path``."""
    return path.with_name(f"{path.name}.parts")


@contextlib.contextmanager
def tracing(path: Path | None) -> Iterator[dict[str, str]]:
    """Join a trace after the ``with`` block, whose processes have the variables that this gives, however it ends.

    Args:
        path: of the trace; replaced if there is one. None: no trace.

    Raises:
        OptionError: its folder is missing, or it cannot be written there.
    """
    if path is None:
        yield {}
        return
    path = path.absolute()
    folder = parts_folder(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        folder.mkdir(exist_ok=True)
        for part in _parts_in(folder):  # of a launcher that was killed
            part.unlink()
    except OSError as error:
        raise OptionError(f"--trace {path}: cannot be written: {error}") from error
    try:
        yield {"SINGA_LITE_TRACE": str(folder)}
    finally:
        try:
            message = join_trace(folder, path)
        except (CommError, CheckpointError, OSError) as error:
            message = str(error)
        sys.stderr.write(f"singa-lite: {message}\n")


def start_trace(communicator: Communicator) -> None:
    """Write to this process's part, if a trace is asked for, which rank it is, and how far other hosts' clocks are off.

    All ranks must call it, and all have SINGA_LITE_TRACE or none. The clocks are compared again when the process ends,
    if no rank has failed.
    """
    writer = trace_of_process()
    if writer is None:
        return
    if communicator.is_alone and env("SINGA_LITE_RANK") not in (None, "0"):
        return  # a world of one within a rank
    writer.add_facts(rank=communicator.rank, host=os.uname().nodename)
    pairs = {} if communicator.is_alone else pairs_with_rank_0(communicator)
    for pair in pairs.values():
        pair.flight_recorder = None  # a peer that is late here is no failure
    _compare_clocks(pairs, writer)
    if pairs:
        atexit.register(_compare_clocks_again, pairs, writer)


def _compare_clocks(
    pairs: Mapping[int, Communicator], writer: TraceWriter, timeout_s: float | None = None
) -> None:
    for rank, pair in pairs.items():
        offset = measure_offset(pair, timeout_s=timeout_s)
        if offset is not None:
            writer.add_facts(offset_of=rank, offset=offset)


def _compare_clocks_again(pairs: Mapping[int, Communicator], writer: TraceWriter) -> None:
    """Compare clocks before this process leaves its world, with peers that end at about the same time."""
    if writer.pid == os.getpid():
        with contextlib.suppress(CommError):
            _compare_clocks(pairs, writer, LEAVE_S)


class Collective(NamedTuple):
    """A collective of a step as one rank saw it.

    Attributes:
        rank: that one.
        key: equal on all ranks for one collective: step, name, and how many of that name came before in the step.
        waited: of the clock, times corrected to rank 0's.
    """

    rank: int
    key: tuple[int, str, int]
    waited: Waited


@dataclass
class Part:
    """What a process wrote.

    Attributes:
        pid: of the process.
        rank: that in the environment or the world; None: neither is there.
        host: "" if the process has joined no world.
        steps: of each its number, the thread, spans and collectives.
        offsets: of other ranks' clocks, if this is rank 0's.
        is_cut: whether there were more steps than a part holds.
    """

    pid: int = 0
    rank: int | None = None
    host: str = ""
    steps: list[tuple[int, int, list[Span], list[Waited]]] = field(default_factory=list)
    offsets: dict[int, list[Offset]] = field(default_factory=dict)
    is_cut: bool = False


def read_part(lines: Sequence[bytes], where: str = "") -> Part:
    """Return the part of these lines; the last one may be cut off, as by a kill.

    Args:
        where: their file, for errors.

    Raises:
        CommError: another line is not what a process writes.
    """
    part = Part()
    for number, text in enumerate(lines, 1):
        try:
            _add_line(part, json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            if number < len(lines) or not isinstance(error, json.JSONDecodeError):
                raise CommError(
                    f"trace: line {number} of {where or 'a part'} is damaged: {error!r}"
                ) from error
    return part


def _add_line(part: Part, line: Any) -> None:
    """Add what a line of JSON says; one of several errors if it is not what a process writes."""
    if "step" in line:
        spans = [Span(str(phase), str(name), *_seconds(times, 2)) for phase, name, *times in line["spans"]]
        works = [
            Waited(
                str(name),
                str(kind),
                _whole(sent),
                None if times is None else Times(*_seconds(times, 3)),
                *_seconds(ends, 2),
            )
            for name, kind, sent, times, *ends in line["waited"]
        ]
        part.steps.append((_whole(line["step"]), _whole(line["thread"]), spans, works))
    elif "offset" in line:
        part.offsets.setdefault(_whole(line["offset_of"]), []).append(Offset(*_seconds(line["offset"], 3)))
    else:
        part.is_cut |= line.get("is_cut", False) is True
        part.pid, part.host = _whole(line.get("pid", part.pid)), str(line.get("host", part.host))
        part.rank = part.rank if line.get("rank") is None else _whole(int(line["rank"]))


def _seconds(values: Sequence[Any], count: int) -> list[float]:
    """Return so many times; ValueError or TypeError if they are none."""
    if len(values) != count or not all(abs(value) < LATEST_S for value in values):
        raise ValueError(f"{values!r:.100} are not {count} times")
    return list(values)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LATEST_S:
        raise ValueError(f"{value!r:.100} is no whole number")
    return value


def join_trace(folder: Path, path: Path) -> str:
    """Join the parts of a trace in ``folder``, write it to ``path`` and remove them; return a line about it.

    Raises:
        CommError: there are no parts, or one is damaged. OSError, CheckpointError: a file cannot be read or written.
            The parts stay.
    """
    files = _parts_in(folder)
    parts = [read_part(file.read_bytes().splitlines(), str(file)) for file in files]
    if not parts:
        raise CommError(
            f"trace {path}: no process has written a part to {folder}, which all hosts of the job must share"
        )
    known: dict[int, Part] = {}
    for part in sorted(
        parts, key=lambda part: (part.rank is None, part.host == "")
    ):  # first those of a world
        known[_free_rank(part, known)] = part
    trace = chrome_trace(known)
    with atomic_file(path) as written:
        written.write(json.dumps(trace).encode())
    for file in files:
        file.unlink()
    with contextlib.suppress(OSError):  # other files are in it
        folder.rmdir()
    cut = ", of the first steps alone" if any(part.is_cut for part in parts) else ""
    return f"trace of {len(known)} processes{cut}: {path}; open it in ui.perfetto.dev or chrome://tracing"


def _parts_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def _free_rank(part: Part, known: Mapping[int, Part]) -> int:
    """Return the rank of a part, or the next free number for a process that is no rank or a child of one."""
    return part.rank if part.rank is not None and part.rank not in known else max(known, default=-1) + 1


def chrome_trace(parts: Mapping[int, Part]) -> dict[str, Any]:
    """Return the trace of the parts, by rank: a JSON object with its events, and metadata about clocks."""
    offsets = parts[0].offsets if 0 in parts else {}
    shifted = {rank: _shifted(part, offsets.get(rank, [])) for rank, part in parts.items()}
    collectives = [each for rank, part in shifted.items() for each in _collectives(rank, part)]
    start = min((span.start for part in shifted.values() for span in _spans(part)), default=0.0)
    events: list[Event] = []
    for rank, part in sorted(shifted.items()):
        name = f"rank {rank} on {part.host}" if part.host else f"process {part.pid}"
        events.append(_named("process_name", name, rank))
        events += _host_events(rank, part, start)
    events += _wire_events(collectives, shifted, start)
    clocks = {
        f"rank {rank}": {
            "offset_s": [one.offset_s for one in known],
            "error_s": max(one.error_s for one in known),
        }
        for rank, known in offsets.items()
    }
    cut = sorted(rank for rank, part in parts.items() if part.is_cut)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "metadata": {"clocks minus rank 0's": clocks, "ranks with more steps than are here": cut},
    }


def _shifted(part: Part, offsets: Sequence[Offset]) -> Part:
    """Return ``part`` with times of rank 0's clock."""
    if not offsets:
        return part

    def shift(now: float) -> float:
        return now - offset_at(offsets, now)

    steps = []
    for number, thread, spans, waited in part.steps:
        moved = [span._replace(start=shift(span.start), end=shift(span.end)) for span in spans]
        works = [
            each._replace(
                start=shift(each.start),
                end=shift(each.end),
                times=None if each.times is None else Times(*map(shift, each.times)),
            )
            for each in waited
        ]
        steps.append((number, thread, moved, works))
    return replace(part, steps=steps)


def _spans(part: Part) -> Iterator[Span]:
    return (span for _, _, spans, _ in part.steps for span in spans)


def _collectives(rank: int, part: Part) -> Iterator[Collective]:
    for number, _, _, waited in part.steps:
        counts: dict[str, int] = defaultdict(int)
        for each in waited:
            counts[each.name] += 1
            yield Collective(rank, (number, each.name, counts[each.name]), each)


def _host_events(rank: int, part: Part, start: float) -> Iterator[Event]:
    """Yield what the host of a rank did."""
    threads = {thread for _, thread, _, _ in part.steps}
    for thread in threads:
        for number, name in THREADS.items():
            yield _named("thread_name", name, rank, thread * PER_THREAD + number)
    for step, thread, spans, _ in part.steps:
        for span in spans:
            if span.end > span.start:
                number = thread * PER_THREAD + THREAD_OF.get(span.phase, COMPUTE)
                yield _complete(
                    span.phase, rank, number, span.start - start, span.end - start, step, span.name
                )


def _wire_events(
    collectives: Sequence[Collective], parts: Mapping[int, Part], start: float
) -> Iterator[Event]:
    """Yield the collectives of all ranks, with arrows from what started each to what followed the wait for it."""
    of_key: dict[tuple[int, str, int], list[Collective]] = defaultdict(list)
    for each in collectives:
        of_key[each.key].append(each)
    steps = {
        (rank, step): (thread, spans) for rank, part in parts.items() for step, thread, spans, _ in part.steps
    }
    wires: dict[int, list[float]] = defaultdict(list)  # of a rank: when each of its wires is free
    timed = [each for each in collectives if each.waited.times is not None]
    for number, each in enumerate(sorted(timed, key=_posted)):
        rank, (step, name, _), waited = each
        posted, there, ended = waited.times or (0.0, 0.0, 0.0)
        there, ended = max(posted, there), max(posted, there, ended)
        wire = next((k for k, free in enumerate(wires[rank]) if free <= posted), len(wires[rank]))
        if wire == len(wires[rank]):
            yield _named("thread_name", "wire" if wire == 0 else f"wire {wire + 1}", rank, WIRE + wire)
            wires[rank].append(ended)
        wires[rank][wire] = ended
        last = _last_rank(each, of_key[each.key])
        facts = {"bytes_sent": waited.bytes_sent, "kind": waited.kind, "last_rank": last}
        if there > posted and last != rank:
            what = f"waits for rank {last}"
            yield _complete(what, rank, WIRE + wire, posted - start, there - start, step, name, **facts)
        yield _complete(waited.kind, rank, WIRE + wire, there - start, ended - start, step, name, **facts)
        yield from _arrow(number, each, *steps[rank, step], WIRE + wire, start)


def _arrow(
    number: int, one: Collective, thread: int, spans: Sequence[Span], wire: int, start: float
) -> Iterator[Event]:
    """Yield the arrow from what called a collective, over its wire, to what followed the wait for it."""
    waited = one.waited
    posted, there, _ = waited.times or (0.0, 0.0, 0.0)
    before, after = _span_at(spans, posted), _span_at(spans, waited.end)
    if before is None or after is None:
        return
    arrow = {"id": number, "name": "gradient", "cat": "gradient", "pid": one.rank}
    first, last = (thread * PER_THREAD + THREAD_OF.get(span.phase, COMPUTE) for span in (before, after))
    yield {**arrow, "ph": "s", "ts": 1e6 * (posted - start), "tid": first}
    yield {**arrow, "ph": "t", "ts": 1e6 * (max(posted, there) - start), "tid": wire}
    yield {**arrow, "ph": "f", "bp": "e", "ts": 1e6 * (waited.end - start), "tid": last}


def _posted(one: Collective) -> float:
    return one.waited.times[0] if one.waited.times else 0.0


def _last_rank(one: Collective, same: Sequence[Collective]) -> int:
    """Return which rank called a collective last: the one whose call was nearest to when all were there."""
    there = one.waited.times[1] if one.waited.times else 0.0
    timed = [each for each in same if each.waited.times is not None]
    return min(timed, key=lambda each: abs(_posted(each) - there)).rank


def _span_at(spans: Sequence[Span], now: float) -> Span | None:
    """Return what the host did at a time, waits not counted."""
    return next((span for span in spans if span.start <= now <= span.end and span.phase != "wait"), None)


def _complete(
    name: str, rank: int, thread: int, start: float, end: float, step: int, what: str, **facts: Any
) -> Event:
    """Return an event that lasts from ``start`` to ``end``, seconds."""
    event = {
        "ph": "X",
        "name": name,
        "pid": rank,
        "tid": thread,
        "ts": 1e6 * start,
        "dur": 1e6 * (end - start),
    }
    return {**event, "args": {"step": step, **({"of": what} if what else {}), **facts}}


def _named(kind: str, name: str, rank: int, thread: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}
