# SPDX-License-Identifier: Apache-2.0
"""Python stacks of other processes: a signal has each write its own into a file that has no name.

Python's faulthandler writes them in the signal handler itself, so also those of a process that never comes back to
Python's main loop: in an endless loop, in a call of native code, at the prompt of a debugger. A stopped process writes
nothing. The stack is that of the main thread: the frames of others may go away while they are read.
native/comm/stack_marks.h marks where a stack begins and ends, and keeps errno, which faulthandler sets to 0: a system
call that has just failed would raise ``OSError: [Errno 0]`` otherwise.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

from .. import _native
from ..config import state
from .flight_record import files_of
from .proc import STATE, stat_fields

NAME = "singa_lite-stacks"
SIGNAL = getattr(signal, "SIGRTMIN", 0) + 7  # a real-time signal, which hardly any program uses
ANSWER_S = 1.0  # for stacks to come; they take milliseconds where there is a core to run on
POLL_S = 0.005  # between looks whether they are there
MAX_BYTES = 1 << 20  # of old stacks in a process's file
STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "I": "idle"}
STOPPED = {"T": "stopped by a signal", "t": "stopped by a debugger"}


def write_stacks() -> None:
    """Install a handler of SIGNAL that writes the main thread's stack into a file; a second call does nothing.

    Nothing happens on other systems than Linux, without native code, or if the program has a handler for SIGNAL.
    """
    if state.writes_stacks == os.getpid():
        return
    state.writes_stacks = os.getpid()  # a forked child has its parent's file
    native, _ = _native.load("_comm")
    if sys.platform != "linux" or native is None or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    with contextlib.suppress(OSError):  # no descriptors left
        descriptor = os.memfd_create(f"{NAME}-{os.getpid()}")  # kept until the process ends
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(SIGNAL, descriptor, all_threads=False)
        if not native.mark_stacks(SIGNAL, descriptor):  # nobody would know where a stack ends
            faulthandler.unregister(SIGNAL)


def state_of(pid: int) -> str:
    """Return what process ``pid`` does by the system's words, such as "running"; "" if it has ended."""
    letter = _letter_of(pid)
    return "" if letter in ("", "Z", "X") else {**STATES, **STOPPED}.get(letter, f"state {letter}")


def stacks_of(pids: Collection[int]) -> dict[int, str]:
    """Return the Python stacks of living processes of this user, or for each why there is none.

    Takes up to ``ANSWER_S``. Only processes that have called ``write_stacks`` get the signal.
    """
    native, reason = _native.load("_comm")
    if native is None:
        return dict.fromkeys(pids, f"none: {reason}")
    texts, paths = {}, {}
    for pid in pids:
        path = next(iter(files_of(pid, f"/memfd:{NAME}-{pid} ")), None)
        if _letter_of(pid) in STOPPED:
            texts[pid] = f"none: the process is {state_of(pid)}"
        elif path is None or not _catches(pid, SIGNAL):
            texts[pid] = "none: the process has ended, is another user's, or does not write stacks"
        else:
            paths[pid] = path
    starts = {pid: _ask(pid, path) for pid, path in paths.items()}
    deadline = time.monotonic() + ANSWER_S
    while starts:
        time.sleep(POLL_S)
        is_over = time.monotonic() > deadline
        for pid, start in list(starts.items()):
            _, _, answer = _read(paths[pid], start).partition(native.STACKS_BEGIN)
            stacks, end, _ = answer.partition(native.STACKS_END)
            if end or is_over or not state_of(pid):
                del starts[pid]
                text = stacks.decode(errors="replace").strip("\n")
                if not end:
                    text += "\nand more that did not come in time" if stacks else "none: no answer in time"
                texts[pid] = text or "none: a thread without Python got the signal"
    return texts


def _ask(pid: int, path: str) -> int:
    """Ask a process to write its stacks; return where in its file they will begin."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_size > MAX_BYTES:
            os.truncate(path, 0)
        size = os.stat(path).st_size
        os.kill(pid, SIGNAL)
        return size
    return 0


def _read(path: str, start: int) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(start)
        return file.read(MAX_BYTES)
    return b""


def _letter_of(pid: int) -> str:
    """Return the letter of a process's state, "" if it has ended."""
    fields = stat_fields(pid)
    return fields[STATE] if fields else ""


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which would end it otherwise."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
