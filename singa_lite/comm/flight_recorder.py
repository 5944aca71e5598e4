# SPDX-License-Identifier: Apache-2.0
"""The flight recorder of a communicator: it keeps what each rank called last, and reports when a collective fails.

What lives here: this process's side. What does not: the memory (native/comm/flight_recorder.h), reading other
processes' (flight_record.py), the report's text (flight_report.py), reports that people request (inspect_job.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..config import env, is_on, state
from ..error_stream import tell
from ..errors import CommError
from .call_site import CallSites
from .flight_record import (
    FILE,
    SEGMENT,
    FlightRecord,
    files_of,
    inodes_of,
    record_of,
    records_from,
    records_of_process,
)
from .flight_report import full_report, late_pids, ranks_text
from .stacks import write_stacks

REPORT = "what every rank was doing"  # in an error, before the path of the report
SHOWN_CHARS = 64  # of a name, in a warning
ALL_CALLS = 64  # kFlightCalls of native/comm/flight_recorder.h
TITLE_BYTES = 108  # of FlightHeader there
WARN_SHARE = 0.1  # of the time-out, as kWarnShare of native/comm/engine.h
APPEAR_S = 0.1  # for the file that another rank has begun to write


def is_recording() -> bool:
    """Return whether this process records; SINGA_LITE_FLIGHT_RECORDER=off is for measuring what that costs."""
    return is_on("SINGA_LITE_FLIGHT_RECORDER", default=True)


def title_of(members: Sequence[int], name: str, what: str = "") -> str:
    """Return what reports call a communicator: "world", or a group by its name and members, and ``what`` else it is."""
    title = f"group {name!r} of {ranks_text(members)}" if members else "world"
    if len(title.encode()) > TITLE_BYTES - len(what):
        title = title.encode()[: TITLE_BYTES - len(what) - 3].decode(errors="ignore") + "..."
    return title + what


class FlightRecorder(ABC):
    """Recorder of the last collectives of one communicator.

    Args:
        world_id: that of the world of which this is a group, or the communicator's own; names the file of reports.
    """

    def __init__(self, world_id: str) -> None:
        self.sites = CallSites()
        self.world_id = world_id
        self._process = os.getpid()
        write_stacks()
        living = (known for known in state.flight_recorders if known() is not None)
        state.flight_recorders = (*living, weakref.ref(self))

    @abstractmethod
    def read(self) -> FlightRecord:
        """Return what is known here; CommError if the communicator is closed."""

    @abstractmethod
    def is_first_failure(self) -> bool:
        """Return whether this rank failed for a reason of its own, which it has told the others; True once."""

    @abstractmethod
    def claim_report(self) -> bool:
        """Return whether no rank of this communicator has claimed to report before."""

    @abstractmethod
    def is_reported(self) -> bool:
        """Return whether a rank of this communicator has claimed to report; CommError if this is closed."""

    def warn(
        self, kind: str, number: int, name: str, rank: int, late: Sequence[int], waited_s: float
    ) -> None:
        """Write to the error stream which ranks this one waits for, and where."""
        file, line = self.sites.find(kind, name)
        where = f" ({file}:{line})" if file else ""
        shown = name if len(name) <= SHOWN_CHARS else name[:SHOWN_CHARS] + "..."
        tell(
            f"singa_lite: warning: rank {rank} has waited {waited_s:.3g} s in {kind} #{number} {shown!r}{where} for "
            f"{ranks_text(late)}; `singa-lite inspect {os.getpid()}` shows what every rank is doing\n"
        )

    def report(self, error: CommError) -> None:
        """Write what every rank was doing, if no other rank does, and add to the error's text where it is."""
        # raised again, passed on by another rank, or of a forked child
        if REPORT in str(error) or self._process != os.getpid():
            return
        try:
            if self.is_first_failure() and self.claim_report():
                records = records_of_this_process()
                where = deliver(records, str(error), late_pids(records, self.read().id), self.world_id)
            else:
                where = self._appeared()
        except (OSError, ValueError, CommError) as failure:
            where = f"not written: {failure}"
        if where:
            error.args = (f"{error}; {REPORT}: {where}",)

    def _appeared(self) -> str:
        """Return the file where another rank reports this communicator's failure, "" if it does not begin soon."""
        path = report_path(self.world_id)
        deadline = time.monotonic() + APPEAR_S
        with contextlib.suppress(CommError):  # closed
            while path is not None:
                if self.is_reported() and path.exists():
                    return str(path)
                if time.monotonic() > deadline:
                    break
                time.sleep(APPEAR_S / 10)
        return ""


