# SPDX-License-Identifier: Apache-2.0
"""Merge the output of several ranks into one terminal or log: whole lines, each prefixed by its rank.

What lives here: cutting bytes into lines, progress bars, the last words of a failed rank. What does not:
processes (launch.py).
"""

from __future__ import annotations

import re
import sys
from collections import deque
from typing import BinaryIO

TAIL_LINES = 60  # enough for a traceback through a few floors
LINE_BYTES = 1 << 20  # a longer "line" is passed on in pieces rather than held
CLEAR_LINE = b"\r\x1b[K"


class RankOutput:
    """Lines of all ranks, written as they end.

    A progress bar (a line redrawn with carriage returns, or one not ended yet) of rank 0 is shown as it changes
    where the stream is a terminal, and lines of other ranks appear above it. Elsewhere only its last state is
    written, once it ends.

    Args:
        num_ranks: number of ranks; the prefix is as wide as the largest.
        stdout, stderr: where the ranks' two streams go; None: those of this process.
    """

    def __init__(
        self, num_ranks: int, stdout: BinaryIO | None = None, stderr: BinaryIO | None = None
    ) -> None:
        self._streams = {"stdout": stdout or sys.stdout.buffer, "stderr": stderr or sys.stderr.buffer}
        self._width = len(str(num_ranks - 1))
        self._open_lines = {(rank, name): b"" for rank in range(num_ranks) for name in self._streams}
        self._tails: list[deque[str]] = [deque(maxlen=TAIL_LINES) for _ in range(num_ranks)]
        self._bar = b""  # rank 0's open line as it stands on the terminal

    def feed(self, rank: int, name: str, chunk: bytes) -> None:
        """Take ``chunk`` from a rank's stream "stdout" or "stderr"; b"" means the stream has ended."""
        text = self._open_lines[rank, name] + chunk
        *lines, rest = text.split(b"\n")
        if rest and (not chunk or len(rest) > LINE_BYTES):
            lines, rest = [*lines, rest], b""
        for line in lines:
            self._write(rank, name, line)
        self._open_lines[rank, name] = _last_state(rest) + b"\r" * rest.endswith(b"\r")
        if rank == 0 and self._streams[name].isatty():
            self._draw_bar(name, _last_state(rest))

    def say(self, headline: str, lines: list[str] | None = None) -> None:
        """Write a message of the launcher itself to the error stream."""
        text = "\n  ".join([f"singa-lite run: {headline}", *(lines or [])])
        self._put("stderr", text.encode(errors="surrogateescape") + b"\n")

    def finish(self) -> None:
        """Write the lines that never ended."""
        for rank, name in self._open_lines:
            self.feed(rank, name, b"")

    def last_words(self, rank: int) -> list[str]:
        """The last traceback that ``rank`` printed, or the last lines of its error stream if there is none."""
        lines = list(self._tails[rank])
        starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
        return lines[starts[-1] :] if starts else lines[-10:]

    def echo(self, rank: int) -> int:
        """How far the failure of ``rank`` is from the cause: 0 for an error of its own, or one that says nothing,
        1 for a CommError (another rank has gone), 2 for one that repeats another rank's CommError."""
        errors = [
            line for line in self.last_words(rank) if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)
        ]
        if not errors or not errors[-1].startswith("singa_lite.errors.CommError"):
            return 0
        return 2 if "gave up: " in errors[-1] else 1

    def _write(self, rank: int, name: str, line: bytes) -> None:
        line = _last_state(line.removesuffix(b"\r"))
        if name == "stderr":
            self._tails[rank].append(line.decode(errors="surrogateescape"))
        self._put(name, self._prefix(rank) + line + b"\n")

    def _put(self, name: str, data: bytes) -> None:
        stream = self._streams[name]
        if self._bar and stream.isatty():
            data, self._bar = CLEAR_LINE + data, b""
        stream.write(data)
        stream.flush()

    def _draw_bar(self, name: str, state: bytes) -> None:
        if state and state != self._bar:
            stream = self._streams[name]
            stream.write(CLEAR_LINE + self._prefix(0) + state)
            stream.flush()
            self._bar = state

    def _prefix(self, rank: int) -> bytes:
        return f"[{rank:{self._width}}] ".encode()


def _last_state(line: bytes) -> bytes:
    """What a terminal would show of a line that was redrawn with carriage returns."""
    states = [state for state in line.split(b"\r") if state]
    return states[-1] if states else b""
