# SPDX-License-Identifier: Apache-2.0
"""Shared libraries of the stand-ins, compiled by g++ and kept in build/ for the next run."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.limits import LIMIT_S

ROOT = Path(__file__).parents[2]
STANDIN = Path(__file__).parent
KEPT = ROOT / "build" / "standin"


def driver() -> Path:
    """The stand-in of libcuda: streams, events and graphs on threads."""
    return library("cuda", [STANDIN / "cuda" / "driver.cc"])


def library(
    name: str, sources: Sequence[Path], headers: Sequence[Path] = (), options: Sequence[str] = ()
) -> Path:
    """The library of these sources and other libraries, compiled with ``options``."""
    text = b"".join(source.read_bytes() for source in (*headers, *sources)) + "".join(options).encode()

    def build(path: Path) -> None:
        command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-o", path, *options]
        command += [f"-I{ROOT / 'native'}", *sources, "-lpthread", "-ldl", "-lrt"]
        subprocess.run(command, check=True, timeout=LIMIT_S)

    return made_once(f"{name}-{hashlib.sha256(text).hexdigest()[:16]}.so", build)


def made_once(name: str, build: Callable[[Path], object]) -> Path:
    """The file ``name`` in build/, which ``build`` writes unless it is there; other processes wait for it meanwhile."""
    made = KEPT / name
    if not made.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with open(f"{made}.lock", "w") as lock, tempfile.TemporaryDirectory(dir=KEPT) as folder:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                build(Path(folder, name))
                os.replace(Path(folder, name), made)
    return made
