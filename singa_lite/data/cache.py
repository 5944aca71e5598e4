# SPDX-License-Identifier: Apache-2.0
"""The folder of fetched data, shared by all processes of a user: where it is, one writer, whole files."""

from __future__ import annotations

import errno
import glob
import math
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .. import config
from ..errors import DataError
from ..users_line import warn

try:
    import fcntl
except ImportError:  # Windows: two processes may fetch at once; each still writes whole, equal files
    fcntl = None  # type: ignore[assignment]

POLL_S = 0.05  # how soon a free lock is noticed
SILENT_S = 5.0  # of a wait for a lock, before a warning: a fetch takes longer, checking the files does not


def cache_root() -> Path:
    """SINGA_LITE_CACHE, or ``~/.cache/singa_lite``; each data set has a folder of its own in it."""
    given = config.env("SINGA_LITE_CACHE")
    if given is None and os.path.expanduser("~") == "~":
        raise DataError("there is no home folder for ~/.cache/singa_lite; set SINGA_LITE_CACHE to a folder")
    return as_path("SINGA_LITE_CACHE", given or "~/.cache/singa_lite")


def as_path(where: str, folder: object) -> Path:
    """Return ``folder`` as a Path, with a home for ``~``; DataError if it is not a path or cannot be looked up."""
    if not isinstance(folder, (str, os.PathLike)) or "\0" in os.fspath(folder):
        raise DataError(f"{where}: folder must be a path, not {folder!r}")
    path = os.path.expanduser(folder)
    if os.fspath(folder).startswith("~") and path == os.fspath(folder):
        raise DataError(f"{where}: {folder!r} begins with no user's home; ./~ begins a folder of that name")
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # the caller says so
    except (OSError, UnicodeEncodeError) as error:  # the latter: half of a surrogate pair
        raise DataError(f"{where}: {error}") from error
    return Path(path)


@contextmanager
def locked(path: Path, wait_s: float = math.inf) -> Iterator[None]:
    """Hold ``path`` against other processes; the system frees it when a holder dies.

    A wait of more than SILENT_S is a UserWarning, which names ``path`` and ``wait_s``.

    Raises:
        OSError: ``path`` is a symlink or not a regular file; nothing is written to it, whatever it is. Another process,
            which may have been stopped, holds it after ``wait_s`` seconds.
    """
    flags = os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, os.O_RDWR | flags, 0o666)  # NFS locks nothing else
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):  # another user's, or nobody can write
            raise
        handle = os.open(path, os.O_RDONLY | flags, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is not a regular file; remove it")
        if fcntl is not None:
            _lock(handle, path, wait_s)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, path: Path, wait_s: float) -> None:
    start = time.monotonic()
    is_warned = False
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited_s = time.monotonic() - start
            if waited_s >= wait_s:
                raise OSError(f"{path} was not free for {wait_s:g} s, as other processes held it") from None
            if waited_s >= SILENT_S and not is_warned:
                limit = "until it is free" if math.isinf(wait_s) else f"for at most {wait_s:g} s"
                warn(f"waiting for {path}, which another process holds, {limit}")
                is_warned = True
            time.sleep(POLL_S)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that takes the name ``path`` when the block ends without an error, and vanishes otherwise.

    It is written under a name that nobody can foresee, and is opened only if there is no such file or symlink. The
    caller holds the lock of the folder: what a writer that was killed has left there is removed.
    """
    if fcntl is not None:
        for part in path.parent.glob(f"{glob.escape(path.name)}.part-*"):
            part.unlink(missing_ok=True)
    part = path.with_name(f"{path.name}.part-{os.urandom(8).hex()}")
    try:
        with part.open("xb") as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
