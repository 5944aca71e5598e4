# SPDX-License-Identifier: Apache-2.0
"""Every way to start a script of several ranks, each from a fresh process, and what a failure looks like."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from processes import (
    assert_nothing_left,
    fresh_environment,
    launch_command,
    run_command,
    run_ranks_of,
    wait_until,
    write_script,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")

# The same script for every way: it asks for a communicator and does not know how it was started.
STEP = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from singa_lite import singa_wrap
from singa_lite.comm.rendezvous import process_communicator
num_elements = int(sys.argv[1]) if len(sys.argv) > 1 else 4
timeout_s = float(sys.argv[2]) if len(sys.argv) > 2 else 60
communicator = process_communicator(timeout_s=timeout_s)
rank, size = communicator.rank, communicator.size
array = np.full(num_elements, rank + 1, np.float32)
communicator.all_reduce(array, "sum", name="first").wait()
"""
AGAIN = "\ncommunicator.all_reduce(array, 'sum', name='conv1.W').wait()\n"
REPORT = "print(rank, size, communicator.local_rank, communicator.world.transport, array[-1])"


def test_a_plain_python_start_is_a_world_of_one(tmp_path):
    result = run_command([sys.executable, str(write_script(tmp_path, STEP + REPORT))])
    assert result.stdout == "0 1 0 local 1.0\n", result.stderr


@pytest.mark.parametrize("size", [1, 2, 3])
def test_our_launcher_makes_a_world(tmp_path, size):
    result = run_ranks_of(write_script(tmp_path, STEP + REPORT), size)
    transport, total = ("local", 1.0) if size == 1 else ("shm", size * (size + 1) / 2)
    expected = [f"[{rank}] {rank} {size} {rank} {transport} {total}" for rank in range(size)]
    assert sorted(result.stdout.splitlines()) == expected, result.stderr
    assert result.returncode == 0 and result.stderr == ""


