# SPDX-License-Identifier: Apache-2.0
"""What every rank was doing: one text of all ranks' flight records, with the first call where they differ on top.

What lives here: comparing records, and words for them. What does not: reading records (flight_record.py) and stacks
(stacks.py), when a report is made and where it goes (flight_recorder.py, inspect_job.py).
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .flight_record import ALL_THERE, FAILED, Call, FlightRecord, RankRecord
from .stacks import STOPPED, stacks_of, state_of

SHOWN_CALLS = 4  # of each rank on a terminal; a file has all
DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd")  # in a stack: the process is at the prompt of one


@dataclass(frozen=True)
class Difference:
    """The first call that not all ranks of a communicator have made alike.

    Attributes:
        number: its index in the order of calls.
        calls: the calls of that number, each with the ranks that made it.
        missing: ranks that have not called it.
        unknown: ranks that called it too long ago.
    """

    number: int
    calls: list[tuple[Call, list[int]]] = field(default_factory=list)
    missing: list[RankRecord] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)


def first_difference(record: FlightRecord) -> Difference | None:
    """Return the first call that not all ranks have made alike; None if there is none among those recorded."""
    ranks = [rank for rank in record.ranks if rank.joined]
    behind = min((rank.num_calls for rank in ranks), default=0)
    made: dict[int, set[object]] = defaultdict(set)
    for rank in ranks:
        for call in rank.calls:
            made[call.number].add(call.agreed)
    unlike = [number for number, calls in made.items() if number < behind and len(calls) > 1]
    if not unlike and all(rank.num_calls == behind for rank in ranks):
        return None
    return _difference(ranks, min(unlike, default=behind))


def _difference(ranks: Iterable[RankRecord], number: int) -> Difference:
    """Sort the ranks by their call of that number."""
    found = Difference(number)
    alike: dict[object, tuple[Call, list[int]]] = {}
    for rank in ranks:
        call = next((call for call in rank.calls if call.number == number), None)
        if call is not None:
            if call.agreed not in alike:
                alike[call.agreed] = (call, [])
                found.calls.append(alike[call.agreed])
            alike[call.agreed][1].append(rank.rank)
        elif rank.num_calls <= number:
            found.missing.append(rank)
        else:
            found.unknown.append(rank.rank)
    return found


def late_pids(records: Iterable[FlightRecord], failed: str) -> list[int]:
    """Return the processes that others may wait for: those without the call where their communicator's ranks differ.

    Where all ranks of the communicator with the id ``failed`` have made the call that failed, those still in it, too.
    """
    late: list[RankRecord] = []
    for record in records:
        difference = first_difference(record)
        late += difference.missing if difference else []
        calls = [call for rank in record.ranks for call in rank.calls]
        first = min((call.number for call in calls if not call.is_over), default=0)
        if record.id == failed and (difference is None or difference.number > first):
            late += [rank for rank in record.ranks if any(call.is_in_flight for call in rank.calls)]
    return sorted({rank.pid for rank in late} - {0, os.getpid()})


def full_report(
    records: Sequence[FlightRecord],
    reason: str = "",
    *,
    stacks_for: Collection[int] | None = None,
    num_calls: int = SHOWN_CALLS,
) -> str:
    """Return what every rank of this host is doing, with Python stacks, which take up to a second.

    Args:
        records: one for each communicator.
        reason: why the report is made; "": no failure.
        stacks_for: processes whose stacks are shown; None: all.
        num_calls: how many of each rank's last calls are listed.
    """
    pids = sorted({rank.pid for record in records for rank in record.ranks if rank.pid and rank.joined})
    states = {pid: state_of(pid) for pid in pids}
    now = time.monotonic()
    wanted = [pid for pid in pids if states[pid] and (stacks_for is None or pid in stacks_for)]
    stacks = stacks_of(wanted)
    return report_text(records, reason, states, stacks, now, num_calls)


def report_text(
    records: Sequence[FlightRecord],
    reason: str,
    states: Mapping[int, str],
    stacks: Mapping[int, str],
    now: float,
    num_calls: int,
) -> str:
    """Return the report; ``states`` and ``stacks`` are by process, ``now`` is of ``time.monotonic``."""
    lines = [f"What every rank was doing, {time.strftime('%Y-%m-%d %H:%M:%S')}"]
    if reason:
        lines.append(f"Reason: {reason}")
    if not records:
        lines.append("No record can be read.")
    for record in records:
        lines += _difference_lines(record)
    by_rank: dict[int, list[tuple[FlightRecord, RankRecord]]] = defaultdict(list)
    for record in records:
        for rank in record.ranks:
            by_rank[rank.rank].append((record, rank))
    lines.append("")
    for number in sorted(by_rank):
        lines += _rank_lines(number, by_rank[number], states, stacks, now)
    for number in sorted(by_rank):
        for record, rank in by_rank[number]:
            lines += _last_calls(record, rank, now, num_calls)
    return "\n".join(lines) + "\n"


def describe(call: Call) -> str:
    """Return a call in words, with the user's line."""
    axes = ", ".join(map(str, call.shape)) + ", ..." * call.has_more_axes
    words = [call.kind, f"{call.name!r}", *([call.op] if call.op else []), f"{call.dtype}[{axes}]"]
    if call.wire:
        words.append(f"as {call.wire}")
    if call.kind in ("reduce", "broadcast"):
        words.append(f"root {call.root}")
    return " ".join(words) + (f" at {call.file}:{call.line}" if call.file else "")


