# SPDX-License-Identifier: Apache-2.0
"""Find out what every rank of a running job is doing, from outside of it: `singa-lite inspect`, SIGQUIT to a launcher.

What lives here: which processes belong to a job. What does not: the report (flight_report.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

from .. import _native
from ..errors import CommError
from .flight_record import FlightRecord, records_from
from .flight_recorder import ALL_CALLS, append, report_path
from .flight_report import SHOWN_CALLS, full_report
from .proc import PARENT, of_all


def inspect_job(pid: int, num_calls: int = SHOWN_CALLS) -> str:
    """Return what all ranks of a job on this host are doing, with their Python stacks. They go on undisturbed.

    Several jobs that ``pid`` has started have a report each.

    Args:
        pid: a rank of it, or what has started the ranks: `singa-lite run`, mpiexec, a parent of multiprocessing.
        num_calls: how many of each rank's last calls are listed.

    Raises:
        CommError: there is no such process, or neither it nor its children record collectives, or this is not Linux.
    """
    if sys.platform != "linux":
        raise CommError(f"inspect: works on Linux only, not on {sys.platform}")
    native, reason = _native.load("_comm")
    if native is None:
        raise CommError(f"inspect: the native module is missing ({reason})")
    if pid <= 0 or not Path(f"/proc/{pid}").is_dir():
        raise CommError(f"inspect: there is no process {pid} on this host")
    records = records_from([pid, *descendants(pid)])
    if not records:
        raise CommError(
            f"inspect: neither process {pid} nor its children record collectives: they have not joined a world of two "
            "ranks or more, have left it, belong to another user, or their record is damaged"
        )
    reports = [full_report(each, num_calls=num_calls) for each in jobs_of(records)]
    started = f"Process {pid} has started {len(reports)} jobs.\n\n" if len(reports) > 1 else ""
    return started + "\n".join(reports)


def jobs_of(records: Iterable[FlightRecord]) -> list[list[FlightRecord]]:
    """Return the records job by job: communicators of one job have processes in common."""
    jobs: list[tuple[set[int], list[FlightRecord]]] = []
    for record in records:
        pids, found = {rank.pid for rank in record.ranks} - {0}, [record]
        for job in [job for job in jobs if job[0] & pids]:
            jobs.remove(job)
            pids, found = job[0] | pids, job[1] + found
        jobs.append((pids, found))
    return [found for _, found in jobs]


def descendants(pid: int) -> list[int]:
    """Return the children of process ``pid``, theirs, and so on."""
    children: dict[int, list[int]] = defaultdict(list)
    for child, parent in of_all(PARENT).items():
        children[parent].append(child)
    found, waiting = [], [pid]
    while waiting:
        waiting += (below := children.pop(waiting.pop(), []))
        found += below
    return found


@contextlib.contextmanager
def reports_at_sigquit(
    write: Callable[[str], None], log_dir: Path | None = None, world_id: str = ""
) -> Iterator[None]:
    """Inside: SIGQUIT does not end this launcher but has it report what its ranks are doing.

    Args:
        write: writes text to the error stream; called in a thread.
        log_dir: folder for the report; None: it is written.
        world_id: names the file there.
    """
    if sys.platform != "linux":
        yield
        return
    path = report_path(world_id, log_dir) if log_dir else None

    def report() -> None:
        try:
            text = inspect_job(os.getpid(), SHOWN_CALLS if path is None else ALL_CALLS)
            if path is not None:
                append(path, lambda: text)
                text = f"what every rank was doing: {path}"
        except (CommError, OSError) as error:
            text = str(error)
        write(text.rstrip("\n"))

    def handle(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=report, name="singa_lite report", daemon=True).start()

    before = signal.signal(signal.SIGQUIT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, before)
