# SPDX-License-Identifier: Apache-2.0
"""The Chrome trace events of a job, from the parts of its processes.

What does not live here: reading a part (trace_part.py), the files of a trace (trace_file.py).
Format: "Trace Event Format" of Chromium, which chrome://tracing and ui.perfetto.dev open; times are microseconds.

Note [threads of a trace]: a rank is a process of the trace, after a restart of the job another one. Its threads are
what the host did: "compute" (forward, backward, update), "exchange" (pack, compress, decompress) and "wait"; and
"wire", the collectives, each from its call until the last rank had called it, and then until it ended. Collectives that
overlap are on several wires.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
        process: that rank's in the trace.
        step: of this rank; others may make a step more, or write fewer.
        key: equal on all ranks for this collective, and for no other one: the job's restart, the communicator's
            members, number and name, and which of these it is, as ranks may have several communicators in common.
        waited: of the clock, times corrected to rank 0's.
        times: those of ``waited``.
    """

    process: int
    step: int
    key: tuple[object, ...]
    waited: Waited
    times: tuple[float, float, float]


def chrome_trace(parts: Mapping[int, Part]) -> dict[str, Any]:
    """Return the trace of the parts, by process: a JSON object with its events, and metadata about clocks."""
    offsets = {part.restart: part.offsets for part in parts.values() if part.offsets}
    shifted = {
        process: _shifted(part, offsets.get(part.restart, {}).get(part.rank or 0, []))
        for process, part in parts.items()
    }
    collectives = [each for process, part in shifted.items() for each in _collectives(process, part)]
    steps = [step for part in shifted.values() for step in part.steps]
    start = min((span.start for _, _, spans, _ in steps for span in spans), default=0.0)
    events: list[Event] = []
    named: set[str] = set()
    for process, part in sorted(shifted.items()):
        name = f"rank {part.rank} on {part.host}{_restart(part.restart)}"
        if not part.host or name in named:  # a child of the rank
            name = f"process {part.pid}"
        named.add(name)
        events.append(_named("process_name", name, process))
        events += _host_events(process, part)
    events += _wire_events(collectives, shifted)
    for event in events:
        if "ts" in event:  # seconds of rank 0's clock so far
            event["ts"] = 1e6 * (event["ts"] - start)
    clocks = {
        f"rank {rank}{_restart(restart)}": {
            "offset_s": [one.offset_s for one in known],
            "error_s": max(one.error_s for one in known),
        }
        for restart, of_ranks in offsets.items()
        for rank, known in of_ranks.items()
    }
    cut = sorted({_rank(process, part) for process, part in parts.items() if part.is_cut})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "metadata": {"clocks minus rank 0's": clocks, "ranks with more steps than are here": cut},
    }


def _rank(process: int, part: Part) -> int:
    """Return the rank of a process of the trace; its number there if it has none."""
    return process if part.rank is None else part.rank


def _restart(number: int) -> str:
    return f", restart {number}" if number else ""


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


def _collectives(process: int, part: Part) -> Iterator[TracedCollective]:
    counts: Counter[tuple[object, ...]] = Counter()
    for step, _, _, waited in part.steps:
        for each in waited:
            alike = (part.restart, each.members, each.number, each.name)
            counts[alike] += 1
            if each.times is not None:
                yield TracedCollective(process, step, (*alike, counts[alike]), each, each.times)


def _host_events(process: int, part: Part) -> Iterator[Event]:
    """Yield what the host of a rank did."""
    threads = {thread for _, thread, _, _ in part.steps}
    for thread in threads:
        for number, name in THREADS.items():
            yield _named("thread_name", name, process, thread * PER_THREAD + number)
    for step, thread, spans, _ in part.steps:
        for span in spans:
            if span.end > span.start:
                number = thread * PER_THREAD + THREAD_OF.get(span.phase, COMPUTE)
                yield _complete(process, number, step, span.name, span.phase, span.start, span.end)


