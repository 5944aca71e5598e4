# SPDX-License-Identifier: Apache-2.0
"""Whole jobs of which one process fails, leaves early or is started alone: what the others say, and what is left."""

from __future__ import annotations

import contextlib
import functools
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.comm.processes import (
    assert_nothing_left,
    at_once,
    fresh_environment,
    launch_command,
    run_command,
    wait_until,
    write_script,
)
from tests.limits import LIMIT_S
from tests.ranks import _mpiexec, mpi_missing
from tests.slow_cases import cases_that_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several processes need Linux")

TIMEOUT_S = 300  # of the stores
GRACE_S = 100  # far below: what comes within it came from no time-out; run alone it takes 2 s, see the figures printed

HEAD = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from singa_lite import kvstore, opt
from singa_lite.comm.job import launched_job
from singa_lite.errors import CommError, OptionError

folder, job = Path(__file__).parent, launched_job()
name = job.name_of(job.rank).replace(" ", "-")


def note(what, text=""):
    part = folder / f"part-{name}-{what}"
    part.write_text(f"{time.monotonic()} {text}")
    part.rename(folder / what)

"""
TRAIN = """
note(f"pid-{name}", os.getpid())
store = kvstore.create("dist_sync", timeout_s=300)
note(f"maps-{name}", Path("/proc/self/maps").read_text())
weights, grads = np.ones(200_000, np.float32), np.ones(200_000, np.float32)
store.init("fc.W", weights)
store.set_optimizer(opt.SGD(lr=0.1, momentum=0.9))


def fail():
    kind = sys.argv[1]
    if kind == "ends":
        note("fault")
        sys.exit(0)
    if kind == "raises":
        note("fault")
        raise ValueError("the loss is NaN")
    victim = os.getpid() if kind == "killed" else int((folder / "pid-server-0").read_text().split()[1])
    note("fault")
    os.kill(victim, signal.SIGKILL)


try:
    for i in range(5):
        if i == 3 and store.rank == 1:
            fail()
        store.pushpull("fc.W", grads, weights)
except CommError as error:
    note(f"error-{name}", error)
    raise
