# SPDX-License-Identifier: Apache-2.0
"""End a rank that Python's multiprocessing has started when its parent is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

F_SETSIG = 10  # linux/fcntl.h


def end_with_parent() -> None:
    """Have this process killed as soon as the process that started it through multiprocessing has ended.

    Its ranks would train on as orphans otherwise. The kernel sends SIGKILL when the pipe closes by which
    multiprocessing knows that the parent lives. PR_SET_PDEATHSIG would not do: it looks at the thread that started this
    process, and with forkserver that is not the parent's. Nothing happens in other processes and on other systems.
    """
    parent = multiprocessing.parent_process()
    if parent is None or fcntl is None or sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        pipe = parent.sentinel
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():  # since before the lines above
        os.kill(os.getpid(), signal.SIGKILL)