class EngineRecorder(FlightRecorder):
    """The recorder of a shared-memory communicator, in whose segment its native ``engine`` records by itself."""

    def __init__(self, engine: Any, world_id: str) -> None:
        super().__init__(world_id)
        self._engine = engine

    def read(self) -> FlightRecord:
        return record_of(self._engine.read_record())

    def is_first_failure(self) -> bool:
        return bool(self._engine.take_first_failure())

    def claim_report(self) -> bool:
        return bool(self._engine.claim_report())

    def is_reported(self) -> bool:
        return self.read().is_reported


class FileRecorder(FlightRecorder):
    """The recorder of a communicator whose ranks share no memory: a file in each process.

    Args:
        native: the module with FlightFile.
        rank: of this process in the communicator.
        members: its ranks in the world.
        processes: (host, process) of each.
        identity: the same on all ranks, and of this communicator alone.
        title: see ``title_of``.
        world_id: of a group, that of its world; "": ``identity``.
    """

    def __init__(
        self,
        native: Any,
        rank: int,
        members: Sequence[int],
        processes: Sequence[tuple[str, int]],
        identity: str,
        title: str,
        world_id: str,
    ) -> None:
        super().__init__(world_id or identity)
        self._native, self._file, self._rank = native, native.FlightFile(len(members)), rank
        self._file.describe(identity, title)
        self._file.join(rank, processes[rank][1], members[rank])
        here = processes[rank][0]
        for other, (host, pid) in enumerate(processes):
            if other != rank:
                self._file.name_rank(other, pid if host == here else 0, members[other])
        self._leader = next(pid for host, pid in processes if host == here)
        self.has_failed = False

    def start(
        self, codes: Sequence[int], shape: tuple[int, ...], count: int, number: int, kind: str, name: str
    ) -> None:
        """Record a call; ``codes`` are numbers of native/comm/types.h: kind, op, dtype, wire dtype and root."""
        self._file.start(self._rank, *codes, shape, count, number, name, *self.sites.find(kind, name))

    def all_there(self, number: int) -> None:
        """Record that all ranks have made the call."""
        self._file.all_there(self._rank, number)

    def end(self, number: int, is_good: bool) -> None:
        """Record the end of a call."""
        self._file.end(self._rank, number, is_good)

    def read(self) -> FlightRecord:
        return record_of(self._file.read_record())

    def is_first_failure(self) -> bool:
        has_failed, self.has_failed = self.has_failed, False
        return has_failed

    def claim_report(self) -> bool:
        if self._leader == os.getpid():
            return bool(self._file.claim_report())
        mine = self.read().id
        claims = [self._native.claim_report(path, mine) for path in files_of(self._leader, FILE)]
        return not any(claim is False for claim in claims)

    def is_reported(self) -> bool:
        mine = self.read()
        if self._leader == os.getpid():
            return mine.is_reported
        shared = set(inodes_of(files_of(os.getpid(), SEGMENT)))  # Note [locks] in native/comm/segment.cc
        claims = records_of_process(self._leader, shared)
        return any(each.is_reported for each in claims if each.id == mine.id)


def records_of_this_process() -> list[FlightRecord]:
    """Return the records of this process's communicators, and of all processes of this host that these name."""
    own = []
    for reference in state.flight_recorders:
        if (recorder := reference()) is not None:
            with contextlib.suppress(CommError):  # it is closed
                own.append(recorder.read())
    return records_from([], own)


def report_path(world_id: str, folder: str | Path | None = None) -> Path | None:
    """Return the file for reports of a world; None if there is no folder for it, nor SINGA_LITE_LOG_DIR."""
    folder = folder or env("SINGA_LITE_LOG_DIR")
    name = re.sub("[^A-Za-z0-9_]", "", world_id)[:16]
    return Path(folder) / f"flight-record-{name}.txt" if folder else None


def deliver(
    records: Sequence[FlightRecord], reason: str, stacks_for: Sequence[int] | None, world_id: str
) -> str:
    """Write a report into the folder of logs, else to the error stream; return where it is, "" for the stream."""
    path = report_path(world_id)
    if path is None:
        tell(full_report(records, reason, stacks_for=stacks_for))
        return ""
    # the file is there at once, as other ranks look for it
    append(path, lambda: full_report(records, reason, stacks_for=stacks_for, num_calls=ALL_CALLS))
    return str(path)


def append(path: Path, make: Callable[[], str]) -> None:
    """Add the report that ``make`` returns to the file of a world."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(make() + "\n")
