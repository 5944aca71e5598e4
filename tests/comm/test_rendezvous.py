# SPDX-License-Identifier: Apache-2.0
"""Which world a process finds, and the one communicator it makes of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
from types import SimpleNamespace

import pytest

from singa_lite import config
from singa_lite.comm import job, rendezvous
from singa_lite.comm.base import World
from singa_lite.comm.job import OWN_VARIABLES, launched_job, threads_per_rank
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.rendezvous import (
    NcclIdHolder,
    connect,
    find_world,
    process_communicator,
)
from singa_lite.errors import CommError, OptionError
from tests.comm.processes import WORLD, run_command
from tests.limits import LIMIT_S


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No world in the environment, none joined, and none left joined afterwards."""
    for name in list(os.environ):
        if WORLD.match(name):
            monkeypatch.delenv(name)
    monkeypatch.setattr(job, "AT_START", ())
    monkeypatch.setattr(config, "state", config.State())
    # the hooks would stay when the test has ended
    monkeypatch.setattr(rendezvous, "exit_hooks", lambda: pytest.fail("no test here joins others"))


def launched(monkeypatch, rank="1", size="3", rendezvous_id="abc"):
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("RENDEZVOUS_ID", rendezvous_id)):
        if value is not None:
            monkeypatch.setenv(f"SINGA_LITE_{name}", value)


# ---- find_world --------------------------------------------------------------------------------------


def test_a_process_started_by_hand_is_alone():
    assert find_world() == World(0, 1, 0, 1, "", "local")


def test_explicit_arguments_make_a_world_of_this_host():
    assert find_world("abc", 1, 3) == World(1, 3, 1, 3, "abc", "shm")


@pytest.mark.parametrize("arguments", [("abc", 0, 1), (None, None, 1), (None, 0, 1)])
def test_a_world_of_one_needs_no_rendezvous_id(arguments):
    assert find_world(*arguments) == World()


@pytest.mark.parametrize("arguments", [("abc", None, 2), ("abc", 0, None), (None, 0, 2), (None, 0, None)])
def test_some_explicit_arguments_are_not_enough(arguments):
    with pytest.raises(OptionError, match="give rendezvous_id, local_rank and world_size together"):
        find_world(*arguments)


@pytest.mark.parametrize("arguments", [("abc", 2, 2), ("abc", -1, 2), ("abc", 0, 0), ("abc", 1, 1)])
def test_a_rank_outside_its_world_is_refused(arguments):
    with pytest.raises(OptionError, match="local_rank must be in"):
        find_world(*arguments)


def test_a_rendezvous_id_cannot_be_a_path():
    with pytest.raises(OptionError, match="rendezvous_id"):
        find_world("../../etc/passwd", 0, 2)


def test_our_launcher_makes_the_world(monkeypatch):
    launched(monkeypatch)
    assert find_world() == World(1, 3, 1, 3, "abc", "shm")


def test_our_launcher_with_one_rank_makes_a_world_of_one(monkeypatch):
    launched(monkeypatch, "0", "1")
    assert find_world() == World()


def test_explicit_arguments_come_before_the_launcher(monkeypatch):
    launched(monkeypatch)
    assert find_world("other", 0, 2) == World(0, 2, 0, 2, "other", "shm")


def test_our_launcher_comes_before_mpi(monkeypatch):
    launched(monkeypatch)
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "2")
    assert find_world().transport == "shm"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (("x", "3", "abc"), "SINGA_LITE_RANK='x'"),
        (("-1", "3", "abc"), "SINGA_LITE_RANK='-1'"),
        (("1", "3.5", "abc"), "SINGA_LITE_WORLD_SIZE='3.5'"),
        (("3", "3", "abc"), "SINGA_LITE_RANK=3"),
        (("0", "0", "abc"), "SINGA_LITE_WORLD_SIZE=0"),
        ((None, "3", "abc"), "SINGA_LITE_RANK is not set"),
        (("0", "3", None), "SINGA_LITE_RENDEZVOUS_ID is not set"),
    ],
)
def test_a_damaged_environment_names_its_variable(monkeypatch, values, named):
    launched(monkeypatch, *values)
    with pytest.raises(CommError) as caught:
        find_world()
    assert named in str(caught.value)


