# SPDX-License-Identifier: Apache-2.0
"""Watch one rank of an MPI job from a process of its own, and end the job when the rank cannot.

What lives here: a program that mpi_job.py starts by its path before MPI_Init, so it imports nothing of the package.
What does not: the rank's side of the pipe (mpi_job.py).

Note [lost ranks]: MPI_Init and MPI_Finalize wait for every rank, without a deadline and holding Python's lock, so no
thread of the rank can end them. And mpiexec of MPICH takes the exit code of a rank that vanished for the job's, which
is 0 after ``os._exit(0)``. It notices by the end of the rank's PMI socket; this process holds that open, so it is first
to notice, and requests an abort with exit code 1. MPICH's shared-memory files, which a killed job leaves behind, are
removed here for the same reason: nothing else is left to do it. Where rank_wrapper.py has started the rank, this
process only tells it that the rank is lost, or late and about to be killed; it knows how the rank ended, and requests
the abort.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.1  # how soon the end of a rank is noticed whose pipe a forked child holds as well
OUTPUT_S = 0.3  # mpiexec's time to pass on what was written, which the abort may lose
ABORT = b"cmd=abort exitcode=1\n"  # PMI's wire protocol, version 1
SHARED_FILES = re.compile(r"/dev/shm/(?:mpich_shm_|sm_segment\.)\S+")  # of MPICH and of Open MPI


def watch(rank_pid: int, pipe: int, lost_error: str) -> tuple[str, bool] | None:
    """Read the rank's messages until it has left MPI, has vanished or has missed a deadline.

    A message is a line "SECONDS TEXT": the next one comes within so many seconds, or TEXT is the error. An empty TEXT
    means that the rank has reported its error itself. "left" is the last message.

    Args:
        rank_pid: the rank, which is this process's parent.
        pipe: where its messages come from; its end means that the rank has vanished.
        lost_error: the error of a rank that vanishes.

    Returns:
        The error for which the job must end, "" if it has been reported, and whether the rank is there still and has
        missed a deadline; None if it has left MPI.
    """
    files: set[str] = set()
    text, deadline, is_late = lost_error, float("inf"), True
    while time.monotonic() < deadline:
        is_readable = bool(select.select([pipe], [], [], POLL_S)[0])
        if is_readable or deadline < float("inf"):
            files |= shared_files(rank_pid)
        lines = os.read(pipe, 1 << 16).decode(errors="replace").splitlines() if is_readable else []
        if lines and lines[-1] == "left":
            return None
        if lines:
            seconds, _, text = lines[-1].partition(" ")
            deadline = time.monotonic() + float(seconds)
        elif is_readable or os.getppid() != rank_pid:
            text, is_late = text and lost_error, False
            break
    for path in files:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return text, is_late


def shared_files(pid: int) -> set[str]:
    """Return the MPI library's shared-memory files that process ``pid`` has mapped."""
    try:
        return set(SHARED_FILES.findall(Path(f"/proc/{pid}/maps").read_text()))
    except OSError:  # it has ended, or this is not Linux
        return set()


def main() -> None:
    rank_pid, pipe, lost_error = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    pmi = int(os.environ.get("PMI_FD", -1))  # other launchers than MPICH's notice by themselves
    wrapper = int(os.environ.get("SINGA_LITE_LOST_FD", -1))
    leads_group = os.getpgrp() == rank_pid
    os.setsid()  # mpiexec kills the rank's process group
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for descriptor in map(int, os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ()):
        if descriptor > 2 and descriptor not in (pipe, pmi, wrapper):
            with contextlib.suppress(OSError):
                os.close(descriptor)
    found = watch(rank_pid, pipe, lost_error)
    if found is None:
        return
    error, is_late = found
    if error:
        with contextlib.suppress(OSError):  # a wrapper that has ended reads no more
            os.write(2, f"singa_lite: {error}\n".encode())
    # each is what it was, and not what some program between has opened since
    if not _write_if(stat.S_ISFIFO, wrapper, b"late\n" if is_late else b"lost\n"):
        time.sleep(OUTPUT_S)
        _write_if(stat.S_ISSOCK, pmi, ABORT)
    if os.getppid() == rank_pid:
        os.kill(rank_pid, signal.SIGKILL)
    if leads_group:  # mpiexec kills the group of no rank that has ended itself
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank_pid, signal.SIGKILL)


def _write_if(is_of_kind: Callable[[int], bool], descriptor: int, message: bytes) -> bool:
    """Write ``message`` if ``descriptor`` is open and of the kind; return whether it was written."""
    with contextlib.suppress(OSError):
        if is_of_kind(os.fstat(descriptor).st_mode):
            os.write(descriptor, message)
            return True
    return False


if __name__ == "__main__":
    main()
