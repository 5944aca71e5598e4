# SPDX-License-Identifier: Apache-2.0
"""Merge the output of several ranks into one terminal or log: whole lines, each behind the name of its rank.

What lives here: cutting bytes into lines, progress bars, the end of a failed rank's output, writing without waiting
for a reader. What does not: processes (one_host.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from ..errors import CommError
from .process_names import ProcessName
from .rank_wrapper import LINE_BYTES, ErrorLines, last_state, open_log

TAIL_LINES = 60  # enough for a traceback through a few modules
BUFFER_BYTES = 1 << 20  # what a reader may be behind before the ranks have to wait for it
CLEAR_LINE = b"\r\x1b[K"


class Sink:
    """A file descriptor written by a thread of its own, so that a reader who stops reading blocks nothing else.

    Args:
        descriptor: where to write; None: nowhere.
        may_drop: whether lines are left out, and counted, while the buffer is full.

    Attributes:
        error: why writing has failed, else None; everything after that is lost.
    """

    def __init__(self, descriptor: int | None, *, may_drop: bool = False) -> None:
        self.error: OSError | None = None
        self.is_terminal = descriptor is not None and os.isatty(descriptor)
        self._descriptor, self._may_drop = descriptor, may_drop
        self._pending: list[bytes] = []
        self._num_bytes = self._num_dropped = 0
        self._changed = threading.Condition()
        # made at the first write, when all ranks have been forked
        self._thread: threading.Thread | None = None
        self._is_resting = False

    @property
    def is_full(self) -> bool:
        """Whether what comes next should wait."""
        return self._num_bytes > BUFFER_BYTES and not self._may_drop

    def write(self, data: bytes) -> None:
        """Queue ``data`` for writing; never waits."""
        if self._descriptor is None or self.error is not None:
            return
        with self._changed:
            self._is_resting = False
            if self._may_drop and self._num_bytes > BUFFER_BYTES:
                self._num_dropped += 1
            else:
                self._append(data)
            self.start()

    def flush(self, is_over: Callable[[], bool]) -> None:
        """Wait until everything is written, how many lines were left out too, writing has failed, or ``is_over()``."""
        with self._changed:
            if self._num_dropped:
                self._append(b"")
            while self._num_bytes and self.error is None and not is_over():
                self.start()
                self._changed.wait(0.05)

    def rest(self, seconds: float) -> None:
        """End the thread, until the next write, once all is written; waits for that at most ``seconds``."""
        with self._changed:
            thread, self._is_resting = self._thread, True
            self._changed.notify_all()
        if thread is not None:
            thread.join(seconds)

    def start(self) -> None:
        """Start the thread if something waits for one; where the system has no process left for it, later calls do."""
        with self._changed:
            if self._thread is not None or not self._pending:
                return
            thread = threading.Thread(target=self._run, name="singa_lite output", daemon=True)
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def _append(self, data: bytes) -> None:
        if self._num_dropped:
            data = f"singa-lite run: {self._num_dropped} lines left out\n".encode() + data
            self._num_dropped = 0
        self._pending.append(data)
        self._num_bytes += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        assert self._descriptor is not None
        while self.error is None:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_resting)
                if not self._pending:
                    self._thread = None
                    return
                data = b"".join(self._pending)
                self._pending.clear()
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                self.error = error
            with self._changed:
                self._num_bytes -= len(data)
                self._changed.notify_all()


class RankOutput:
    """Lines of all ranks, written as they end.

    A progress bar (a line redrawn with carriage returns, or one not ended yet) of rank 0 is shown as it changes
    where the stream is a terminal, and lines of other ranks appear above it. Elsewhere only its last state is
    written, once it ends.

    Args:
        names: those of the ranks.
        log_dir: a folder for one file per rank, called by its name, to which its lines are appended; elsewhere lines
            are then left out rather than waiting for a reader. None: no files.
        stdout, stderr: descriptors for the ranks' two streams; None: those of this process, if it has any.
    """

    def __init__(
        self,
        names: Sequence[ProcessName],
        log_dir: Path | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        stdout = _descriptor(sys.stdout) if stdout is None else stdout
        stderr = _descriptor(sys.stderr) if stderr is None else stderr
        sink = Sink(stdout, may_drop=log_dir is not None)
        self._sinks = {"stdout": sink, "stderr": sink}  # one, to keep the order of lines
        if stdout is None or stderr is None or not os.path.sameopenfile(stdout, stderr):
            self._sinks["stderr"] = Sink(stderr, may_drop=log_dir is not None)
        self._log_dir, self._log_files = log_dir, dict[str, Sink]()
        self._bar = b""  # rank 0's open line on the terminal
        self.begin(names)

    def begin(self, names: Sequence[ProcessName]) -> None:
        """Begin with new ranks, whose names are ``names``; those before have ended."""
        self._prefixes = [name.prefix.encode() for name in names]
        self._open_lines = {(rank, name): b"" for rank in range(len(names)) for name in self._sinks}
        self._tails: list[deque[str]] = [deque(maxlen=TAIL_LINES) for _ in names]
        self._errors = [ErrorLines() for _ in names]
        self._logs = [] if self._log_dir is None else [self._log(self._log_dir, name.log) for name in names]

    def rest(self, seconds: float) -> None:
        """End the threads that write until there is more to write; each gets ``seconds`` for what is left."""
        for sink in (*self._sinks.values(), *self._log_files.values()):
            sink.rest(seconds)

    def check(self) -> None:
        """Raise BrokenPipeError if a reader has gone, CommError if writing has failed otherwise."""
        for sink in (*self._sinks.values(), *self._logs):
            if isinstance(sink.error, BrokenPipeError) or (sink.error and sink.is_terminal):
                raise BrokenPipeError
            if sink.error is not None:
                raise CommError(f"launch: the output of the ranks cannot be written: {sink.error}")

    @property
    def has_logs(self) -> bool:
        """Whether every rank has a file."""
        return bool(self._logs)

    @property
    def is_full(self) -> bool:
        """Whether a reader is so far behind that the ranks should wait; see ``check`` for its errors."""
        self.check()
        return any(sink.is_full for sink in (*self._sinks.values(), *self._logs))

    def feed(self, rank: int, name: str, chunk: bytes) -> None:
        """Take ``chunk`` from a rank's stream "stdout" or "stderr"; b"" means the stream has ended."""
        text = self._open_lines[rank, name] + chunk
        *lines, rest = text.split(b"\n")
        if rest and (not chunk or len(rest) > LINE_BYTES):
            lines, rest = [*lines, rest], b""
        for line in lines:
            self._write(rank, name, line)
        self._open_lines[rank, name] = last_state(rest) + b"\r" * rest.endswith(b"\r")
        if rank == 0 and self._sinks[name].is_terminal:
            self._draw_bar(name, last_state(rest))

    def report(self, headline: str, lines: list[str] | None = None) -> None:
        """Write a message of the launcher itself to the error stream."""
        text = "\n  ".join([f"singa-lite run: {headline}", *(lines or [])])
        self._put("stderr", text.encode(errors="surrogateescape") + b"\n")

    def end_lines(self) -> None:
        """Write the lines that never ended."""
        for rank, name in self._open_lines:
            self.feed(rank, name, b"")

    def flush(self, is_over: Callable[[], bool]) -> None:
        """Wait until everything is written, or ``is_over()``."""
        for sink in (*self._logs, *self._sinks.values()):
            sink.flush(is_over)

    def wait_for_room(self, seconds: float) -> None:
        """Return once the readers have caught up, at the latest after ``seconds``."""
        deadline = time.monotonic() + seconds
        for sink in (*self._logs, *self._sinks.values()):
            sink.start()
        while self.is_full and time.monotonic() < deadline:
            time.sleep(0.005)

    def final_output(self, rank: int) -> list[str]:
        """Return the last traceback that ``rank`` printed, or the last lines of its error stream if there is none."""
        lines = list(self._tails[rank])
        starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
        return lines[starts[-1] :] if starts else lines[-10:]

    def distance_to_cause(self, rank: int, code: int) -> int:
        """Return how far the end of ``rank`` with exit code ``code`` is from the cause, by the error it printed."""
        return self._errors[rank].distance_to_cause(code)

    def _log(self, folder: Path, name: str) -> Sink:
        if name not in self._log_files:
            self._log_files[name] = Sink(open_log(folder, name))
        return self._log_files[name]

    def _write(self, rank: int, name: str, line: bytes) -> None:
        line = last_state(line.removesuffix(b"\r"))
        if name == "stderr":
            self._tails[rank].append(line.decode(errors="surrogateescape"))
            self._errors[rank].read(line)
        if self._logs:
            self._logs[rank].write(line + b"\n")
        self._put(name, self._prefixes[rank] + line + b"\n")

    def _put(self, name: str, data: bytes) -> None:
        if self._bar and self._sinks[name].is_terminal:
            data, self._bar = CLEAR_LINE + data, b""
        self._sinks[name].write(data)

    def _draw_bar(self, name: str, state: bytes) -> None:
        if state and state != self._bar:
            self._sinks[name].write(CLEAR_LINE + self._prefixes[0] + state)
            self._bar = state


def _descriptor(stream: TextIO | None) -> int | None:
    """Return the descriptor of a standard stream; None where there is none, as in some daemons."""
    try:
        return stream.fileno() if stream is not None else None
    except (OSError, ValueError):  # replaced by one without a file, or closed
        return None
