# SPDX-License-Identifier: Apache-2.0
"""Write what the steps of this process did, a line of JSON a step, to its part of a trace.

What lives here: writing a part. What does not: measuring steps (clock.py), who asks for a trace and joins its parts
(comm/trace_file.py).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from ..config import env, state
from ..error_stream import tell
from ..files import try_lock, unlock

MAX_STEPS = 1000  # of a process: viewers of traces stop at about a million events
SUFFIX = ".trace-part"


class TraceWriter:
    """One process's part of a trace: lines of JSON, each written at once, so that a killed process leaves them.

    The file is locked until it is closed.

    The first line names the process; ``add_facts`` adds what is known later, such as its rank. A part that cannot be
    written ends with a message; the process goes on.

    Args:
        folder: of all parts of a trace.
    """

    def __init__(self, folder: Path) -> None:
        self.pid = os.getpid()
        self._num_steps = 0
        self._threads: dict[int, int] = {}
        self._lock = threading.Lock()
        self._file: Any = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _new_part(folder)
        except OSError as error:
            self._stop_writing(error)
        self.add_facts(pid=self.pid, rank=env("SINGA_LITE_RANK"), restart=env("SINGA_LITE_RESTART"))

    def add_facts(self, **facts: Any) -> None:
        """Add facts about this process, JSON values."""
        self._write(facts)

    def add_step(self, spans: list[Any], waited: list[Any]) -> None:
        """Add a step, lists of clock.Span and clock.Waited; only MAX_STEPS, and none of a forked child."""
        if self.pid != os.getpid():
            return
        with self._lock:
            thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
            self._num_steps += 1
            number = self._num_steps
        if number <= MAX_STEPS:
            self._write({"step": number, "thread": thread, "spans": spans, "waited": waited})
        elif number == MAX_STEPS + 1:
            self._write({"is_cut": True})

    def close(self) -> None:
        """End the part; nothing is written any more. Nothing in a forked child, where a thread may hold the lock."""
        if self.pid == os.getpid():
            with self._lock:
                self._close_file()

    def _write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        with self._lock:  # a line may take several writes
            try:
                while data and self._file is not None:
                    data = data[self._file.write(data) :]
            except OSError as error:
                self._stop_writing(error)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                unlock(file.fileno())  # which children that were forked have as well
                file.close()

    def _stop_writing(self, error: OSError) -> None:
        self._close_file()
        tell(f"singa_lite: the trace of process {self.pid} ends here: {error}\n")


def _new_part(folder: Path) -> Any:
    """Return a new file in ``folder`` with its lock, which says that its process writes it."""
    while True:
        path = folder / f"{os.urandom(8).hex()}{SUFFIX}"
        file = path.open("ab", buffering=0)
        if try_lock(file.fileno()) is not False and path.exists():
            return file
        file.close()  # who joins the parts took it for one of a process that has ended, between these two lines
        path.unlink(missing_ok=True)


def trace_of_process() -> TraceWriter | None:
    """Return what writes this process's part of a trace, made at first use; None: SINGA_LITE_TRACE asks for none."""
    folder = env("SINGA_LITE_TRACE")
    if folder is None:
        return None
    if state.trace is None or state.trace.pid != os.getpid():
        state.trace = TraceWriter(Path(folder))
        atexit.register(state.trace.close)
    writer: TraceWriter = state.trace
    return writer
