# SPDX-License-Identifier: Apache-2.0
"""The process that started this one through Python's multiprocessing; a rank is killed when it has ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from typing import Any

from ..config import state

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

F_SETSIG = 10  # linux/fcntl.h


def parent_process() -> Any:
    """Return the process that started this one through multiprocessing, or None.

    multiprocessing is imported in every process that it starts, so others need not import it, see Note [imports].
    """
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing.parent_process() if multiprocessing else None


def end_with_parent() -> None:
    """Kill this process as soon as the process that started it through multiprocessing has ended.

    Its ranks would train on as orphans otherwise. The kernel sends SIGKILL when the pipe closes by which
    multiprocessing knows that the parent lives; as other children of the parent may hold that pipe open, a thread waits
    for its end, too. PR_SET_PDEATHSIG would not do: it looks at the thread that started this process, and with
    forkserver that is not the parent's. Nothing happens in other processes and on other systems.
    """
    parent = parent_process()
    if parent is None or fcntl is None or sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        pipe = parent.sentinel
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if state.watched_parent != os.getpid():
        state.watched_parent = os.getpid()
        try:
            ended = os.pidfd_open(parent.pid)
        except ProcessLookupError:
            os.kill(os.getpid(), signal.SIGKILL)
        except (OSError, AttributeError):  # a kernel before Linux 5.3
            pass
        else:
            threading.Thread(
                target=_kill_at, args=(ended,), name="singa_lite parent's end", daemon=True
            ).start()
    if not parent.is_alive():  # since before the lines above
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_at(ended: int) -> None:
    """Kill this process once the process of a pidfd has ended."""
    poll = select.poll()  # which takes descriptors above 1023, too
    poll.register(ended, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
