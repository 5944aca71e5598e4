# SPDX-License-Identifier: Apache-2.0
"""Injected faults under mpiexec: 11 kinds at 7 stages of a job of 3 ranks, and what became of the job.

    .venv-test/bin/python tests/comm/mpi_faults.py [KIND ...]

Prints one line per fault and ends with 1 if any of them broke a promise (``complaints_of``). test_mpi_faults.py runs
some of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.comm.processes import fresh_environment, running, wait_until, write_script
from tests.ranks import _mpiexec

RANKS, VICTIM = 3, 1
TIMEOUT_S = 6.0
GRACE_S = 5.0  # a job must end this long after the time-out at the latest
GONE_S = 5.0  # processes and files must be gone this long after mpiexec, which does not wait for all of them
LIMIT_S = 40.0  # a job that runs longer hangs

KINDS = (
    "kill9",
    "raise",
    "exit0",
    "_exit0",
    "_exit3",
    "segv",
    "rankint",
    "stop",
    "launcherint",
    "launcherterm",
    "launcherkill",
)
STAGES = ("import", "rendezvous", "first", "mid", "between", "checkpoint", "exit")
LAUNCHER_SIGNALS = {
    "launcherint": signal.SIGINT,
    "launcherterm": signal.SIGTERM,
    "launcherkill": signal.SIGKILL,
}

SCRIPT = """
import atexit, os, signal, sys, time
from pathlib import Path

folder, kind, stage, timeout_s = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
is_victim = rank == int(sys.argv[5])


def note(name, text=""):
    part = folder / f"{name}-{rank}.part"
    part.write_text(f"{time.monotonic()} {text}")
    part.rename(folder / f"{name}-{rank}")


def reach(name):
    if name != stage or not is_victim:
        return
    note("fault")
    if kind == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "raise":
        raise ValueError("injected")
    elif kind == "exit0":
        sys.exit(0)
    elif kind == "_exit0":
        os._exit(0)
    elif kind == "_exit3":
        os._exit(3)
    elif kind == "segv":
        import ctypes
        ctypes.string_at(0)
    elif kind == "rankint":
        os.kill(os.getpid(), signal.SIGINT)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)


note("pid", str(os.getpid()))
try:
    reach("import")
    import numpy as np
    from singa_lite.comm import mpi_job, rendezvous
    world_of = mpi_job.world_of

    def world_after_fault(*arguments):
        reach("rendezvous")
        return world_of(*arguments)

    mpi_job.world_of = world_after_fault
    communicator = rendezvous.process_communicator(timeout_s=timeout_s)
    child = os.fork()
    if child == 0:  # like a worker of a data loader
        signal.pause()
    atexit.register(reach, "exit")
    small, large = np.ones(10, np.float32), np.ones(2_000_000, np.float32)
    reach("first")
    for step in range(3):
        communicator.all_reduce(small, "mean", name="small").wait()
        work = communicator.all_reduce(large, "mean", name="large")
        if step == 1:
            reach("mid")
        work.wait()
        if step == 1:
            reach("between")
            with (folder / f"checkpoint-{rank}").open("wb") as file:
                file.write(large.tobytes())
                reach("checkpoint")
                file.write(large.tobytes())
    os.kill(child, signal.SIGKILL)
    note("done")
except BaseException as error:
    note("error", type(error).__name__)
    raise