TASKS = [
    ("PMI_SIZE", "PMI_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
]


@pytest.mark.parametrize("names", TASKS)
def test_several_mpi_or_slurm_tasks_are_an_mpi_world(monkeypatch, names):
    for name, value in zip(names, ("3", "2"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_mpi_job", lambda *arguments: arguments)
    monkeypatch.setattr(rendezvous, "mpi_world", lambda launcher, mpi_job, size: (mpi_job, size))
    assert find_world(timeout_s=7) == ((2, 3, 7), 3)


@pytest.mark.parametrize("names", TASKS)
def test_a_single_task_is_alone(monkeypatch, names):
    for name, value in zip(names, ("1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    assert find_world() == World()


@pytest.mark.parametrize("outer", [{}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}])
def test_a_process_of_torchrun_is_not_alone_by_mistake(monkeypatch, outer):
    ours = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "RANK": "3", **outer}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        CommError, match=r"torchrun started this process as rank 3 of 4, .*singa-lite run.* or mpiexec"
    ):
        find_world()
    assert find_world(world_size=1) == World()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert find_world() == World()
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name, value in (("PMI_SIZE", "2"), ("PMI_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert launched_job().size == 2
    for name, value in zip(OWN_VARIABLES, ("id", "1", "3"), strict=True):
        monkeypatch.setenv(name, value)
    assert find_world().size == 3


def test_a_batch_allocation_is_no_world(monkeypatch):
    for name, value in (("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0"), ("SLURM_JOB_ID", "77")):
        monkeypatch.setenv(name, value)
    assert find_world() == World()


@pytest.mark.parametrize("names", TASKS)
def test_a_bad_mpi_variable_is_named(monkeypatch, names):
    monkeypatch.setenv(names[0], "3")
    monkeypatch.setenv(names[1], "three")
    with pytest.raises(CommError, match=f"{names[1]}='three'"):
        find_world()


@pytest.mark.parametrize(
    ("names", "error"),
    [(TASKS[0], "ImportError('no module')"), (TASKS[-1], "RuntimeError('cannot load MPI library')")],
)
def test_mpi_tasks_without_a_working_mpi4py_are_an_error(tmp_path, names, error):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass")
    (tmp_path / "mpi4py" / "MPI.py").write_text(f"raise {error}")
    script = "from singa_lite.comm.rendezvous import find_world; print(find_world())"
    result = run_command(
        [sys.executable, "-c", script], **dict(zip(names, "31", strict=True)), PYTHONPATH=str(tmp_path)
    )
    assert result.returncode == 1 and result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert "CommError: find_world: " in last and "rank 1 of 3" in last
    assert "pip install 'mpi4py>=4.0' 'mpich>=4.2'" in last


# ---- process_communicator ----------------------------------------------------------------------------


def test_a_process_has_one_communicator():
    first = process_communicator()
    assert isinstance(first, LocalCommunicator)
    assert process_communicator() is first
    assert process_communicator(world_size=1) is first
    assert config.state.communicator is first


def test_a_second_world_is_refused():
    process_communicator()
    with pytest.raises(CommError, match=r"rank 0 of 1 .* cannot become rank 1 of 2"):
        process_communicator("abc", 1, 2)


def test_importing_and_being_alone_start_no_thread_and_load_no_mpi():
    script = (
        "import sys, threading, singa_lite.comm.rendezvous as r; r.process_communicator(); "
        "print(threading.active_count(), 'mpi4py' in sys.modules, 'threadpoolctl' in sys.modules)"
    )
    assert run_command([sys.executable, "-c", script]).stdout == "1 False False\n"


def test_the_time_out_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("SINGA_LITE_TIMEOUT_S", "12.5")
    assert process_communicator().timeout_s == 12.5


def test_an_explicit_time_out_comes_first(monkeypatch):
    monkeypatch.setenv("SINGA_LITE_TIMEOUT_S", "12.5")
    assert process_communicator(timeout_s=4).timeout_s == 4


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan"])
def test_a_bad_time_out_names_its_variable(monkeypatch, text):
    monkeypatch.setenv("SINGA_LITE_TIMEOUT_S", text)
    with pytest.raises(CommError, match=f"SINGA_LITE_TIMEOUT_S='{text}'"):
        process_communicator()


def test_a_forked_child_makes_its_own():
    parents = process_communicator()
    reader, writer = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        own = process_communicator()
        writer.send((own is not parents, own is process_communicator()))
        os._exit(0)
    os.waitpid(pid, 0)
    assert reader.poll(10) and reader.recv() == (True, True)


def test_a_forked_child_cannot_be_its_parents_rank(monkeypatch):
    launched(monkeypatch)
    config.state.communicator = LocalCommunicator(find_world())
    config.state.communicator_pid = os.getpid() + 1
    with pytest.raises(CommError, match="forked from rank 1"):
        process_communicator()


def test_an_unknown_transport_is_refused():
    with pytest.raises(OptionError, match=r"world.transport = 'pigeon' is not known; choose one of .*'shm'"):
        connect(World(0, 2, 0, 2, "abc", "pigeon"))


def test_a_transport_that_joins_no_world_is_refused():
    with pytest.raises(OptionError, match=r"world.transport = 'nccl' is not known"):
        connect(World(0, 2, 0, 2, "abc", "nccl"))


def test_shared_memory_off_linux_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(rendezvous, "exit_hooks", lambda: SimpleNamespace(joining=contextlib.nullcontext))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(CommError, match="works on Linux only, not on darwin"):
        connect(find_world("abc", 0, 2))


# ---- sharing the cores -------------------------------------------------------------------------------

SHARE = """
import os, sys
os.sched_getaffinity = lambda pid: range(int(sys.argv[1]))
import threadpoolctl
from singa_lite.comm.rendezvous import share_cores
threadpoolctl.threadpool_limits(4)
before = sorted({pool["num_threads"] for pool in threadpoolctl.threadpool_info()})
share_cores(int(sys.argv[2]))
after = sorted({pool["num_threads"] for pool in threadpoolctl.threadpool_info()})
print(before, after)
"""


@pytest.mark.parametrize(("cores", "ranks", "expected"), [(2, 2, 1), (6, 2, 3), (7, 3, 2), (1, 4, 1)])
def test_each_rank_gets_its_part_of_the_cores(cores, ranks, expected):
    result = run_command([sys.executable, "-c", SHARE, str(cores), str(ranks)])
    assert result.stdout == f"[4] [{expected}]\n", result.stderr


@pytest.mark.parametrize(("ranks", "environment"), [(1, {}), (2, {"OMP_NUM_THREADS": "4"})])
def test_threads_stay_as_they_are_for_one_rank_or_when_set(ranks, environment):
    result = run_command([sys.executable, "-c", SHARE, "2", str(ranks)], **environment)
    assert result.stdout == "[4] [4]\n", result.stderr


def test_no_rank_gets_less_than_one_thread():
    assert threads_per_rank(10_000) == 1


# ---- NcclIdHolder ------------------------------------------------------------------------------------


def _rendezvous_id(holder, answers):
    answers.put(holder.rendezvous_id)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_holder_reaches_children_of_every_start_method(method):
    context = multiprocessing.get_context(method)
    holder, answers = NcclIdHolder(), context.Queue()
    child = context.Process(target=_rendezvous_id, args=(holder, answers))
    child.start()
    assert answers.get(timeout=LIMIT_S) == holder.rendezvous_id
    child.join(LIMIT_S)
    answers.close()
    answers.join_thread()


def test_holders_differ_and_survive_pickling():
    first, second = NcclIdHolder(), NcclIdHolder()
    assert first.rendezvous_id != second.rendezvous_id
    assert pickle.loads(pickle.dumps(first)).rendezvous_id == first.rendezvous_id
    assert find_world(first.rendezvous_id, 0, 2).rendezvous_id == first.rendezvous_id
