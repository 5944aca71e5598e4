# SPDX-License-Identifier: Apache-2.0
"""How the ranks that wait for a world to be complete notice one that will not join: files beside the segment.

What lives here: what `singa-lite run` reports of a rank that has ended, and the list of the processes to which
Python's multiprocessing has passed a world's id. What does not: waiting (shm.py).
"""

from __future__ import annotations

import contextlib
import os
import re

from .parent import parent_process
from .proc import START_TIME, STATE, stat_fields

MEMBER = re.compile(r"([0-9]{1,9}) ([0-9]*)", re.ASCII)  # process, and when it started


def report_lost_rank(rendezvous_id: str, text: str) -> None:
    """Fail the ranks that still wait for each other with ``text``; the first report counts.

    Without one, or where there is no /dev/shm, they fail by their time-out.
    """
    _append(_report(rendezvous_id), text, os.O_EXCL)


def list_member(rendezvous_id: str) -> None:
    """Add this process to those of which each is expected to join the world ``rendezvous_id``."""
    _append(_members(rendezvous_id), f"{os.getpid()} {_start_time(os.getpid())}\n", os.O_APPEND)


def forget_members(rendezvous_id: str) -> None:
    """Remove the list; nobody waits any more."""
    with contextlib.suppress(OSError):
        os.unlink(_members(rendezvous_id))


def has_living_parent() -> bool:
    """Return whether Python's multiprocessing started this process from one that still runs."""
    parent = parent_process()
    return parent is not None and parent.is_alive()


def lost_rank(rendezvous_id: str, size: int) -> str:
    """Return why a world of ``size`` ranks cannot become complete, or "" if it still may."""
    parent = parent_process()
    if parent is not None and not parent.is_alive():
        return f"process {parent.pid}, which started the ranks, ended before all ranks had joined"
    if text := _read(_report(rendezvous_id)):
        return text
    lines = _read(_members(rendezvous_id)).split("\n")
    members = {match.groups() for line in lines if (match := MEMBER.fullmatch(line))}
    ended = [pid for pid, start_time in members if _start_time(pid) != start_time]
    if len(members) >= size > len(members) - len(ended):
        return f"process {', '.join(ended)} ended before all ranks had joined"
    return ""


def _report(rendezvous_id: str) -> str:
    return f"/dev/shm/singa_lite-{rendezvous_id}.lost"


def _members(rendezvous_id: str) -> str:
    return f"/dev/shm/singa_lite-{rendezvous_id}.members"


def _append(path: str, text: str, flags: int) -> None:
    with contextlib.suppress(OSError):
        flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "w", errors="replace") as file:
            file.write(text)


def _read(path: str) -> str:
    """Return the text of our file at ``path``; "" if there is none, as anybody may write into /dev/shm."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    with open(descriptor, errors="replace") as file:
        return file.read(1 << 16) if os.fstat(descriptor).st_uid == os.geteuid() else ""


def _start_time(pid: int | str) -> str:
    """Return when process ``pid`` started, in the kernel's ticks; "" if it has ended."""
    fields = stat_fields(pid)
    return fields[START_TIME] if fields and fields[STATE] not in "ZX" else ""