"""


@dataclass
class Outcome:
    """What became of one job."""

    kind: str
    stage: str
    code: int | None = None  # exit code of mpiexec; None: it hung and was killed
    seconds: float = 0.0  # from the fault to the end of mpiexec
    survivors: dict[int, str] = field(default_factory=dict)  # rank: "done", "killed" or its error's name
    left: list[str] = field(default_factory=list)
    output: str = ""

    def __str__(self) -> str:
        code = "HANG" if self.code is None else f"code {self.code}"
        return f"{self.kind:12} {self.stage:10} {self.seconds:5.2f} s  {code:8} {self.survivors} {self.left}"


def complaints_of(outcome: Outcome, grace_s: float = GRACE_S) -> list[str]:
    """What this job promised and did not keep."""
    found = [f"left behind: {name}" for name in outcome.left]
    if outcome.code is None:
        return [*found, "hung"]
    if outcome.seconds > TIMEOUT_S + grace_s:
        found.append(f"ended {outcome.seconds:.1f} s after the fault")
    # by Python, in a function of atexit
    is_ignored = outcome.kind in ("raise", "exit0", "rankint", "launcherint")
    all_finished = outcome.stage == "exit" and is_ignored
    if outcome.code == 0 and not all_finished:
        found.append("exit code 0 although a rank was lost")
    fair = {"killed", "CommError"}
    # numpy's import says so
    fair |= {"KeyboardInterrupt", "ImportError"} if outcome.kind == "launcherint" else set()
    fair |= {"done"} if outcome.stage == "exit" or outcome.kind.startswith("launcher") else set()
    found += [f"rank {rank} ended with {end}" for rank, end in outcome.survivors.items() if end not in fair]
    return found


def inject(kind: str, stage: str, limit_s: float = LIMIT_S, gone_s: float = GONE_S) -> Outcome:
    """Run a job of ``RANKS`` ranks, in which the fault happens to ``VICTIM`` or to mpiexec."""
    outcome = Outcome(kind, stage)
    with tempfile.TemporaryDirectory(prefix="mpi-fault-") as name:
        folder = Path(name)
        mpiexec = _mpiexec()
        assert mpiexec
        script = write_script(folder, SCRIPT)
        arguments = [str(folder), kind, stage, str(TIMEOUT_S), str(VICTIM)]
        with (folder / "output").open("wb") as log:
            job = subprocess.Popen(
                [mpiexec, "-n", str(RANKS), sys.executable, str(script), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=fresh_environment(),
                start_new_session=True,
            )
        files: set[str] = set()
        try:
            outcome.code, outcome.seconds = _watch(job, folder, LAUNCHER_SIGNALS.get(kind), files, limit_s)
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not _left(folder, files), "the end of all", gone_s)
            outcome.left = _left(folder, files)
        finally:
            _kill_all(job, folder)
        for rank in range(RANKS):
            if rank != VICTIM or kind.startswith("launcher"):
                outcome.survivors[rank] = _end_of(folder, rank)
        outcome.output = (folder / "output").read_text(errors="replace")
    return outcome


def _watch(
    job: subprocess.Popen[bytes],
    folder: Path,
    number: signal.Signals | None,
    files: set[str],
    limit_s: float,
) -> tuple[int | None, float]:
    """Wait for the job, signal mpiexec when the fault is due, collect the shared-memory files of the ranks."""
    started = time.monotonic()
    while job.poll() is None and time.monotonic() < started + limit_s:
        for pid in _pids(folder):
            with contextlib.suppress(OSError):
                files.update(re.findall(r"/dev/shm/mpich_shm_\w+", Path(f"/proc/{pid}/maps").read_text()))
        if number is not None and (folder / f"fault-{VICTIM}").exists():
            job.send_signal(number)
            number = None
        time.sleep(0.02)
    fault = folder / f"fault-{VICTIM}"
    since = float(fault.read_text().split()[0]) if fault.exists() else started
    return job.poll(), time.monotonic() - since


def _pids(folder: Path) -> list[int]:
    return [int(path.read_text().split()[1]) for path in folder.glob("pid-*[0-9]")]


def _end_of(folder: Path, rank: int) -> str:
    if (folder / f"done-{rank}").exists():
        return "done"
    error = folder / f"error-{rank}"
    return error.read_text().split()[1] if error.exists() else "killed"


def _left(folder: Path, files: set[str]) -> list[str]:
    return running(folder) + sorted(path for path in files if Path(path).exists())


def _kill_all(job: subprocess.Popen[bytes], folder: Path) -> None:
    for line in running(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split(":")[0]), signal.SIGKILL)
    job.kill()
    job.wait()


def main(kinds: list[str]) -> int:
    faults = [(kind, stage) for kind in kinds or KINDS for stage in STAGES]
    num_broken = 0
    with ThreadPoolExecutor(2) as pool:
        for outcome in pool.map(lambda fault: inject(*fault), faults):
            complaints = complaints_of(outcome)
            num_broken += bool(complaints)
            print(outcome, *complaints, sep="\n    " if complaints else "", flush=True)
            if complaints:
                print("    | " + outcome.output[-2000:].replace("\n", "\n    | "), flush=True)
    print(f"{len(faults)} faults, {num_broken} broke a promise")
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
