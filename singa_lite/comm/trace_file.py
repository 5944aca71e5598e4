# SPDX-License-Identifier: Apache-2.0
"""A trace of a job: its processes' parts joined to one file of Chrome trace events.

What lives here: starting a part when a process joins its world, and joining the parts. What does not: writing steps to
a part (graph/trace.py, graph/clock.py), reading one (trace_part.py), the events of the trace (chrome_trace.py), clocks
of other hosts (clock_offset.py).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..config import env
from ..error_stream import tell
from ..errors import CheckpointError, CommError, OptionError
from ..files import atomic_file, try_lock
from ..graph.trace import SUFFIX, TraceWriter, trace_of_process
from .base import Communicator
from .chrome_trace import chrome_trace
from .clock_offset import measure_offset, pairs_with_rank_0
from .trace_part import Part, read_part

LEAVE_S = 2.0  # that a rank waits at its end for each comparison of clocks


def parts_folder(path: Path) -> Path:
    """Return the folder for the parts of the trace ``path``."""
    return path.with_name(f"{path.name}.parts")


@contextlib.contextmanager
def tracing(path: Path | None) -> Iterator[dict[str, str]]:
    """Join a trace after the ``with`` block, whose processes have the variables that this gives, however it ends.

    Args:
        path: of the trace; replaced if there is one. None: no trace.

    Raises:
        OptionError: its folder is missing, or it cannot be written there.
    """
    if path is None:
        yield {}
        return
    path = path.absolute()
    folder, handle = _take_parts_folder(path)
    try:
        yield {"SINGA_LITE_TRACE": str(folder)}
    finally:
        try:
            message = join_trace(folder, path, is_over=True)
        except (CommError, CheckpointError, OSError) as error:
            message = str(error)
        finally:
            os.close(handle)
        tell(f"singa-lite: {message}\n")


def _take_parts_folder(path: Path) -> tuple[Path, int]:
    """Make a folder for the parts of ``path``, empty, and lock it against other jobs; return it and its handle."""
    handle = None
    try:
        target = Path(os.path.realpath(path))  # which a loop of symlinks leaves as it is
        if os.path.lexists(target) and not target.is_file():
            raise OSError("it is there and not a regular file")
        if not target.parent.is_dir():
            raise OSError(f"there is no folder {target.parent}")
        folder = parts_folder(path)
        folder.mkdir(exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        # or it was removed and made again since it was opened
        if try_lock(handle) is False or not os.path.samestat(os.fstat(handle), folder.stat()):
            raise OSError("another job is writing it")
        for part in _parts_in(folder):  # of a launcher that was killed
            part.unlink()
    except OSError as error:
        if handle is not None:
            os.close(handle)
        raise OptionError(f"--trace {path}: cannot be written: {error}") from error
    return folder, handle


def start_trace(communicator: Communicator) -> None:
    """Write to this process's part, if a trace is asked for, which rank it is, and how far other hosts' clocks are off.

    All ranks must call it, and all have SINGA_LITE_TRACE or none. The clocks are compared again when the process ends,
    if no rank has failed.
    """
    writer = trace_of_process()
    if writer is None:
        return
    if communicator.is_alone and env("SINGA_LITE_RANK") not in (None, "0"):
        return  # a world of one within a rank
    writer.add_facts(rank=communicator.rank, host=os.uname().nodename)
    pairs = {} if communicator.is_alone else pairs_with_rank_0(communicator)
    for pair in pairs.values():
        pair.flight_recorder = None  # a peer that is late here has not failed
    _compare_clocks(pairs, writer)
    if pairs:
        atexit.register(_compare_clocks_again, pairs, writer)


def _compare_clocks(
    pairs: Mapping[int, Communicator], writer: TraceWriter, timeout_s: float | None = None
) -> None:
    for rank, pair in pairs.items():
        if (offset := measure_offset(pair, timeout_s=timeout_s)) is not None:
            writer.add_facts(offset_of=rank, offset=offset)


def _compare_clocks_again(pairs: Mapping[int, Communicator], writer: TraceWriter) -> None:
    """Compare clocks before this process leaves its world, with peers that end at about the same time."""
    if writer.pid == os.getpid():
        with contextlib.suppress(CommError):
            _compare_clocks(pairs, writer, LEAVE_S)


def join_trace(folder: Path, path: Path, is_over: bool = False) -> str:
    """Join the parts of a trace in ``folder``, write it to ``path`` and remove them; return a line about it.

    Args:
        is_over: all processes have ended; if not, those that still write are known by the locks of their parts.

    Raises:
        CommError: there are no parts, or one is damaged; or processes still write, and ``path`` has what they did so
            far. OSError, CheckpointError: a file cannot be read or written. The parts stay, but for empty ones of a job
            that is over without another.
    """
    files = _parts_in(folder)
    num_written = 0 if is_over else sum(map(_is_written, files))
    contents = [(str(file), file.read_bytes().splitlines()) for file in files]
    # a process that was killed, or had no disk, before its first line has no part
    parts = [read_part(lines, file) for file, lines in contents if lines]
    if not parts and is_over:
        _remove(files, folder)
        raise CommError(
            f"trace {path}: the job ended before a process began to trace, or runs on hosts that do not share {folder}"
            f"; {path}, if it is there, is of an earlier run"
        )
    if not parts:
        raise CommError(
            f"trace {path}: no process has written a part to {folder}, which all hosts of the job must share"
        )
    known: dict[int, Part] = {}
    # first those of a world
    for part in sorted(parts, key=lambda part: (part.rank is None, part.host == "", part.restart)):
        known[_free_number(part, known)] = part
    trace = chrome_trace(known)
    with atomic_file(path) as written:
        written.write(json.dumps(trace).encode())
    if num_written:
        raise CommError(
            f"trace {path}: {num_written} processes still write to {folder}: it has what {len(known)} processes did so "
            "far, and all parts stay; join them again when the processes have ended"
        )
    # its process may have made it a moment before the first look
    _remove([file for file in files if is_over or not _is_written(file)], folder)
    cut = ", of the first steps alone" if any(part.is_cut for part in parts) else ""
    return f"trace of {len(known)} processes{cut}: {path}; open it in ui.perfetto.dev or chrome://tracing"


def _remove(files: Sequence[Path], folder: Path) -> None:
    """Remove parts, and their folder if nothing else is in it."""
    for file in files:
        file.unlink()
    with contextlib.suppress(OSError):  # other files are in it
        folder.rmdir()


def _is_written(file: Path) -> bool:
    """Return whether the process of a part still writes it; False where the file system has no locks."""
    handle = os.open(file, os.O_RDWR)
    try:
        return try_lock(handle) is False
    finally:
        os.close(handle)


def _parts_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def _free_number(part: Part, known: Mapping[int, Part]) -> int:
    """Return the rank of a part; the next free number for one that is not a rank, or is a child or a restart of one."""
    return part.rank if part.rank is not None and part.rank not in known else max(known, default=-1) + 1
