# SPDX-License-Identifier: Apache-2.0
"""Jobs of workers and servers: who is what, which world the workers see, and how such a job ends."""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from pathlib import Path

import pytest

import singa_lite
from singa_lite import config
from singa_lite.comm import rendezvous
from singa_lite.comm.base import World
from singa_lite.comm.job import LAUNCHERS, Job, threads_per_rank
from singa_lite.comm.rendezvous import connect_messenger, find_job, find_world, process_messenger
from singa_lite.errors import CommError
from tests.comm.processes import WORLD, assert_nothing_left, at_once, run_command, write_script
from tests.ranks import _mpiexec, mpi_missing


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No job in the environment, and none joined."""
    for name in list(os.environ):
        if WORLD.match(name):
            monkeypatch.delenv(name)
    monkeypatch.setattr(config, "state", config.State())


def launched(monkeypatch, rank, size, num_servers):
    names = ("SINGA_LITE_RANK", "SINGA_LITE_WORLD_SIZE", "SINGA_LITE_RENDEZVOUS_ID", "SINGA_LITE_NUM_SERVERS")
    for name, value in zip(names, (rank, size, "abc", num_servers), strict=True):
        monkeypatch.setenv(name, str(value))


# ---- who is what -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(5))
def test_the_last_processes_are_servers(monkeypatch, rank):
    launched(monkeypatch, rank, 5, 2)
    job = find_job()
    assert job == Job(rank, 3, 2, "abc", "shm")
    assert job.is_server == (rank >= 3)
    assert list(job.peers) == ([0, 1, 2] if job.is_server else [3, 4])
    assert job.name_of(rank) == ["worker 0", "worker 1", "worker 2", "server 0", "server 1"][rank]
    assert job.names_of(range(5)) == "worker 0, 1, 2, server 0, 1"


def test_the_workers_are_the_world(monkeypatch):
    launched(monkeypatch, 2, 5, 2)
    assert find_world() == World(2, 3, 2, 3, "abc", "shm")


def test_a_single_worker_is_alone_in_its_world(monkeypatch):
    launched(monkeypatch, 0, 3, 2)
    assert find_world() == World()
    assert find_job() == Job(0, 1, 2, "abc", "shm")


def test_a_server_has_no_rank_in_the_world_of_the_workers(monkeypatch):
    launched(monkeypatch, 4, 5, 2)
    with pytest.raises(CommError, match=r"this process is server 1 of 2 .* world of the 3 workers"):
        find_world()


def test_a_world_given_by_hand_has_no_servers(monkeypatch):
    launched(monkeypatch, 4, 5, 2)
    assert find_world("other", 1, 2) == World(1, 2, 1, 2, "other", "shm")


@pytest.mark.parametrize("names", LAUNCHERS.values())
def test_servers_of_an_mpi_job_are_refused_the_world_before_mpi_starts(monkeypatch, names):
    for name, value in zip((*names, "SINGA_LITE_NUM_SERVERS"), ("3", "2", "1"), strict=True):
        monkeypatch.setenv(name, value)
    asked = []
    monkeypatch.setattr(rendezvous, "_mpi_job", lambda *arguments: asked.append(arguments))
    with pytest.raises(CommError, match="this process is server 0 of 1"):
        find_world(timeout_s=7)
    assert asked == [(2, 3, 7)]  # so that the error ends the job


@pytest.mark.parametrize("text", ["5", "6"])
def test_a_job_without_workers_is_refused(monkeypatch, text):
    launched(monkeypatch, 0, 5, text)
    for find in (find_job, find_world):
        with pytest.raises(CommError, match=f"SINGA_LITE_NUM_SERVERS={text} leaves no worker among the 5"):
            find()


def test_a_process_started_by_hand_has_no_servers(monkeypatch):
    assert find_job() == Job()
    monkeypatch.setenv("SINGA_LITE_NUM_SERVERS", "1")
    with pytest.raises(CommError, match="leaves no worker among the 1"):
        find_world()


@pytest.mark.parametrize("text", ["-1", "two", "1.0"])
def test_a_bad_number_of_servers_names_its_variable(monkeypatch, text):
    launched(monkeypatch, 0, 5, text)
    with pytest.raises(CommError, match=f"SINGA_LITE_NUM_SERVERS='{text}'"):
        find_job()


def test_a_job_without_servers_has_no_messenger(monkeypatch):
    monkeypatch.setattr(rendezvous, "exit_hooks", lambda: pytest.fail("no test here joins others"))
    with pytest.raises(CommError, match="has no servers to send to"):
        process_messenger()
    with pytest.raises(CommError, match="has no servers to send to"):
        connect_messenger(Job(0, 3, 0, "abc", "shm"))


@pytest.mark.parametrize(
    ("cores", "workers", "servers", "expected"), [(4, 2, 2, 1), (8, 2, 2, 3), (2, 1, 1, 1), (1, 2, 2, 1)]
)
def test_servers_take_a_core_each_and_workers_share_the_others(
    monkeypatch, cores, workers, servers, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    assert threads_per_rank(workers, servers) == expected


def test_nothing_of_comm_imports_pickle():
    folder = Path(singa_lite.__file__).parent / "comm"
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "marshal", "shelve", "dill"} & {name.split(".")[0] for name in names}, path


# ---- whole jobs: 2 workers, 2 servers ----------------------------------------------------------------

TOGETHER = """
import os, signal, sys
import numpy as np
from singa_lite.comm.rendezvous import process_communicator, process_messenger
from singa_lite.errors import CommError

messenger = process_messenger(timeout_s=100)
assert process_messenger() is messenger
job = messenger.job


