# SPDX-License-Identifier: Apache-2.0
"""Run a notebook in processes of its own, of which nothing stays.

A notebook that starts a cluster has many processes, in several sessions, and some of them outlive a kernel that is
killed. All inherit a mark in their environment. A guard process kills what bears the mark when the test ends, and also
when the tests themselves are killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.comm.processes import fresh_environment, wait_until
from tests.limits import LIMIT_S
from tests.ranks import mpi_missing

ROOT = Path(__file__).parents[1]
MARK = "NOTEBOOK_OF_A_TEST"
NEEDED = ("ipykernel", "ipyparallel", "nbclient")
GUARD = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests import notebooks; notebooks.guard(sys.argv[1])"
EXECUTE = f"""
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
limit_s = {LIMIT_S / 2}  # of a cell, so that the error names it
try:
    nbclient.NotebookClient(notebook, timeout=limit_s, startup_timeout=limit_s).execute()
finally:
    nbformat.write(notebook, sys.argv[2])
"""


def notebooks_missing() -> str:
    """Why a notebook with MPI engines cannot run here, or "" if it can."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: pip install 'singa-lite[notebook]'"
    return mpi_missing()


def execute(cells: list[dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """Run cells as a notebook of the folder; return them with their outputs, by id.

    Raises:
        AssertionError: a cell failed, or took too long, or a process was left running.
    """
    source, result = folder / "source.ipynb", folder / "result.ipynb"
    source.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    own = {f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    with guarded() as environment:
        done = subprocess.run(
            [sys.executable, "-c", EXECUTE, str(source), str(result)],
            cwd=folder,
            env={**environment, **own, "IPYTHONDIR": str(folder / "ipython")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        wait_until(lambda: not marked(environment[MARK]), "the end of every process of the notebook")
    return {cell["id"]: cell for cell in json.loads(result.read_text())["cells"]}


@contextlib.contextmanager
def guarded() -> Iterator[dict[str, str]]:
    """Give an environment; at the end all processes that have inherited it are killed."""
    value = secrets.token_hex(8)
    command = [sys.executable, "-c", GUARD, value]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield fresh_environment(**{MARK: value})  # leaving closes stdin, and waits


def guard(value: str) -> None:
    """Wait for the end of stdin, then kill all marked processes and those they start meanwhile."""
    sys.stdin.read()
    while left := marked(value):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def marked(value: str) -> list[int]:
    """Ids of the living processes with this mark; a zombie has no environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if f"{MARK}={value}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
