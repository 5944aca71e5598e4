# SPDX-License-Identifier: Apache-2.0
"""Start scripts as a user does, and see that nothing of them stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tests.limits import LIMIT_S

Result = TypeVar("Result")
# `singa-lite` that waits until its processes have ended by themselves, however slow the machine is
PATIENT = (
    "import sys; from singa_lite import cli, info_command; "
    "from singa_lite.launch import one_host, restart, several_hosts, supervise; "
    f"one_host.DRAIN_S = restart.DRAIN_S = several_hosts.DRAIN_S = supervise.DRAIN_S = {LIMIT_S}; "
    f"info_command.LIMIT_S = {LIMIT_S}; "
    f"several_hosts.FINAL_OUTPUT_S = supervise.FINAL_OUTPUT_S = supervise.ALIVE_S = {LIMIT_S}; "
    "sys.exit(cli.main())"
)
WORLD = re.compile(r"SINGA_LITE_|PMI|OMPI_|MV2_|SLURM_|OMP_NUM_THREADS")


def fresh_environment(**changes: str) -> dict[str, str]:
    """This process's environment without a world in it."""
    kept = {name: value for name, value in os.environ.items() if not WORLD.match(name)}
    return {**kept, **changes}


def write_script(folder: Path, text: str, name: str = "script.py") -> Path:
    """A script below pytest's folder for the test, whose path marks all its processes."""
    path = folder / name
    path.write_text(text)
    return path


def run_command(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``command`` to its end."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=fresh_environment(**environment),
    )


def at_once(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """What the calls return, made at the same time: jobs that mostly wait need not wait for each other."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def run_ranks_of(script: Path, num_ranks: int, *arguments: str, is_patient: bool = False, **environment: str):
    """`singa-lite run -n num_ranks script arguments`."""
    return run_command(launch_command(script, num_ranks, *arguments, is_patient=is_patient), **environment)


def launch_command(
    script: Path, num_ranks: int, *arguments: str, options: Sequence[str] = (), is_patient: bool = False
) -> list[str]:
    """The command; a patient launcher does not end the ranks that go on after a failure or a signal."""
    start = [sys.executable, *(("-c", PATIENT) if is_patient else ("-m", "singa_lite"))]
    return [*start, "run", "-n", str(num_ranks), *options, str(script), *arguments]


def running(marker: str | Path) -> list[str]:
    """Command lines of living processes that contain ``marker`` (zombies have none)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(marker) in line and path.parent.name != str(os.getpid()):
            found.append(f"{path.parent.name}: {line}")
    return found


def is_running(pid: str) -> bool:
    """Whether process ``pid`` exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter between its opening and reading
        return False


def wait_until(condition, what: str, limit_s: float = LIMIT_S) -> None:
    """Wait for ``condition()``; fail with ``what`` if it does not come true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.02)


def assert_nothing_left(folder: Path) -> None:
    """No process of scripts in ``folder`` runs any more; those found are killed."""
    try:
        wait_until(lambda: not running(folder), "the end of every process")
    finally:
        for line in running(folder):
            os.kill(int(line.split(":")[0]), signal.SIGKILL)