def ranks_text(ranks: Iterable[int]) -> str:
    """Return "rank 0, 2"."""
    return "rank " + ", ".join(map(str, ranks))


def _difference_lines(record: FlightRecord) -> list[str]:
    difference = first_difference(record)
    if difference is None:
        is_cut = any(rank.calls and rank.calls[0].number for rank in record.ranks)
        part = " that are recorded" if is_cut else ""
        unknown = [rank.rank for rank in record.ranks if not rank.joined]
        but = f", but for {ranks_text(unknown)}, of which there is no record here" if unknown else ""
        return ["", f"The ranks do not differ in the calls{part} of the {record.title}{but}."]
    lines = ["", f"First call where ranks differ: #{difference.number} of the {record.title}"]
    lines += [f"  {ranks_text(ranks)}: {describe(call)}" for call, ranks in difference.calls]
    for rank in difference.missing:
        last = f"the last call is #{rank.calls[-1].number} {describe(rank.calls[-1])}" if rank.calls else ""
        lines.append(f"  rank {rank.rank} has not called it; {last or 'it has called nothing'}")
    if difference.unknown:
        lines.append(f"  {ranks_text(difference.unknown)} called it too long ago to be recorded")
    return lines


def _rank_lines(
    number: int,
    parts: Sequence[tuple[FlightRecord, RankRecord]],
    states: Mapping[int, str],
    stacks: Mapping[int, str],
    now: float,
) -> list[str]:
    """Return where a rank is, and its stack."""
    known = [(record, rank) for record, rank in parts if rank.joined]
    if not known:
        return [
            f"rank {number}: it has no record here: it is on another host, has not joined or does not record"
        ]
    pid = known[0][1].pid
    state = states.get(pid) or "ended"
    stack = stacks.get(pid, "")
    if any(name in stack for name in DEBUGGERS):
        state += ", in a debugger"
    calls = [(record, call) for record, rank in known for call in rank.calls]
    times = [rank.joined for _, rank in known]
    times += [at for _, call in calls for at in (call.called, call.ended)]
    sign = f"last sign of life {_ago(max(times), now)}"
    if state in STOPPED.values() and not stack:
        stack = f"none: the process is {state}"
    lines = [f"rank {number} (process {pid}, {state}): {_current_call(calls, now)}; {sign}"]
    if stack:
        lines += [f"  Python stack of rank {number}:", *(f"    {line}" for line in stack.splitlines())]
    return lines


def _current_call(calls: Sequence[tuple[FlightRecord, Call]], now: float) -> str:
    """Return in which call a rank is, the oldest that has not ended, or after which."""
    if not calls:
        return "it has called no collective"
    open_calls = [(record, call) for record, call in calls if not call.is_over]
    if not open_calls:
        record, call = max(calls, key=lambda one: one[1].ended)
        ended = "was seen to have ended" if record.is_of_gpus else "ended"
        return f"after #{call.number} of the {record.title}, {describe(call)}, which {ended} {_ago(call.ended, now)}"
    # the host waits in those of its own
    record, call = min(open_calls, key=lambda one: (one[0].is_of_gpus, one[1].called))
    called = {True: "all ranks have called it", False: "not all ranks have called it", None: ""}
    is_called = call.state == ALL_THERE or record.is_called_by_all(call.number)
    how = ["failed" if call.state == FAILED else called[is_called]]
    if record.is_of_gpus and call.state != FAILED:
        how.append("its end not seen yet")
    if len(open_calls) > 1:
        how.append(f"and {len(open_calls) - 1} others")
    text = f"in #{call.number} of the {record.title}, {describe(call)}, called {_ago(call.called, now)}"
    return ", ".join([text, *filter(None, how)])


def _last_calls(record: FlightRecord, rank: RankRecord, now: float, num_calls: int) -> list[str]:
    if not rank.calls:
        return []
    lines = ["", f"Last calls of rank {rank.rank} in the {record.title}, {rank.num_calls} in all:"]
    for call in rank.calls[-num_calls:]:
        end = "ended" if call.is_over else "failed" if call.state == FAILED else ""
        how = f"{end} {_ago(call.ended, now)}" if end else "in flight"
        lines.append(f"  #{call.number} {describe(call)}, called {_ago(call.called, now)}, {how}")
    return lines


def _ago(at: float, now: float) -> str:
    seconds = max(now - at, 0.0)
    return f"{seconds:.2f} s ago" if seconds <= now else "at an unknown time"
