# SPDX-License-Identifier: Apache-2.0
"""The Chrome trace events of a job, from the parts of its processes.

What does not live here: reading a part (trace_part.py), the files of a trace (trace_file.py).
Format: "Trace Event Format" of Chromium, which chrome://tracing and ui.perfetto.dev open; times are microseconds.

Note [threads of a trace]: a rank is a process of the trace. Its threads are what the host did: "compute" (forward,
backward, update), "exchange" (pack, compress, decompress) and "wait"; and "wire", the collectives, each from its call
until the last rank had called it, and then until it ended. Collectives that overlap are on several wires.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..graph.clock import Span, Waited
from .clock_offset import Offset, offset_at
from .trace_part import Part
from .work import Times

Event = dict[str, Any]
COMPUTE, EXCHANGE, WAIT, WIRE = range(4)
THREADS = {COMPUTE: "compute", EXCHANGE: "exchange", WAIT: "wait"}  # from WIRE on: wires
THREAD_OF = {"pack": EXCHANGE, "compress": EXCHANGE, "decompress": EXCHANGE, "wait": WAIT}  # else COMPUTE
PER_THREAD = 100  # threads of the trace for each thread of a process


class TracedCollective(NamedTuple):
    """A collective of a step as one rank saw it.

    Attributes:
        rank: that one.
        key: equal on all ranks for one collective: step, name, and how many of that name came before in the step.
        waited: of the clock, times corrected to rank 0's.
    """

    rank: int
    key: tuple[int, str, int]
    waited: Waited


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


def _collectives(rank: int, part: Part) -> Iterator[TracedCollective]:
    for number, _, _, waited in part.steps:
        counts: dict[str, int] = defaultdict(int)
        for each in waited:
            counts[each.name] += 1
            yield TracedCollective(rank, (number, each.name, counts[each.name]), each)


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
    collectives: Sequence[TracedCollective], parts: Mapping[int, Part], start: float
) -> Iterator[Event]:
    """Yield the collectives of all ranks, with arrows from what started each to what followed the wait for it."""
    of_key: dict[tuple[int, str, int], list[TracedCollective]] = defaultdict(list)
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
    number: int, one: TracedCollective, thread: int, spans: Sequence[Span], wire: int, start: float
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


def _posted(one: TracedCollective) -> float:
    return one.waited.times[0] if one.waited.times else 0.0


def _last_rank(one: TracedCollective, same: Sequence[TracedCollective]) -> int:
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
