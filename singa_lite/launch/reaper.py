# SPDX-License-Identifier: Apache-2.0
"""Leave nothing behind of a job on this host, also when its launcher is killed.

Note [nothing left]: every rank leads a session and a process group of its own. A signal to the group reaches the
children that have not left it; in the end the whole session is killed, on Linux: /proc tells who is in it. A child
with a session of its own stays. A reaper process, forked before the ranks, sees by the end of a pipe that the launcher
is gone, even by SIGKILL, then kills the sessions and removes the shared-memory files; PR_SET_PDEATHSIG covers the
reaper's death.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..comm.proc import PARENT, SESSION, of_all
from .rank_wrapper import PR_SET_PDEATHSIG, STOP_SIGNALS

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ORPHANS_S = 1.0  # time for watchdogs of ranks (mpi_watchdog.py) to remove what these left
REQUESTS = (signal.SIGTERM, signal.SIGUSR1)  # see Note [requests] in supervise.py


class Reaper:
    """A forked process that kills the ranks when the launcher is killed, see Note [nothing left]."""

    def __init__(self, rendezvous_id: str) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._writer)
                _reap(reader, rendezvous_id)
            finally:
                os._exit(0)
        os.close(reader)

    def watch(self, leader: int) -> None:
        """Register a session by its leader; it is killed should this process vanish."""
        os.write(self._writer, f"{leader}\n".encode())

    def dismiss(self) -> None:
        """End the reaper; nothing is left to reap."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._writer)


def signal_group(group: int, number: int) -> None:
    """Send signal ``number`` to process group ``group``, if any of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def kill_sessions(leaders: Sequence[int]) -> None:
    """Kill what is left of the sessions of ``leaders``, see Note [nothing left]."""
    for leader in leaders:
        signal_group(leader, signal.SIGKILL)
    for pid, session in of_all(SESSION).items():
        if session in leaders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def remove_segments(rendezvous_id: str) -> None:
    """Remove the shared-memory files of the world ``rendezvous_id``; ranks that died early may have left some."""
    for path in glob.glob(f"/dev/shm/singa_lite-{rendezvous_id}*"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def die_with_launcher() -> Callable[[], None]:
    """Return what a child of this process calls first to be killed when this process ends; on Linux only."""
    launcher = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def call() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # it died before the call above
                os._exit(1)

    return call


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:  # Any: they are Popen's
    """Start a process without input, in a session of its own, which dies with this one."""
    null, end = subprocess.DEVNULL, die_with_launcher()
    return subprocess.Popen(command, stdin=null, start_new_session=True, preexec_fn=end, **options)


def adopt_orphans(is_on: bool) -> None:
    """Make processes whose parent ends children of this one, if it is an ancestor; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_on))


def end_orphans(before: set[int]) -> None:
    """Reap all children of this process and theirs but for those of ``before``; kill them if they do not end soon."""
    deadline = time.monotonic() + ORPHANS_S
    while children := own_children() - before:
        for pid in children:
            if time.monotonic() >= deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def own_children() -> set[int]:
    """Return the children of this process."""
    return {pid for pid, parent in of_all(PARENT).items() if parent == os.getpid()}


def _reap(reader: int, rendezvous_id: str) -> None:
    """Read sessions to watch until the pipe ends, then kill them and remove their files."""
    os.setsid()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # a reader of the launcher's output must not wait for the reaper
        os.dup2(null, descriptor)
    text = b""
    while True:
        select.select([reader], [], [])
        chunk = os.read(reader, 4096)
        if not chunk:
            break
        text += chunk
    kill_sessions([int(line) for line in text.split()])
    remove_segments(rendezvous_id)
