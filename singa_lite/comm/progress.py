# SPDX-License-Identifier: Apache-2.0
"""How far the ranks of a job are, as its launcher knows it: a file in which each rank writes its own record.

What lives here: the file, on both sides. What does not: what the launcher makes of it (../launch/), who counts steps
(stopping.py). ../launch/rank_wrapper.py, which imports nothing of the package, finds its path in the same variable.

A record is four 64-bit integers: 1 + the step that the rank has reached, 0 before its first; 1 if it takes signals as
requests to stop; and what rank_wrapper.py writes when it fails: its exit code, negative for a signal, and how far that
failure is from the cause (``rank_wrapper.distance_of``). On one host the rank itself writes the exit code 1 when an
exception is about to end it, for a child, a thread or a function of atexit may keep it alive. There the file is in
shared memory; for several hosts it is in the folder of checkpoints, which all hosts share.
"""

from __future__ import annotations

import contextlib
import os
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path

from ..config import env
from .job import launched_job

NUMBER = struct.Struct("<q")
RECORD = struct.Struct("<qqqq")
NAME = ".progress"  # in a folder of checkpoints
VARIABLE = "SINGA_LITE_PROGRESS"


class ProgressFile:
    """The file as the launcher sees it.

    Args:
        path: None: there is none, and nothing is known.
        num_ranks: how many records it has, all empty at first.
    """

    def __init__(self, path: Path | None, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._path: Path | None = None
        if path is not None:
            with contextlib.suppress(OSError):  # no /dev/shm, or it is full: then nothing is known
                path.unlink(missing_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(path, flags, 0o600), "wb") as file:
                    file.write(bytes(RECORD.size * num_ranks))
                self._path = path

    @property
    def is_there(self) -> bool:
        """Whether ranks can write into it."""
        return self._path is not None

    @property
    def environ(self) -> dict[str, str]:
        """The variables by which ranks find it."""
        return {} if self._path is None else {VARIABLE: str(self._path)}

    def steps(self) -> list[int | None]:
        """Return the newest step of each rank; None for one that has made none, or where nothing is known."""
        return [record[0] - 1 if record[0] else None for record in self._records()]

    def takers(self) -> list[int]:
        """Return the ranks that take signals as requests to stop."""
        return [rank for rank, record in enumerate(self._records()) if record[1]]

    def failed(self) -> list[int]:
        """Return the ranks whose failure is noted."""
        return [rank for rank, record in enumerate(self._records()) if record[2]]

    def first_failure(self) -> tuple[int | None, int]:
        """Return which rank's failure is nearest to the cause, and how far it is; None if none is known."""
        failures = [(record[3], rank) for rank, record in enumerate(self._records()) if record[2]]
        distance, rank = min(failures, default=(0, None))
        return rank, distance

    def remove(self) -> None:
        """Remove the file."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _records(self) -> Sequence[tuple[int, int, int, int]]:
        data = b""
        if self._path is not None:
            with contextlib.suppress(OSError):
                data = self._path.read_bytes()
        if len(data) != RECORD.size * self._num_ranks:
            return [(0, 0, 0, 0)] * self._num_ranks
        return list(RECORD.iter_unpack(data))


class Progress:
    """The record of this process; without effect once the program has closed its file, or the disk is full.

    Args:
        path: of the file.
        rank: of this process in its job.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._offset = RECORD.size * rank
        self._file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._identity = _identity(self._file)
        weakref.finalize(self, _close, self._file, self._identity)

    def note_step(self, step: int) -> None:
        """Write that this rank has reached ``step``, >= 0."""
        self._write(step + 1, self._offset)

    def note_takes_requests(self) -> None:
        """Write that this rank takes signals as requests to stop."""
        self._write(1, self._offset + NUMBER.size)

    def note_failure(self) -> None:
        """Write that an exception is about to end this rank."""
        self._write(1, self._offset + 2 * NUMBER.size)

    def _write(self, number: int, offset: int) -> None:
        with contextlib.suppress(OSError):
            if _identity(self._file) == self._identity:
                os.pwrite(self._file, NUMBER.pack(number), offset)


def _identity(file: int) -> tuple[int, int]:
    """Return the device and the inode behind a descriptor, whose number may belong to another file later."""
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def _close(file: int, identity: tuple[int, int]) -> None:
    with contextlib.suppress(OSError):
        if _identity(file) == identity:
            os.close(file)


def progress_of_process() -> Progress | None:
    """Return the record of this process; None if no launcher reads it, or its launcher started another process."""
    path = env(VARIABLE)
    if path is None or env("SINGA_LITE_LAUNCHER_PID") not in (None, str(os.getppid())):
        return None
    try:
        return Progress(path, launched_job().rank)
    except OSError:  # the launcher has gone, or a host does not have the folder
        return None