MULTIPROCESSING = """
import multiprocessing, sys
import numpy as np
from singa_lite import singa_wrap as singa

def train(local_rank, world_size, holder, end):
    communicator = singa.Communicator(local_rank, world_size, holder, 1000)
    assert (communicator.world_size, communicator.global_rank) == (world_size, local_rank)
    one, two = np.full(3, local_rank + 1.0, np.float32), np.full(70000, local_rank, np.float64)
    communicator.synch(one)
    communicator.fusedSynch([one], send=False)
    communicator.fusedSynch([two])
    communicator.wait()
    sys.stdout.write(f"{local_rank} {one[0]} {two[-1]}\\n")
    sys.stdout.flush()
    if end == "fail" and local_rank == 1:
        raise ValueError("the cause")
    if end == "early" and local_rank == 1:
        return
    if end:
        communicator.synch(one)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    holder = singa.NcclIdHolder()
    ranks = [context.Process(target=train, args=(rank, 3, holder, sys.argv[2])) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    print([process.exitcode for process in ranks])
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_with_a_holder_makes_a_world(tmp_path, method):
    result = run_command([sys.executable, str(write_script(tmp_path, MULTIPROCESSING)), method, ""])
    expected = [*(f"{rank} 18.0 3.0" for rank in range(3)), "[0, 0, 0]"]
    assert sorted(result.stdout.splitlines()) == expected, result.stderr
    assert result.stderr == ""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("end", ["fail", "early"])
def test_a_multiprocessing_rank_that_ends_is_named_by_the_others(tmp_path, method, end):
    result = run_command([sys.executable, str(write_script(tmp_path, MULTIPROCESSING)), method, end])
    assert result.stdout.splitlines()[-1] == ("[1, 1, 1]" if end == "fail" else "[1, 0, 1]"), result.stderr
    for rank in (0, 2):
        # whichever of the two notices first tells the other
        assert re.search(rf"CommError: rank {rank}: all_reduce #3 .*: .*rank 1 .* has closed", result.stderr)
    assert "rank 1 (process" in result.stderr and "has closed its communicator" in result.stderr
    assert_nothing_left(tmp_path)


def test_ranks_of_multiprocessing_share_the_cores(tmp_path):
    text = MULTIPROCESSING.replace(
        "    sys.stdout.write(",
        "    import threadpoolctl\n"
        "    counts = sorted({pool['num_threads'] for pool in threadpoolctl.threadpool_info()})\n"
        "    sys.stdout.write(str(counts) + '\\n')\n"
        "    sys.stdout.write(",
    )
    result = run_command([sys.executable, str(write_script(tmp_path, text)), "spawn", ""])
    share = max(1, len(os.sched_getaffinity(0)) // 3)
    assert result.stdout.splitlines().count(f"[{share}]") == 3, result.stderr


# ---- failures under our launcher ---------------------------------------------------------------------


@pytest.mark.parametrize("num_elements", ["4", "300000"])
def test_an_exception_reaches_the_other_ranks_and_the_exit_code(tmp_path, num_elements):
    text = STEP + "if rank == 1:\n    raise ValueError('the cause')" + AGAIN
    result = run_ranks_of(write_script(tmp_path, text), 3, num_elements)
    assert result.returncode == 1
    for rank in (0, 2):
        assert re.search(rf"rank {rank}: all_reduce #1 'conv1.W': .*gave up: .*the cause", result.stderr)
    summary = result.stderr[result.stderr.index("singa-lite run:") :]
    assert summary.startswith("singa-lite run: rank 1 failed first") and summary.endswith("the cause\n")
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("num_elements", ["4", "300000"])
def test_a_killed_rank_is_named_by_every_survivor(tmp_path, num_elements):
    text = STEP + "if rank == 1:\n    os.kill(os.getpid(), 9)" + AGAIN
    result = run_ranks_of(write_script(tmp_path, text), 3, num_elements)
    assert result.returncode == 137
    assert (
        len(
            re.findall(
                r"CommError: rank [02]: all_reduce #1 'conv1.W': .*rank 1 \(process \d+\) died", result.stderr
            )
        )
        == 2
    )
    assert "singa-lite run: rank 1 failed first (killed by SIGKILL)" in result.stderr
    assert_nothing_left(tmp_path)


def test_a_rank_killed_amid_all_reduces_is_named(tmp_path):
    text = STEP + "(Path(__file__).parent / f'pid-{rank}').write_text(str(os.getpid()))\n"
    text += "while True:\n    communicator.all_reduce(array, 'mean').wait()\n"
    job = subprocess.Popen(
        launch_command(write_script(tmp_path, text), 3, "4000000"),
        stderr=subprocess.PIPE,
        text=True,
        env=fresh_environment(),
    )
    wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 3, "the ranks' start")
    time.sleep(0.2)
    wait_until(lambda: (tmp_path / "pid-2").read_text(), "the rank's number")
    os.kill(int((tmp_path / "pid-2").read_text()), signal.SIGKILL)
    _, errors = job.communicate(timeout=20)
    assert job.returncode == 137
    for rank in (0, 1):
        assert re.search(rf"CommError: rank {rank}: all_reduce #\d+ .*rank 2 \(process \d+\) died", errors)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(("end", "code"), [("sys.exit(0)", 1), ("sys.exit(3)", 3)])
def test_a_rank_that_leaves_early_fails_the_job(tmp_path, end, code):
    result = run_ranks_of(write_script(tmp_path, STEP + f"if rank == 1:\n    {end}" + AGAIN), 3)
    assert result.returncode == code
    assert re.search(r"rank 1 \(process \d+\) has closed its communicator", result.stderr)
    assert_nothing_left(tmp_path)


def test_a_stopped_rank_is_named_when_the_time_is_up(tmp_path):
    text = STEP + "if rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)" + AGAIN
    result = run_ranks_of(write_script(tmp_path, text), 3, "4", "1")
    assert result.returncode == 1
    assert "waited 1 s for rank 1" in result.stderr
    assert_nothing_left(tmp_path)


def test_ctrl_c_amid_an_all_reduce_ends_all_ranks(tmp_path):
    text = STEP + "(Path(__file__).parent / f'up-{rank}').touch()\nif rank == 0:\n    time.sleep(600)" + AGAIN
    job = subprocess.Popen(
        launch_command(write_script(tmp_path, text), 2, "300000"),
        stderr=subprocess.PIPE,
        text=True,
        env=fresh_environment(),
    )
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, "the ranks' start")
    time.sleep(0.2)
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=20)
    assert job.returncode == 130
    assert "[0] KeyboardInterrupt" in errors
    assert_nothing_left(tmp_path)


def test_a_script_that_never_joins_fails_the_others_by_the_time_out(tmp_path):
    text = "import os, time\nif os.environ['SINGA_LITE_RANK'] == '1':\n    time.sleep(600)\n" + STEP
    result = run_ranks_of(write_script(tmp_path, text), 3, "4", "1")
    assert result.returncode == 1
    assert "CommError" in result.stderr and "rank 1" in result.stderr
    assert_nothing_left(tmp_path)


def test_a_forked_child_of_a_rank_does_not_close_its_world(tmp_path):
    text = STEP + "pid = os.fork()\nif pid == 0:\n    sys.exit(0)\nos.waitpid(pid, 0)\n" + AGAIN + REPORT
    result = run_ranks_of(write_script(tmp_path, text), 2)
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] {rank} 2 {rank} shm 6.0" for rank in range(2)]
    assert result.returncode == 0, result.stderr