print("not reached")
"""


class Fault(NamedTuple):
    """A job in which worker 1 does something before its fourth round.

    Attributes:
        kind: "killed", "raises", "ends", or "server": it kills server 0.
    """

    kind: str
    transport: str
    workers: int
    servers: int


# -> what every other worker says, beside the key
FAULTS = {
    Fault("killed", "shm", 3, 2): ["worker 1 (process ", ") died"],
    Fault("server", "shm", 2, 2): ["server 0 (process ", ") died"],
    Fault("raises", "shm", 2, 1): ["worker 1 aborted: ValueError: the loss is NaN"],
    Fault("raises", "mpi", 2, 1): ["worker 1 aborted: ValueError: the loss is NaN"],
    Fault("ends", "shm", 3, 1): [
        "worker 1 has left after 3 pushes of 'fc.W', but worker ",
        "has pushed it 4 times",
    ],
    Fault("ends", "mpi", 2, 1): [
        "worker 1 has left after 3 pushes of 'fc.W', but worker 0 has pushed it 4 times"
    ],
    Fault("killed", "shm", 3, 0): ["rank 1 (process ", ") died"],
    Fault("ends", "shm", 2, 0): ["rank 1 (process ", ") has closed its communicator"],
}
CASES = [pytest.param(fault, marks=[pytest.mark.slow] * (fault.transport == "mpi")) for fault in FAULTS]


def command_of(transport, script, workers, servers, *arguments):
    size = str(workers + servers)
    if transport == "mpi":
        return [_mpiexec() or "", "-n", size, sys.executable, str(script), *arguments]
    start = [sys.executable, "-m", "singa_lite", "run", "-n", str(workers), "-s", str(servers)]
    return [*start, str(script), *arguments]


def run_job(transport, script, workers, servers, *arguments):
    return run_command(
        command_of(transport, script, workers, servers, *arguments), SINGA_LITE_NUM_SERVERS=str(servers)
    )


def at(path):
    """(when a process wrote a note, its text)."""
    seconds, _, text = path.read_text().partition(" ")
    return float(seconds), text


class Outcome(NamedTuple):
    """What became of a job.

    Attributes:
        result: the launcher's.
        errors: by process, seconds after the fault and text of its CommError.
        over_s: seconds after the fault when the launcher had ended.
        left: files of the job in /dev/shm.
    """

    result: subprocess.CompletedProcess[str]
    errors: dict[str, tuple[float, str]]
    over_s: float
    left: list[str]


def inject(folder, fault):
    folder = folder / "-".join(map(str, fault))
    folder.mkdir()
    script = write_script(folder, HEAD + TRAIN)
    result = run_job(fault.transport, script, fault.workers, fault.servers, fault.kind)
    ended = time.monotonic()
    began = at(folder / "fault")[0]
    errors = {
        path.name.removeprefix("error-"): (at(path)[0] - began, at(path)[1])
        for path in folder.glob("error-*")
    }
    # MPI's are removed by a process that outlives the launcher a little
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not shared_files(folder), "the removal of files", GRACE_S)
    return Outcome(result, errors, ended - began, shared_files(folder))


def shared_files(folder):
    """The files in /dev/shm that processes of the job had mapped and that are there still."""
    words = {word for path in folder.glob("maps-*") for word in path.read_text().split()}
    return sorted(word for word in words if word.startswith("/dev/shm/") and Path(word).exists())


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """What became of the jobs; two run at the same time."""
    folder, found = tmp_path_factory.mktemp("faults"), {}
    faults = cases_that_run(request, "fault")
    faults = [fault for fault in faults if fault.transport != "mpi" or not mpi_missing()]
    for some in (faults[start : start + 2] for start in range(0, len(faults), 2)):
        found.update(
            zip(some, at_once([functools.partial(inject, folder, fault) for fault in some]), strict=True)
        )
    assert_nothing_left(folder)
    return found


@pytest.mark.parametrize("fault", CASES, ids=lambda fault: "-".join(map(str, fault)))
def test_every_survivor_names_process_key_and_reason_and_the_job_ends(outcomes, fault):
    if fault not in outcomes:
        pytest.skip(mpi_missing())
    result, errors, over_s, left = outcomes[fault]
    print(fault, {name: f"{seconds:.3f} s" for name, (seconds, _) in errors.items()}, f"over {over_s:.3f} s")
    survivors = {f"worker-{rank}" for rank in range(fault.workers) if rank != 1 or fault.kind == "server"}
    assert set(errors) == survivors, result
    for seconds, text in errors.values():
        assert "'fc.W'" in text and all(piece in text for piece in FAULTS[fault]), text
        assert seconds < GRACE_S
    assert result.returncode != 0 and over_s < GRACE_S
    assert "not reached" not in result.stdout
    assert left == []


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.servers and fault.transport == "shm"])
def test_servers_that_survive_give_the_reason_too(outcomes, fault):
    text = outcomes[fault].result.stderr
    for number in range(fault.kind == "server", fault.servers):
        lines = [
            line for line in text.splitlines() if line.startswith(f"[s{number}] singa_lite.errors.CommError")
        ]
        assert len(lines) == 1, text
        if fault.kind != "server":  # else a worker's error comes first, or the other's death
            assert all(piece in lines[0] for piece in FAULTS[fault]), text


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.transport == "shm"])
def test_the_launcher_names_the_first_that_failed(outcomes, fault):
    text = outcomes[fault].result.stderr
    if fault.kind in ("killed", "server"):
        who = "rank 1" if not fault.servers else "worker 1" if fault.kind == "killed" else "server 0"
        assert f"singa-lite run: {who} failed first (killed by SIGKILL)" in text, text
    if fault.kind == "raises":
        who = "worker 1" if fault.servers else "rank 1"
        assert f"singa-lite run: {who} failed first" in text and "ValueError: the loss is NaN" in text, text


# ---- normal ends -------------------------------------------------------------------------------------

NORMAL = """
store = kvstore.create("dist_sync", timeout_s=300)
assert kvstore.create("dist_sync") is store
try:
    kvstore.create("dist_async")
except OptionError as error:
    assert "this process has a store made with" in str(error), error
else:
    raise AssertionError("two stores")
try:
    kvstore.create("local")
except OptionError as error:
    assert "train apart" in str(error) and "alone=True" in str(error), error
else:
    raise AssertionError("a local store")
alone = kvstore.create("local", alone=True)
alone.init(1, np.zeros(2))
store.init("a", np.zeros(3, np.float32))
mine = np.full(3, store.rank + 1, np.float32)
store.push("a", mine)  # is nowhere waited for
store.pushpull("a", mine, wait=False)
sys.stdout.write(f"{store.num_workers} {store.num_servers} {store.rank}\\n")
if sys.argv[1] == "close":
    store.close()
    store.close()
    if store.num_servers:
        try:
            kvstore.create("dist_sync")
        except CommError as error:
            assert "was closed, and its servers have left" in str(error), error
        else:
            raise AssertionError("a store that was closed")
