# SPDX-License-Identifier: Apache-2.0
"""`singa-lite info`: what was built and which transports work here."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import _native
from .backend.cpu.bfloat16 import describe
from .comm import find_transports
from .comm.job import threads_per_rank

LIMIT_S = 30.0  # a broken MPI or driver may hang where its name is read
ASK_CUDA = (
    "from singa_lite import device as d; names = [d.device_query(i).split(chr(10))[0] for i in d.get_gpu_ids()]; "
    "print('works:', '; '.join(names)) if names else d.create_cuda_gpu()"
)
ASK_TRANSPORT = "from singa_lite.comm import find_transports; print(find_transports()[{!r}].describe())"


def print_info() -> int:
    """Print what ``info`` returns; return the exit code."""
    print(info())
    return 0


def info() -> str:
    """List what was built and which transports work here, and why the others do not."""
    rows = [
        ("singa-lite", package_version()),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("numpy", version("numpy")),
        (
            "platform",
            f"{platform.system()} {platform.machine()}, {threads_per_rank(1)} cores for this process",
        ),
        *((f"native {name}", f"{what}: {_native.load(name)[1]}") for name, what in _native.MODULES.items()),
        ("oneDNN", _onednn()),
        ("bfloat16", describe()),
        *((f"transport {word}", _ask(ASK_TRANSPORT.format(word))) for word in find_transports()),
        ("device cuda", _ask(ASK_CUDA)),
    ]
    return "\n".join(f"{name:16} {text}" for name, text in rows)


def print_version() -> int:
    """Print what ``package_version`` returns; return the exit code."""
    print(package_version())
    return 0


def package_version() -> str:
    """Return the installed version, or the path of a copy that is only on Python's path."""
    try:
        return version("singa-lite")
    except PackageNotFoundError:
        return f"not installed, used from {Path(__file__).parent}"


def _onednn() -> str:
    """Return which oneDNN the CPU kernels were built with, and how many threads they use."""
    kernels, reason = _native.load("_kernels")
    if kernels is None:
        return f"no: {reason}"
    if not kernels.onednn:
        return "no: built without it, so convolutions and matrix products are numpy's"
    return f"{kernels.onednn}, {kernels.num_threads()} threads"


def _ask(code: str) -> str:
    """Run Python code in a process of its own, so that nothing here can hang; return its first line, or "no: why"."""
    try:
        answer = subprocess.run(
            _python(code), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"no: no answer within {LIMIT_S:g} s"
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        return f"no: {last}"
    return (answer.stdout.strip(chr(0)).strip().splitlines() or ["no: no answer"])[0]


def _python(code: str) -> list[str]:
    """Return the command that runs Python code with this process's package."""
    # -c puts the current folder first, where a package of this name may be that is not the one running
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]