def _wire_events(collectives: Sequence[TracedCollective], parts: Mapping[int, Part]) -> Iterator[Event]:
    """Yield the collectives of all ranks, with arrows from what started each to what followed the wait for it."""
    of_key: dict[object, list[TracedCollective]] = defaultdict(list)
    for each in collectives:
        of_key[each.key].append(each)
    steps = {
        (process, step): (thread, spans)
        for process, part in parts.items()
        for step, thread, spans, _ in part.steps
    }
    num_ranks = Counter(part.restart for part in parts.values() if part.host)
    wires: dict[int, list[float]] = defaultdict(list)  # of a process: when each of its wires is free
    for number, each in enumerate(sorted(collectives, key=lambda one: one.times[0])):
        process, step, key, waited, (posted, there, ended) = each
        there, ended = max(posted, there), max(posted, there, ended)
        wire = next((k for k, free in enumerate(wires[process]) if free <= posted), len(wires[process]))
        if wire == len(wires[process]):
            yield _named("thread_name", "wire" if wire == 0 else f"wire {wire + 1}", process, WIRE + wire)
            wires[process].append(ended)
        wires[process][wire] = ended
        num_members = len(waited.members) or num_ranks[parts[process].restart]
        last = _last_process(each, of_key[key], num_members)
        facts: dict[str, Any] = {"bytes_sent": waited.bytes_sent, "kind": waited.kind}
        if last is not None:
            facts["last_rank"] = _rank(last, parts[last])
        if there > posted and last != process:
            who = "another rank" if last is None else f"rank {facts['last_rank']}"
            yield _complete(
                process, WIRE + wire, step, waited.name, f"waits for {who}", posted, there, **facts
            )
        yield _complete(process, WIRE + wire, step, waited.name, waited.kind, there, ended, **facts)
        yield from _arrow(number, each, *steps[process, step], WIRE + wire)


def _arrow(
    number: int, one: TracedCollective, thread: int, spans: Sequence[Span], wire: int
) -> Iterator[Event]:
    """Yield the arrow from what called a collective, over its wire, to what followed the wait for it."""
    posted, there, _ = one.times
    before, after = _span_at(spans, posted), _span_at(spans, one.waited.end)
    if before is None or after is None:
        return
    arrow = {"id": number, "name": "gradient", "cat": "gradient", "pid": one.process}
    first, last = (thread * PER_THREAD + THREAD_OF.get(span.phase, COMPUTE) for span in (before, after))
    yield {**arrow, "ph": "s", "ts": posted, "tid": first}
    yield {**arrow, "ph": "t", "ts": max(posted, there), "tid": wire}
    yield {**arrow, "ph": "f", "bp": "e", "ts": one.waited.end, "tid": last}


def _last_process(one: TracedCollective, same: Sequence[TracedCollective], num_members: int) -> int | None:
    """Return which process called a collective last: the one whose call was nearest to when all were there.

    None if it may have been one of the ``num_members`` that has not written it, as where it was killed in the step.
    """
    there = one.times[1]
    nearest = min(same, key=lambda each: abs(each.times[0] - there))
    is_whole = len(same) >= num_members
    return nearest.process if is_whole or nearest.times[0] == there else None


def _span_at(spans: Sequence[Span], now: float) -> Span | None:
    """Return what the host did at a time, waits not counted."""
    return next((span for span in spans if span.start <= now <= span.end and span.phase != "wait"), None)


def _complete(
    process: int, thread: int, step: int, of: str, name: str, start: float, end: float, **facts: Any
) -> Event:
    """Return an event that lasts from ``start`` to ``end``, seconds; ``of``: what it is part of, if anything."""
    event = {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": start, "dur": 1e6 * (end - start)}
    return {**event, "args": {"step": step, **({"of": of} if of else {}), **facts}}


def _named(kind: str, name: str, process: int, thread: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
