# SPDX-License-Identifier: Apache-2.0
"""Writing files so that a reader sees the old one or the whole new one, and JSON that carries a hash of its values.

Note [temporaries]: a file is written under a name of its own beside the target and locked while its writer lives. A
killed writer leaves it behind; the next one to write that target removes those that nobody has locked, and none on a
file system without locks. Those of other targets stay, as the locks of another host may not be known here.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from .errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows: what a killed writer left stays
    fcntl = None  # type: ignore[assignment]

PART_SUFFIX = ".singa_lite-part"
MAX_TRIES = 100  # of a part's name, before writing fails
# a lock is taken by another process; any other errno: there are no locks
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
HASH = "sha256"  # in a sealed JSON file, beside its values

Json = Any


def sealed(values: Mapping[str, Json]) -> bytes:
    """Return a JSON object of ``values`` and a hash of them, which ``unsealed`` compares; a line for each."""
    content = {**values, HASH: _hash_of(values)}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
    return ("{" + ",\n".join(lines) + "}\n").encode()


def unsealed(content: bytes) -> dict[str, Json]:
    """Return the values that ``sealed`` was given.

    Raises:
        CheckpointError: ``content`` is not a JSON object, or its hash is missing or that of other values.
    """
    try:
        values = json.loads(content)
        if isinstance(values, dict) and values.pop(HASH, None) == _hash_of(values):
            return values
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is damaged: {error}") from error
    raise CheckpointError("it is damaged: its values are not those whose hash it has")


def _hash_of(values: Mapping[str, Json]) -> str:
    """Return the SHA-256 of values as they come back from JSON, in the order of their names."""
    import hashlib  # Note [imports]

    text = json.dumps(json.loads(json.dumps(values)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise CheckpointError for a folder, a device or a pipe, whose reader would wait; OSError if there is nothing."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError("it is not a regular file")


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a new file that takes the name ``path`` when the block ends without an error, and vanishes otherwise.

    A reader sees the old file or the whole new one, also after a power failure: file and folder are synchronised with
    the disk. A symlink stays and its target is replaced. The permissions of an existing file are kept.

    Raises:
        CheckpointError: ``path`` is a folder, device or pipe, or the system cannot write.
    """
    try:
        target = Path(os.path.realpath(path))
        mode = _permissions(path, target)
        _remove_abandoned(target)
        handle, part = _new_part(target, mode)
    except (
        OSError,
        TypeError,
        ValueError,
    ) as error:  # TypeError: no path; ValueError: a name with a zero byte
        raise CheckpointError(f"cannot write {path}: {error}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.fchmod(handle, mode)
            yield file
            file.flush()
            os.fsync(handle)
            os.replace(part, target)
        sync_folder(target.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error}") from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _permissions(path: str | os.PathLike[str], target: Path) -> int | None:
    """Return the permissions of an existing file, None if there is none; CheckpointError if it is another thing."""
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"cannot write {path}: it is not a regular file; give another path")
    return stat.S_IMODE(mode)


def _new_part(target: Path, mode: int | None) -> tuple[int, Path]:
    """Open a file beside ``target``; return it and its path, see Note [temporaries]."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    for _ in range(MAX_TRIES):
        part = target.with_name(f"{_part_start(target)}{os.urandom(8).hex()}{PART_SUFFIX}")
        handle = os.open(part, flags, 0o666 if mode is None else mode & 0o600)
        if try_lock(handle) is not False and part.exists():
            return handle, part
        os.close(handle)  # another writer took it for abandoned, between these two lines
        part.unlink(missing_ok=True)
    raise CheckpointError(f"cannot write {target}: others removed {MAX_TRIES} files that were to become it")


def _part_start(target: Path) -> str:
    name = os.fsencode(target.name)
    # names have up to 255 bytes; without a character that is cut
    return f".{target.name if len(name) <= 100 else name[:100].decode('utf-8', 'ignore')}."


def try_lock(handle: int) -> bool | None:
    """Take the lock of an open file or folder; False if a living process has it, None if this file system has none."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in TAKEN else None
    return True


def unlock(handle: int) -> None:
    """Release the lock of an open file or folder, if there is one."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)


def _remove_abandoned(target: Path) -> None:
    """Remove what killed writers of ``target`` left, see Note [temporaries]."""
    if fcntl is None:
        return
    for part in target.parent.glob(f"{glob.escape(_part_start(target))}{'[0-9a-f]' * 16}{PART_SUFFIX}"):
        with suppress(OSError):  # another's, or removed meanwhile: write all the same
            handle = os.open(part, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if try_lock(handle):
                    part.unlink()
            finally:
                os.close(handle)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a new name in it survives a power failure, where the file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
