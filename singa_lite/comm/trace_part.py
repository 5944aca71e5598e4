# SPDX-License-Identifier: Apache-2.0
"""One process's part of a trace: what its file holds, read with every value checked.

What does not live here: writing it (graph/trace.py), joining the parts of a job (trace_file.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CommError
from ..graph.clock import Span, Waited
from .clock_offset import Offset
from .work import Times

LATEST_S = 1e15  # of times and numbers in a part


@dataclass
class Part:
    """The part of a trace that one process wrote.

    Attributes:
        pid: of the process.
        rank: that in the environment or the world; None: neither is there.
        host: "" if the process has joined no world.
        restart: how often the job had been started again.
        steps: of each its number, the thread, spans and collectives.
        offsets: of other ranks' clocks, if this is rank 0's.
        is_cut: whether there were more steps than a part holds.
    """

    pid: int = 0
    rank: int | None = None
    host: str = ""
    restart: int = 0
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
        works = [_waited(values) for values in line["waited"]]
        part.steps.append((_whole(line["step"]), _whole(line["thread"]), spans, works))
    elif "offset" in line:
        part.offsets.setdefault(_whole(line["offset_of"]), []).append(Offset(*_seconds(line["offset"], 3)))
    else:
        part.is_cut |= line.get("is_cut", False) is True
        part.pid, part.host = _whole(line.get("pid", part.pid)), str(line.get("host", part.host))
        part.rank = part.rank if line.get("rank") is None else _whole(int(line["rank"]))
        part.restart = part.restart if line.get("restart") is None else _whole(int(line["restart"]))


def _waited(values: Any) -> Waited:
    """Return a collective of JSON; ValueError or TypeError if it is not what a process writes."""
    name, kind, sent, times, start, end, number, members = values
    known = None if times is None else Times(*_seconds(times, 3))
    start, end = _seconds((start, end), 2)
    of = _whole(number), tuple(map(_whole, members))
    return Waited(str(name), str(kind), _whole(sent), known, start, end, *of)


def _seconds(values: Sequence[Any], count: int) -> list[float]:
    """Return ``values`` as times; ValueError or TypeError unless they are ``count`` times."""
    if len(values) != count or not all(abs(value) < LATEST_S for value in values):
        raise ValueError(f"{values!r:.100} are not {count} times")
    return list(values)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LATEST_S:
        raise ValueError(f"expected a whole number, got {value!r:.100}")
    return value
