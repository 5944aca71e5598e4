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
    """The library of these sources and other libraries; ``options`` are -Dname=value, for the sources with the name."""
    parts = [
        object_file(source, headers, options) if source.suffix == ".cc" else source for source in sources
    ]
    linked = hashlib.sha256("".join(part.name for part in parts).encode())
    return made_once(
        f"{name}-{linked.hexdigest()[:16]}.so",
        lambda path: run("-shared", "-o", path, *parts, "-lpthread", "-ldl", "-lrt"),
    )


def object_file(source: Path, headers: Sequence[Path], options: Sequence[str]) -> Path:
    """The object file of a source, compiled with the options whose name is in it or in a header."""
    text = b"".join(file.read_bytes() for file in (*headers, source))
    given = [option for option in options if option.removeprefix("-D").partition("=")[0].encode() in text]
    key = hashlib.sha256(text + "".join(given).encode()).hexdigest()[:16]
    command = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-fPIC", f"-I{ROOT / 'native'}", *given]
    return made_once(f"{source.stem}-{key}.o", lambda path: run(*command, "-c", "-o", path, source))


def run(*arguments: str | Path) -> None:
    subprocess.run(["g++", *arguments], check=True, timeout=LIMIT_S)


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