"""


def run_jobs(folder, text, jobs, *arguments):
    """The results of a script as these (transport, workers, servers), at the same time."""
    jobs = [job for job in jobs if job[0] != "mpi" or not mpi_missing()]
    script = write_script(folder, text)
    results = at_once([functools.partial(run_job, job[0], script, *job[1:], *arguments) for job in jobs])
    assert_nothing_left(folder)
    return dict(zip(jobs, results, strict=True))


@pytest.mark.parametrize("end", ["close", "just end"])
def test_a_job_ends_well_with_and_without_close(tmp_path, end):
    jobs = [("shm", 2, 1), ("shm", 3, 0)] if end == "close" else [("shm", 3, 1), ("mpi", 2, 1)]
    for (transport, workers, servers), result in run_jobs(tmp_path, HEAD + NORMAL, jobs, end).items():
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        lines = [line.partition("] ")[2] or line for line in result.stdout.splitlines()]
        assert sorted(lines) == [f"{workers} {servers} {rank}" for rank in range(workers)], transport


# ---- a server without a script -----------------------------------------------------------------------

UNKNOWN = """
class Mine(opt.Optimizer):
    def __init__(self, rate=2.0):
        super().__init__(0.1)
        self.rate = rate

    def apply(self, name, value, grad):
        value += grad * self.rate

store = kvstore.create("dist")
store.init("a", np.ones(2, np.float32))
try:
    store.set_optimizer(Mine())
except OptionError as error:
    print("error", store.rank, error)
store.set_optimizer(opt.SGD(lr=1.0))
out = np.zeros(2, np.float32)
store.pushpull("a", np.ones(2, np.float32), out)
print("value", store.rank, out[0])
"""


def start_by_hand(commands, num_servers):
    """Start the processes of a job without a launcher."""
    environment = fresh_environment(
        SINGA_LITE_WORLD_SIZE=str(len(commands)),
        SINGA_LITE_NUM_SERVERS=str(num_servers),
        SINGA_LITE_RENDEZVOUS_ID=f"kv{secrets.token_hex(8)}",
        OMP_NUM_THREADS="1",
    )
    return [
        subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "SINGA_LITE_RANK": str(rank)},
        )
        for rank, command in enumerate(commands)
    ]


def test_an_optimizer_that_a_server_does_not_know_is_an_error_on_every_worker(tmp_path):
    script = str(write_script(tmp_path, HEAD + UNKNOWN))
    processes = start_by_hand([[script], [script], ["-m", "singa_lite.kvstore"]], 1)
    ends = [process.communicate(timeout=LIMIT_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], ends
    for rank, (out, _) in enumerate(ends[:2]):
        error, value = out.splitlines()
        assert (
            error.startswith(f"error {rank} ") and "server 0: create: no Optimizer is called 'Mine'" in error
        ), error
        assert "before this call, at the top of the script that every process runs" in error, error
        assert value == f"value {rank} -1.0"
    assert ends[2] == ("", "")


def test_a_worker_cannot_be_a_server(tmp_path):
    (process,) = start_by_hand([["-m", "singa_lite.kvstore"]], 0)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and "has no servers" in errors, errors


CAUGHT = """
try:
    store = kvstore.create("dist")
    values = np.zeros(3, np.float32)
    store.init("a", values)
    if store.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    store.pushpull("a", values, values)
except CommError as error:  # as many scripts do
    note(f"caught-{name}", error)
    sys.exit(1)
"""


def test_a_script_that_catches_its_errors_still_learns_who_died(tmp_path):
    script = write_script(tmp_path, HEAD + CAUGHT)
    result = run_command(launch_command(script, 2, options=["-s", "1"], is_patient=True))
    assert result.returncode != 0
    assert "Traceback" not in result.stderr, result.stderr  # what it has caught is not said again
    text = (tmp_path / "caught-worker-0").read_text()
    assert "server 0: worker 1 (process " in text and ") died" in text, text


STOPPED = """
note(f"pid-{name}", os.getpid())
store = kvstore.create("dist", timeout_s=3, big_array=100)
values = np.zeros(1000, np.float32)  # a part on each server
store.init("a", values)
_, other = (folder / "pid-server-1").read_text().split()
os.kill(int(other), signal.SIGSTOP)
try:
    store.pushpull("a", values, values)
except CommError as error:
    note(f"caught-{name}", error)
os.kill(int(other), signal.SIGCONT)
sys.exit(1)
"""


def test_of_several_servers_the_one_that_is_stopped_is_named(tmp_path):
    script = write_script(tmp_path, HEAD + STOPPED)
    result = run_command(launch_command(script, 1, options=["-s", "2"]))
    assert result.returncode != 0
    text = (tmp_path / "caught-worker-0").read_text()
    assert "server 1 says nothing" in text and "server 0 says" not in text, text
