# SPDX-License-Identifier: Apache-2.0
"""What Linux says of a process in /proc/PID/stat.

What does not live here: other files of /proc (flight_record.py, stacks.py), and what rank_wrapper.py reads of this one,
as it runs without the package.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

# of ``stat_fields``; the start in the kernel's ticks
STATE, PARENT, GROUP, SESSION, START_TIME = 0, 1, 2, 3, 19


def stat_fields(pid: int | str) -> list[str]:
    """Return the fields of process ``pid`` behind its name, which may hold blanks; none if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def of_all(field: int) -> dict[int, int]:
    """Return a field of each process of this host, such as its PARENT; none where there is no /proc."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid: int(fields[field]) for pid in pids if (fields := stat_fields(pid))}
