# SPDX-License-Identifier: Apache-2.0
"""What ranks have written down of their last collectives, as data, and where the records of processes are found.

What lives here: reading. What does not: writing (flight_recorder.py, native/comm/flight_recorder.h), the text that
people read (flight_report.py).

Note [finding records]: a record is in the memory of its communicator, a shared-memory segment or a file of the process,
which has no name in /dev/shm while ranks train, so that nothing is left behind. /proc/PID/fd leads to both.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import _native
from ..errors import CommError

STARTED, ALL_THERE, ENDED, FAILED = range(4)  # FlightState of native/comm/flight_recorder.h
FILE = "/memfd:singa_lite-flight"
SEGMENT = "/dev/shm/singa_lite-"


@dataclass(frozen=True)
class Call:
    """A collective that a rank has called.

    Attributes:
        number: its index in the order of calls, from 0.
        kind, op, dtype, wire, root, name: see ``base.Operation``; "" for no op or no narrower wire; of a long name the
            beginning and "...".
        name_hash: of all of the name.
        count: elements this rank puts in; of one block where there is one for each rank.
        shape: of its array; of more than four axes the first, and ``has_more_axes``.
        file, line: of the user's first call of this kind and name; "" and 0 if there is none. Of a long path the end.
        state: STARTED, ALL_THERE, ENDED or FAILED.
        called, all_there, ended: seconds of ``time.monotonic``; 0.0 until then.
    """

    number: int
    kind: str
    op: str
    dtype: str
    wire: str
    root: int
    count: int
    name: str
    name_hash: int
    shape: tuple[int, ...]
    has_more_axes: bool
    file: str
    line: int
    state: int
    called: float
    all_there: float
    ended: float

    @property
    def agreed(self) -> tuple[object, ...]:
        """What must be equal on all ranks."""
        root = self.root if self.kind in ("reduce", "broadcast") else 0
        return (self.kind, self.op, self.dtype, self.wire, root, self.count, self.name_hash)

    @property
    def is_over(self) -> bool:
        return self.state == ENDED

    @property
    def is_in_flight(self) -> bool:
        return self.state in (STARTED, ALL_THERE)


@dataclass(frozen=True)
class RankRecord:
    """The calls of one rank, as far as they are known here.

    Attributes:
        rank: what errors call it, its rank in the world.
        pid: its process; 0 if that is not known.
        joined: seconds of ``time.monotonic``; 0.0 if its own record is not known.
        num_calls: how many collectives it has called.
        calls: the last of them, by number.
    """

    rank: int
    pid: int
    joined: float = 0.0
    num_calls: int = 0
    calls: tuple[Call, ...] = ()


# of the records of collectives that GPUs run: the host does not wait for them, nor start those of a CUDA graph
GPU_TITLE = ", over NCCL, without replays of CUDA graphs"


@dataclass(frozen=True)
class FlightRecord:
    """The last collectives of the ranks of one communicator.

    Attributes:
        id: the same for all records of one communicator.
        title: "world", or what the group is called.
        ranks: in the communicator's order.
        is_reported: whether a rank has claimed to report its failure; over MPI in the record of a host's first process.
    """

    id: str
    title: str
    ranks: tuple[RankRecord, ...]
    is_reported: bool = False

    @property
    def is_of_gpus(self) -> bool:
        """Whether ends of calls are noticed late, as the host does not wait for them."""
        return self.title.endswith(GPU_TITLE)

    def is_called_by_all(self, number: int) -> bool | None:
        """Return whether all ranks have made call ``number``; None if a rank's record is not here."""
        if any(rank.joined and rank.num_calls <= number for rank in self.ranks):
            return False
        return True if all(rank.joined for rank in self.ranks) else None


def record_of(reading: tuple[str, str, list[Any], bool]) -> FlightRecord:
    """Return what the native module has read."""
    identity, title, ranks, is_reported = reading
    made = (
        RankRecord(rank, max(pid, 0), joined, num_calls, tuple(map(_call_of, calls)))
        for pid, rank, joined, num_calls, calls in ranks
    )
    return FlightRecord(identity, _printable(title), tuple(made), is_reported)


def _call_of(fields: dict[str, Any]) -> Call:
    return Call(**{**fields, "shape": tuple(fields["shape"]), "file": _printable(fields["file"])})


def _printable(text: str) -> str:
    """Return ``text`` without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


def merge(records: Iterable[FlightRecord]) -> list[FlightRecord]:
    """Return one record for each communicator: processes without common memory have a part each."""
    merged: dict[str, FlightRecord] = {}
    for record in records:
        known = merged.get(record.id)
        if known is None or len(known.ranks) != len(record.ranks):
            merged[record.id] = record
            continue
        ranks = (
            mine if mine.joined >= other.joined else replace(other, pid=other.pid or mine.pid)
            for mine, other in zip(known.ranks, record.ranks, strict=True)
        )
        merged[record.id] = replace(known, ranks=tuple(ranks))
    return list(merged.values())


def records_of_process(pid: int, known: Collection[tuple[int, int]]) -> list[FlightRecord]:
    """Return the records that process ``pid`` has open; none if it has ended or is another user's.

    Args:
        pid: not this process, whose segments must not be opened again (Note [locks] in native/comm/segment.cc).
        known: (device, inode) of files to leave out.
    """
    native, _ = _native.load("_comm")
    if native is None:
        return []
    found = []
    for path in files_of(pid, FILE, SEGMENT):
        with contextlib.suppress(OSError, ValueError, CommError):  # closed meanwhile; empty; no record in it
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in known:
                continue
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
                found.append(record_of(native.read_flight(memory)))
    return found


def files_of(pid: int, *beginnings: str) -> list[str]:
    """Return the paths in /proc/PID/fd of the open files whose names begin so."""
    found = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(beginnings):
                    found.append(str(path))
    return found


def inodes_of(paths: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield (device, inode) of the files that are there."""
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            yield status.st_dev, status.st_ino


def records_from(pids: Iterable[int], own: Iterable[FlightRecord] = ()) -> list[FlightRecord]:
    """Return the records of ``pids`` and of all processes that these name, one for each communicator.

    Args:
        pids: processes to begin with.
        own: what this process has read of its own communicators.
    """
    records = list(own)
    skipped = set(inodes_of(files_of(os.getpid(), FILE, SEGMENT)))
    seen, waiting = {os.getpid(), 0}, [*pids, *(rank.pid for record in records for rank in record.ranks)]
    while waiting:
        pid = waiting.pop()
        if pid in seen:
            continue
        seen.add(pid)
        new = records_of_process(pid, skipped)
        records += new
        waiting += [rank.pid for record in new for rank in record.ranks]
    return merge(records)
