# SPDX-License-Identifier: Apache-2.0
"""Shared libraries of the stand-ins, compiled by g++ and kept in build/ for the next run."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE_TESTS = ROOT / "native" / "tests"


def driver() -> Path:
    """The stand-in of libcuda: streams, events and graphs on threads."""
    return library("cuda", [NATIVE_TESTS / "standin_cuda.cc"])


def library(
    name: str, sources: Sequence[Path], headers: Sequence[Path] = (), options: Sequence[str] = ()
) -> Path:
    """The library of these sources and other libraries, compiled with ``options``."""
    text = b"".join(source.read_bytes() for source in (*headers, *sources)) + "".join(options).encode()
    kept = ROOT / "build" / "standin" / f"{name}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            built = Path(folder, kept.name)
            command = [
                "g++",
                "-std=c++17",
                "-O1",
                "-Wall",
                "-Wextra",
                "-fPIC",
                "-shared",
                "-o",
                built,
                *options,
            ]
            command += [f"-I{ROOT / 'native'}", *sources, "-lpthread", "-ldl", "-lrt"]
            subprocess.run(command, check=True, timeout=120)
            os.replace(built, kept)
    return kept