def say(*words):
    sys.stdout.write(" ".join(map(str, (messenger.name, *words))) + "\\n")

"""
WORK = """
if job.is_server:
    try:
        process_communicator()
    except CommError as error:
        assert messenger.name in str(error), error
    parts = {}
    while len(parts) < job.num_workers:
        message = messenger.receive()
        parts[message.source] = message.read()[0]
    for worker in parts:
        messenger.send(worker, "sum", [sum(parts[source] for source in sorted(parts))]).wait()
    reasons = sorted(messenger.receive().reason for _ in parts)
    assert all("has closed its messenger" in reason for reason in reasons), reasons
    say("served", (messenger.local_workers, messenger.local_servers))
else:
    communicator = process_communicator()
    array = np.full(100_000, job.rank + 1.0)
    communicator.all_reduce(array, "sum").wait()
    works = [messenger.send(server, "part", [array * (server + job.rank)]) for server in job.peers]
    total = sum(float(messenger.receive().read()[0][0]) for _ in job.peers)
    for work in works:
        work.wait()
    say("trained", communicator.rank, communicator.size, communicator.local_rank, communicator.world.local_size, total)
"""


def command_of(transport, script, size=4):
    if transport == "shm":
        return [sys.executable, "-m", "singa_lite", "run", "-n", str(size), str(script)]
    return [_mpiexec() or "", "-n", str(size), sys.executable, str(script)]


def run_job(transport, folder, text):
    """The job of 2 workers and 2 servers over ``transport``, in a folder of its own."""
    folder = folder / transport
    folder.mkdir()
    return run_command(command_of(transport, write_script(folder, text)), SINGA_LITE_NUM_SERVERS="2")


def run_jobs(folder, text):
    """Over shm and, where it is there, over MPI, at the same time."""
    transports = ["shm"] if mpi_missing() else ["shm", "mpi"]
    jobs = at_once([functools.partial(run_job, transport, folder, text) for transport in transports])
    assert_nothing_left(folder)
    return dict(zip(transports, jobs, strict=True))


def lines_of(result):
    """What the ranks printed, without the launcher's prefixes, sorted."""
    return sorted(line.partition("] ")[2] or line for line in result.stdout.splitlines())


def test_workers_train_and_servers_serve_in_one_job(tmp_path):
    for transport, result in run_jobs(tmp_path, TOGETHER + WORK).items():
        assert result.returncode == 0, result.stderr
        total = 3.0 * ((2 + 3) + (3 + 4))
        assert lines_of(result) == [
            "server 0 served (2, 2)",
            "server 1 served (2, 2)",
            f"worker 0 trained 0 2 0 2 {total}",
            f"worker 1 trained 1 2 1 2 {total}",
        ], (transport, result.stdout)


RAISES = """
if messenger.name == "worker 1":
    raise ValueError("the loss is NaN")
while True:
    message = messenger.receive()
    say("got", message.reason)
    if not job.is_server:
        messenger.send(message.source, "too late")
    elif message.source == 1:  # worker 0 may have ended before
        raise RuntimeError("a worker is lost")
"""


def test_a_worker_that_raises_gives_the_servers_its_text(tmp_path):
    for transport, result in run_jobs(tmp_path, TOGETHER + RAISES).items():
        assert result.returncode != 0
        lines = lines_of(result)
        for server in ("server 0", "server 1"):
            assert f"{server} got worker 1 aborted: ValueError: the loss is NaN" in lines, (transport, result)
        assert any(line.startswith("worker 0 got server ") for line in lines), (transport, result.stdout)
        assert "cannot send to server" in result.stderr


KILLED = """
if messenger.name == "server 1":
    messenger.receive()
    os.kill(os.getpid(), signal.SIGKILL)
if job.is_server:
    for _ in range(job.num_workers):  # until they have gone
        messenger.receive()
else:
    work = messenger.send(3, "large", [np.ones(1_000_000)])
    message = messenger.receive()
    say("got", message.source, message.reason.split("(")[0], message.reason.split(")")[1])
    work.wait()
"""


def test_a_killed_server_is_named_by_every_worker_or_ends_an_mpi_job(tmp_path):
    results = run_jobs(tmp_path, TOGETHER + KILLED)
    assert all(result.returncode != 0 for result in results.values())
    for worker in ("worker 0", "worker 1"):
        assert f"{worker} got 3 server 1   died" in lines_of(results["shm"]), results["shm"].stdout
    assert "cannot send to server 1: server 1 (process " in results["shm"].stderr


EARLY = """
import os, sys
if os.environ["SINGA_LITE_RANK"] == "3":
    sys.exit(0)
"""


def test_a_server_that_ends_before_it_joins_is_named(tmp_path):
    result = run_job("shm", tmp_path, EARLY + TOGETHER)
    assert result.returncode != 0
    assert "rank 3 (process " in result.stderr and "before all ranks had joined" in result.stderr
    assert_nothing_left(tmp_path)


LATE = """
import time
from singa_lite.comm.rendezvous import process_messenger, find_job
job = find_job(100)
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if job.rank == 3:
    time.sleep(600)  # until the others have ended the job
process_messenger(timeout_s=1)
"""


@pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi works")
def test_a_server_that_does_not_join_is_named_over_mpi(tmp_path):
    result = run_job("mpi", tmp_path, LATE)
    assert result.returncode != 0
    # on a busy machine another may be late as well
    assert re.search(r"waited 1 s for .*server ([0-9], )*1 to make a messenger", result.stderr), result.stderr
    assert_nothing_left(tmp_path)
