# SPDX-License-Identifier: Apache-2.0
"""What rank_wrapper.py notes of the processes on other hosts, between the lines of mpiexec's error output.

What lives here: taking the notes out and passing the rest on. What does not: what the launcher makes of them
(several_hosts.py).

A note is the first that a process writes on its error output, and another one follows when its script has failed. They
travel with that output, as there may be no folder that all hosts share, and no other connection to them.
"""

from __future__ import annotations

import os
import re
import selectors
import threading
from collections.abc import Callable

POLL_S = 0.05
CHUNK_BYTES = 1 << 16


class HostNotes:
    """The notes of one job so far.

    Args:
        num_processes: of the job.

    Attributes:
        token: tells its notes from other output.
        started: ranks of the processes that have started.
        failed: ranks of those that have reported why they end the job.
    """

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self.token = os.urandom(8).hex()
        self.started: set[int] = set()
        self.failed: set[int] = set()
        self._start = f"[singa-lite {self.token} ".encode()
        self._note = re.compile(re.escape(self._start) + rb"(started|failed) (\d+)\]\n")
        self._held = b""
        self._is_over = False
        self._thread: threading.Thread | None = None

    @property
    def have_all_started(self) -> bool:
        return len(self.started) == self._num_processes

    def take(self, chunk: bytes) -> bytes:
        """Return what is to be passed on of what was read; b"" is the end."""
        text = self._held + chunk
        for word, rank in self._note.findall(text):
            (self.started if word == b"started" else self.failed).add(int(rank))
        text = self._note.sub(b"", text)
        cut = text.rfind(b"[")  # the rest of a note may follow
        tail = text[cut:] if cut >= 0 and chunk else b""
        is_part = tail.startswith(self._start) or self._start.startswith(tail)
        self._held = tail if is_part else b""
        return text[: len(text) - len(self._held)]

    def follow(self, reader: int) -> None:
        """Pass on from the descriptor ``reader`` to the error stream in a thread, which closes it at its end."""
        self._thread = threading.Thread(target=self._follow, args=[reader], daemon=True)
        self._thread.start()

    def finish(self, may_give_up: Callable[[], bool]) -> None:
        """Wait until what was written is passed on; not for what children of the writer may write later.

        Args:
            may_give_up: asked again and again while nobody reads the error stream.
        """
        self._is_over = True
        while self._thread is not None and self._thread.is_alive() and not may_give_up():
            self._thread.join(POLL_S)

    def _follow(self, reader: int) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(reader, selectors.EVENT_READ)
                while (is_ready := bool(selector.select(POLL_S))) or not self._is_over:
                    chunk = os.read(reader, CHUNK_BYTES) if is_ready else None
                    if chunk is not None:
                        _write_all(self.take(chunk))
                    if chunk == b"":
                        return
            _write_all(self.take(b""))
        except OSError:  # nobody reads the error stream any more: the writer learns it by the end of its own
            pass
        finally:
            os.close(reader)


def _write_all(data: bytes) -> None:
    while data:
        try:
            data = data[os.write(2, data) :]
        except BlockingIOError:  # another process has set the stream so
            with selectors.DefaultSelector() as selector:
                selector.register(2, selectors.EVENT_WRITE)
                selector.select()
