# SPDX-License-Identifier: Apache-2.0
"""The folder of fetched data, shared by all processes of a user: where it is, one writer, whole files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .. import config

try:
    import fcntl
except ImportError:  # Windows: two processes may fetch at once; each still writes whole, equal files
    fcntl = None  # type: ignore[assignment]


def cache_root() -> Path:
    """SINGA_LITE_CACHE, or ``~/.cache/singa_lite``; each data set has a folder of its own in it."""
    return Path(config.env("SINGA_LITE_CACHE") or Path.home() / ".cache" / "singa_lite").expanduser()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold ``path`` against other processes; the system frees it when a holder dies."""
    with path.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the name ``path`` when the block has ended well, and vanishes otherwise."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        with part.open("wb") as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
