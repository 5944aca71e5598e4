# SPDX-License-Identifier: Apache-2.0
"""Every way to start a script of several ranks, each from a fresh process, and what a failure looks like."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.comm.processes import (
    assert_nothing_left,
    fresh_environment,
    is_running,
    launch_command,
    run_command,
    run_ranks_of,
    wait_until,
    write_script,
)
from tests.limits import LIMIT_S
from tests.ranks import _mpiexec, mpi_missing
from tests.slow_cases import slow_but_first

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")

# The same script for every way: it gets a communicator and does not know how it was started.
STEP = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from singa_lite import singa_wrap
from singa_lite.comm.rendezvous import process_communicator
num_elements = int(sys.argv[1]) if len(sys.argv) > 1 else 4
timeout_s = float(sys.argv[2]) if len(sys.argv) > 2 else 300
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
    if end in ("exit", "code") and local_rank == 1:
        sys.exit("no more" if end == "exit" else 3)
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


# how rank 1 ends -> what the others raise, and the exit codes
MULTIPROCESSING_ENDS = {
    "fail": ("aborted: ValueError: the cause", "[1, 1, 1]"),
    "exit": ("aborted: SystemExit: no more", "[1, 1, 1]"),
    "code": ("aborted: SystemExit: 3", "[1, 3, 1]"),
    "early": ("has closed its communicator", "[1, 0, 1]"),
}


@slow_but_first(
    ("method", "end"),
    [
        ("fork", "fail"),
        ("spawn", "exit"),
        ("fork", "code"),
        ("fork", "early"),
        ("spawn", "fail"),
        ("forkserver", "fail"),
    ],
    count=4,
)
def test_a_multiprocessing_rank_that_ends_is_named_by_the_others_with_its_reason(tmp_path, method, end):
    result = run_command([sys.executable, str(write_script(tmp_path, MULTIPROCESSING)), method, end])
    reason, codes = MULTIPROCESSING_ENDS[end]
    assert result.stdout.splitlines()[-1] == codes, result.stderr
    for rank in (0, 2):
        # the other repeats the error of whichever of the two notices first
        assert re.search(rf"CommError: rank {rank}: all_reduce #3 .*: .*rank 1 .*{reason}", result.stderr)
    assert_nothing_left(tmp_path)


GATHERING = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
import numpy as np
from singa_lite import singa_wrap as singa
from singa_lite.comm.rendezvous import process_communicator
folder = Path(__file__).parent

def train(rank, size, holder, what):
    if rank == 2 and what == "late":
        while not (folder / "failed-0").exists():
            time.sleep(.01)
    if rank == 1 and what in ("kill", "late", "raise", "return"):
        time.sleep(.5)  # the others wait already
        if what in ("kill", "late"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "raise":
            raise ValueError("the cause")
        return
    (folder / f"part-{rank}").write_text(str(os.getpid()))
    (folder / f"part-{rank}").rename(folder / f"pid-{rank}")  # nobody reads half of it
    try:
        communicator = process_communicator(holder.rendezvous_id, rank, size, 1000)
    except RuntimeError as error:
        sys.stderr.write(f"{rank}: {type(error).__name__}: {error}\\n")
        (folder / f"failed-{rank}").touch()
        sys.exit(1)
    (folder / f"joined-{rank}").touch()
    array = np.ones(100, np.float32)
    for _ in range(1_000_000):
        communicator.all_reduce(array, "mean").wait()
        time.sleep(.001)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    holder = singa.NcclIdHolder()
    (folder / "rendezvous_id").write_text(holder.rendezvous_id)
    absent = 1 if sys.argv[2] == "absent" else 0
    ranks = [context.Process(target=train, args=(rank, 3, holder, sys.argv[2])) for rank in range(3 - absent)]
    for process in ranks:
        process.start()
    if sys.argv[3:]:  # another child of this process holds all that it has open
        other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        other.start()
        (folder / "other").write_text(str(other.pid))
    for process in ranks:
        process.join()
    print([process.exitcode for process in ranks])
"""


def files_of(folder):
    return list(Path("/dev/shm").glob(f"*{(folder / 'rendezvous_id').read_text()}*"))


@slow_but_first(
    ("method", "end", "code"),
    [
        ("fork", "kill", -9),
        ("spawn", "kill", -9),
        ("forkserver", "kill", -9),
        ("fork", "late", -9),  # one that starts when the others have noticed it
        ("spawn", "late", -9),
        ("fork", "raise", 1),
        ("spawn", "return", 0),
    ],
)
def test_a_multiprocessing_rank_that_ends_before_joining_is_noticed_at_once(tmp_path, method, end, code):
    # run_command ends what waits for the time-out
    result = run_command([sys.executable, str(write_script(tmp_path, GATHERING)), method, end])
    # forkserver does not know how its child was killed
    assert result.stdout in (f"[1, {code}, 1]\n", f"[1, {255 if code < 0 else code}, 1]\n"), result.stderr
    for rank in (0, 2):
        expected = r"(rank . aborted: )?process \d+(, \d+)* ended before all ranks had joined"
        expected = rf"{rank}: CommError: shm: rank {rank}, .*: {expected}"
        assert re.search(expected, result.stderr), result.stderr
    assert files_of(tmp_path) == []
    assert_nothing_left(tmp_path)


@slow_but_first(
    ("method", "stage", "others"),
    [
        *(
            (method, stage, ())
            for method in ("fork", "spawn", "forkserver")
            for stage in ("absent", "training")
        ),
        ("fork", "training", ("other",)),
        ("spawn", "training", ("other",)),
        ("forkserver", "training", ("other",)),
    ],
    count=2,
)
def test_ranks_of_multiprocessing_end_with_a_killed_parent(tmp_path, method, stage, others):
    script = write_script(tmp_path, GATHERING)
    parent = subprocess.Popen([sys.executable, str(script), method, stage, *others], env=fresh_environment())
    marks = "joined-*" if stage == "training" else "pid-*"
    wait_until(lambda: len(list(tmp_path.glob(marks))) == (3 if stage == "training" else 2), "the ranks")
    wait_until(lambda: all((tmp_path / name).exists() for name in others), "the other child")
    time.sleep(0.2)
    parent.kill()
    parent.wait(LIMIT_S)
    pids = [path.read_text() for path in tmp_path.glob("pid-*")]  # a spawned process does not name the script
    try:
        wait_until(lambda: not any(is_running(pid) for pid in pids), "the end of the ranks")
        wait_until(lambda: not files_of(tmp_path), "the removal of the shared files")
    finally:
        pids += [(tmp_path / name).read_text() for name in others]
        for pid in filter(is_running, pids):
            os.kill(int(pid), signal.SIGKILL)


@slow_but_first("rank", [0, 1])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 7)])
def test_signal_handlers_run_while_a_rank_waits_for_the_others(tmp_path, rank, number, code):
    rendezvous_id = "test" + secrets.token_hex(8)
    text = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    text += "from pathlib import Path\nfrom singa_lite.comm.rendezvous import process_communicator\n"
    text += "(Path(__file__).parent / 'up').touch()\n"
    text += f"process_communicator({rendezvous_id!r}, {rank}, 2, 1000)\n"
    job = subprocess.Popen(
        [sys.executable, str(write_script(tmp_path, text))],
        stderr=subprocess.PIPE,
        text=True,
        env=fresh_environment(),
    )
    wait_until((tmp_path / "up").exists, "the rank's start")
    time.sleep(0.3)  # it waits by now
    job.send_signal(number)
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == code
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    assert not list(Path("/dev/shm").glob(f"*{rendezvous_id}*"))


THREAD = """
import threading
def work():
    if rank == 1:
        raise ValueError("the cause")
    communicator.all_reduce(array, "sum", name="conv1.W").wait()
thread = threading.Thread(target=work, name="trainer", daemon={daemon})
thread.start()
thread.join()
{then}
"""


def test_a_thread_that_fails_fails_the_job_on_every_rank(tmp_path):
    # rank 1's main thread goes on until the others have ended
    text = STEP + "(Path(__file__).parent / f'{os.getpid()}.pid').touch()\ncommunicator.barrier()\n"
    goes_on = "pids = [path.stem for path in Path(__file__).parent.glob('*.pid') if path.stem != str(os.getpid())]\n"
    goes_on += "while rank == 1 and any(Path('/proc', pid).exists() for pid in pids):\n    time.sleep(.01)"
    text += THREAD.format(daemon=False, then=goes_on)
    result = run_ranks_of(write_script(tmp_path, text), 3, is_patient=True)
    assert result.returncode == 1
    for rank in (0, 2):
        assert re.search(
            rf"rank {rank}: all_reduce #2 'conv1.W': .*rank 1 aborted: thread 'trainer': ValueError: the cause",
            result.stderr,
        )
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("way", ["main", "thread"])
def test_peers_get_a_text_that_cannot_be_sent_as_it_is(tmp_path, way):
    fails = "raise ValueError('name \\udcff, \\0 behind')"
    text = STEP + f"def fail():\n    {fails}\nif rank == 1:\n"
    text += (
        "    fail()\n"
        if way == "main"
        else "    import threading\n    threading.Thread(target=fail).start()\n"
    )
    result = run_ranks_of(
        write_script(tmp_path, text + "if rank != 1:" + AGAIN.replace("\n", "\n    ", 1)), 3
    )
    assert result.returncode == 1
    for rank in (0, 2):
        assert re.search(
            rf"CommError: rank {rank}: .*rank 1 aborted: .*ValueError: name \\udcff, \\0 behind",
            result.stderr,
        )


# what keeps a rank alive after its exception
KEEPS_ALIVE = {
    "child": "import multiprocessing as mp\nmp.get_context('fork').Process(target=time.sleep, args=[600]).start()\n",
    "thread": "import threading\nthreading.Thread(target=time.sleep, args=[600]).start()\n",
    "atexit": "import atexit\natexit.register(time.sleep, 600)\n",
}


@slow_but_first("what", KEEPS_ALIVE)
@slow_but_first("restarts", [1, 0])
def test_an_exception_ends_a_job_whose_ranks_something_keeps_alive(tmp_path, what, restarts):
    text = STEP + KEEPS_ALIVE[what] + "if rank == 1:\n    raise ValueError('the cause')\n" + AGAIN
    command = launch_command(write_script(tmp_path, text), 3, options=["--max-restarts", str(restarts)])
    result = run_command(command)
    assert result.returncode == 1
    failures = result.stderr.count("singa-lite run: rank 1 failed first (exit code 1)\n")
    assert failures == restarts + 1, result.stderr
    assert ("restart 1 of 1" in result.stderr) == bool(restarts)
    assert_nothing_left(tmp_path)


def test_an_exception_fails_a_job_although_a_function_of_atexit_ends_its_ranks_with_0(tmp_path):
    text = (
        STEP
        + "import atexit\natexit.register(os._exit, 0)\nif rank == 1:\n    raise ValueError('the cause')\n"
    )
    command = launch_command(write_script(tmp_path, text + AGAIN), 3, options=["--max-restarts", "1"])
    result = run_command(command)
    assert result.returncode == 1
    assert result.stderr.count("singa-lite run: rank 1 failed first (exit code 1)\n") == 2, result.stderr
    assert "restart 1 of 1" in result.stderr


def test_peers_get_the_class_of_an_error_without_a_text(tmp_path):
    text = (
        STEP
        + "class Odd(Exception):\n    def __str__(self):\n        raise KeyError\nif rank == 1:\n    raise Odd\n"
    )
    result = run_ranks_of(write_script(tmp_path, text + AGAIN), 2)
    assert (
        result.returncode == 1
        and "rank 1 aborted: Odd (its text could not be made: KeyError)" in result.stderr
    )


def test_a_process_whose_thread_failed_ends_with_1(tmp_path):
    text = STEP + "import threading\nif rank != 1:\n    time.sleep(600)\n"
    text += "thread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()\n"
    result = run_ranks_of(write_script(tmp_path, text), 3)
    assert result.returncode == 1
    assert "singa-lite run: rank 1 failed first (exit code 1)" in result.stderr


def test_a_process_whose_thread_failed_ends_with_1_where_it_has_closed_its_output(tmp_path):
    text = STEP + "import threading\nif rank == 1:\n    thread = threading.Thread(target=lambda: 1 / 0)\n"
    text += "    thread.start()\n    thread.join()\n    sys.stdout.close()\n"
    result = run_ranks_of(write_script(tmp_path, text), 2)
    assert result.returncode == 1 and "ZeroDivisionError" in result.stderr
    assert "rank 1 failed first (exit code 1)" in result.stderr


def test_a_rank_that_a_real_time_signal_ends_is_named(tmp_path):
    text = STEP + "if rank == 1:\n    os.kill(os.getpid(), 35)\n" + AGAIN
    result = run_ranks_of(write_script(tmp_path, text), 2)
    assert result.returncode != 0 and "rank 1 failed first (killed by signal 35)" in result.stderr


JOINS_IN_THREADS = """
import threading
from singa_lite import opt
made = []
threads = [threading.Thread(target=lambda: made.append(opt.DistOpt(opt.SGD(0.1)))) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(made), len({id(each.communicator) for each in made}))
"""


def test_threads_that_join_at_once_have_one_communicator(tmp_path):
    result = run_ranks_of(write_script(tmp_path, JOINS_IN_THREADS), 2)
    assert sorted(result.stdout.splitlines()) == ["[0] 4 1", "[1] 4 1"], result.stderr


WORKS_ON = """
import threading, time
import numpy as np
from singa_lite import autograd
from singa_lite.tensor import from_numpy
x, w = (from_numpy(np.ones((64, 64), np.float32)) for _ in range(2))
def work():
    while True:
        autograd.relu(autograd.matmul(x, w))
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
print("done")
"""


def test_a_daemon_thread_at_work_does_not_crash_the_end(tmp_path):
    script = write_script(tmp_path, WORKS_ON)
    for _ in range(5):
        result = run_command([sys.executable, str(script)])
        assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_a_daemon_thread_that_fails_harms_nobody(tmp_path):
    text = STEP + "import threading\nthread = threading.Thread(target=lambda: 1 / 0, daemon=True)\n"
    text += "thread.start()\nthread.join()\n" + AGAIN + REPORT
    result = run_ranks_of(write_script(tmp_path, text), 3)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] {rank} 3 {rank} shm 18.0" for rank in range(3)]


def test_a_thread_that_ends_by_sys_exit_harms_nobody(tmp_path):
    text = STEP + "import threading\nthread = threading.Thread(target=lambda: sys.exit(3))\n"
    text += "thread.start()\nthread.join()\n" + AGAIN + REPORT
    result = run_ranks_of(write_script(tmp_path, "import sys\n" + text), 3)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] {rank} 3 {rank} shm 18.0" for rank in range(3)]


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
    result = run_ranks_of(write_script(tmp_path, text), 3, num_elements, is_patient=True)
    assert result.returncode == 1
    for rank in (0, 2):
        assert re.search(rf"rank {rank}: all_reduce #1 'conv1.W': .*aborted: .*the cause", result.stderr)
    summary = result.stderr[result.stderr.index("singa-lite run:") :]
    assert summary.startswith("singa-lite run: rank 1 failed first") and summary.endswith("the cause\n")
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("num_elements", ["4", "300000"])
def test_a_killed_rank_is_named_by_every_survivor(tmp_path, num_elements):
    text = STEP + "if rank == 1:\n    os.kill(os.getpid(), 9)" + AGAIN
    result = run_ranks_of(write_script(tmp_path, text), 3, num_elements, is_patient=True)
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
        launch_command(write_script(tmp_path, text), 3, "4000000", is_patient=True),
        stderr=subprocess.PIPE,
        text=True,
        env=fresh_environment(),
    )
    wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 3, "the ranks' start")
    time.sleep(0.2)
    wait_until(lambda: (tmp_path / "pid-2").read_text(), "the rank's number")
    os.kill(int((tmp_path / "pid-2").read_text()), signal.SIGKILL)
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 137
    for rank in (0, 1):
        assert re.search(rf"CommError: rank {rank}: all_reduce #\d+ .*rank 2 \(process \d+\) died", errors)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(("end", "code"), [("sys.exit(0)", 1), ("sys.exit(3)", 3)])
def test_a_rank_that_leaves_early_fails_the_job(tmp_path, end, code):
    script = write_script(tmp_path, STEP + f"if rank == 1:\n    {end}" + AGAIN)
    result = run_ranks_of(script, 3, is_patient=True)
    assert result.returncode == code
    assert re.search(r"rank 1 \(process \d+\) has closed its communicator", result.stderr)
    assert_nothing_left(tmp_path)


def test_a_stopped_rank_is_named_when_the_time_is_up(tmp_path):
    text = (
        STEP + "if rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)" + AGAIN.replace("wait()", "wait(1)")
    )
    result = run_ranks_of(write_script(tmp_path, text), 3)
    assert result.returncode == 1
    # on a busy machine rank 0 may be late as well
    assert re.search(r"waited 1 s for rank (0, )?1", result.stderr)
    assert_nothing_left(tmp_path)


def test_ctrl_c_amid_an_all_reduce_ends_all_ranks(tmp_path):
    text = STEP + "(Path(__file__).parent / f'up-{rank}').touch()\nif rank == 0:\n    time.sleep(600)" + AGAIN
    job = subprocess.Popen(
        launch_command(write_script(tmp_path, text), 2, "300000", is_patient=True),
        stderr=subprocess.PIPE,
        text=True,
        env=fresh_environment(),
    )
    wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, "the ranks' start")
    time.sleep(0.2)
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 130
    assert "[0] KeyboardInterrupt" in errors
    assert_nothing_left(tmp_path)


def test_a_script_that_never_joins_fails_the_others_by_the_time_out(tmp_path):
    text = "import os, time\nif os.environ['SINGA_LITE_RANK'] == '1':\n    time.sleep(600)\n" + STEP
    result = run_ranks_of(write_script(tmp_path, text), 3, "4", "1")
    assert result.returncode == 1
    assert "CommError" in result.stderr and "rank 1" in result.stderr
    assert_nothing_left(tmp_path)


def test_a_rank_that_ends_well_before_joining_is_named_at_once(tmp_path):
    text = "import os, sys\nif os.environ['SINGA_LITE_RANK'] == '1':\n    sys.exit(0)\n" + STEP
    # LIMIT_S comes before
    result = run_ranks_of(write_script(tmp_path, text), 3, "4", "1000", is_patient=True)
    assert result.returncode == 1
    expected = r"(rank . aborted: )?rank 1 \(process \d+\) ended with exit code 0 before all ranks had joined"
    for rank in (0, 2):
        assert re.search(rf"CommError: shm: rank {rank}, .*: {expected}", result.stderr)
    assert re.search(r"rank [02] failed first .*, after rank 1 had ended with exit code 0\n", result.stderr)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("start", ["launcher", "mpi"])
def test_a_rank_that_clears_its_environment_does_not_train_alone(tmp_path, start):
    if start == "mpi" and (reason := mpi_missing()):
        pytest.skip(reason)
    text = "import os\nfrom singa_lite import opt\nos.environ.clear()\n"
    text += "print(opt.DistOpt(opt.SGD(lr=0.1), world_size=1).world_size, flush=True)\n"
    text += "from singa_lite.comm.rendezvous import find_world\nfind_world()\n"
    script = write_script(tmp_path, text)
    by_mpi = [str(_mpiexec()), "-n", "2", sys.executable, str(script)]
    result = run_command(by_mpi) if start == "mpi" else run_ranks_of(script, 2)
    assert result.returncode != 0 and re.search(r"^(\[\d\] )?1+$", result.stdout, re.MULTILINE)
    variable = "PMI_SIZE" if start == "mpi" else "SINGA_LITE_WORLD_SIZE"
    assert (
        f"CommError: find_world: {variable} was set when this process started and is not now" in result.stderr
    )
    assert_nothing_left(tmp_path)


def test_a_process_that_was_alone_may_clear_its_environment(tmp_path):
    text = "import os\nfrom singa_lite import opt\nos.environ.clear()\nprint(opt.DistOpt(opt.SGD(lr=0.1)).world_size)\n"
    command = [sys.executable, str(write_script(tmp_path, text))]
    result = run_command(command, SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0")
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr


def test_a_child_of_a_rank_is_not_taken_for_the_rank(tmp_path):
    child = "from singa_lite.comm.rendezvous import process_communicator as p; p({}timeout_s=300)"
    text = "import subprocess, sys\nfor world in ('', 'world_size=1, '):\n"
    text += f"    child = {child!r}.format(world)\n"
    text += "    done = subprocess.run([sys.executable, '-c', child], capture_output=True, text=True)\n"
    text += "    print(done.returncode, (done.stderr.splitlines() or ['fine'])[-1])\n"
    result = run_ranks_of(write_script(tmp_path, text + STEP + REPORT), 3)
    assert result.returncode == 0, result.stderr
    for rank in range(3):
        assert re.search(
            rf"^\[{rank}\] 1 .*CommError: find_world: process \d+ is not rank {rank} of 3 but was started by it",
            result.stdout,
            re.MULTILINE,
        )
        assert {f"[{rank}] 0 fine", f"[{rank}] {rank} 3 {rank} shm 6.0"} <= set(result.stdout.splitlines())


# how a rank of an MPI job starts "prints_size.py", a script that joins what it takes for its world -> what that writes
STARTS = {
    "subprocess": ("subprocess.run([sys.executable, path])", "is not rank {rank} of 2 but was started by it"),
    "a shell": (
        "os.system(f'{sys.executable} {path} | cat')",
        "is not rank {rank} of 2 but was started by it",
    ),
    "mpiexec": ("subprocess.run([{mpiexec!r}, '-n', '2', sys.executable, path])", "size 2"),
    "singa-lite": (
        "subprocess.run([sys.executable, '-m', 'singa_lite', 'run', '-n', '2', path])",
        "size 2",
    ),
}


@pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing())
@slow_but_first("start", STARTS)
def test_a_child_of_an_mpi_rank_is_not_taken_for_it_but_may_start_a_job(tmp_path, start):
    child = "from singa_lite import opt\nimport sys\nsys.stdout.write(f'size {opt.DistOpt().communicator.size}\\n')"
    write_script(tmp_path, child, "prints_size.py")
    call, expected = STARTS[start]
    text = STEP + "import subprocess\npath = str(Path(__file__).with_name('prints_size.py'))\n"
    text += call.replace("{mpiexec!r}", repr(str(_mpiexec()))) + AGAIN
    text += (
        "sys.stdout.write(f'went on {rank} {array[-1]}\\n')\n"  # in one write, as lines of ranks are mixed
    )
    result = run_with("mpiexec", write_script(tmp_path, text))
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert expected.format(rank=rank) in result.stdout + result.stderr
        assert f"went on {rank} 6.0\n" in result.stdout
    assert "PMI" not in result.stderr
    assert_nothing_left(tmp_path)


def test_a_forked_child_of_a_rank_does_not_close_its_world(tmp_path):
    text = STEP + "pid = os.fork()\nif pid == 0:\n    sys.exit(0)\nos.waitpid(pid, 0)\n" + AGAIN + REPORT
    result = run_ranks_of(write_script(tmp_path, text), 2)
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] {rank} 2 {rank} shm 6.0" for rank in range(2)]
    assert result.returncode == 0, result.stderr


WAYS = pytest.mark.parametrize("way", ["singa-lite", "mpiexec"])
JOINS = """
import numpy as np
from singa_lite import opt
communicator = opt.DistOpt().communicator
communicator.all_reduce(np.zeros(2, np.float32), "sum").wait()
"""
# the last registered runs first: "before" and the print after this package has left the world
AT_EXIT = {
    "before": "import atexit\natexit.register(print, 'still done')\natexit.register(lambda: [].pop())\n"
    + JOINS,
    "after": "import atexit\natexit.register(print, 'still done')\n"
    + JOINS
    + "if communicator.rank == 1:\n    atexit.register(lambda: [].pop())\n",
}


def run_with(way: str, script: Path, size: int = 2) -> subprocess.CompletedProcess[str]:
    if way == "mpiexec" and (reason := mpi_missing()):
        pytest.skip(reason)
    start = [sys.executable, "-m", "singa_lite", "run", "-n", str(size)]
    start = start if way == "singa-lite" else [str(_mpiexec()), "-n", str(size), sys.executable]
    return run_command([*start, str(script)])


@WAYS
@pytest.mark.parametrize("registered", AT_EXIT)
def test_an_error_in_a_function_of_atexit_fails_the_job(tmp_path, way, registered):
    result = run_with(way, write_script(tmp_path, AT_EXIT[registered]))
    assert result.returncode != 0 and "IndexError: pop from empty list" in result.stderr, result
    assert "still done" in result.stdout
    assert_nothing_left(tmp_path)


FULL_ERRORS = "import os, sys, threading\nos.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n"
FAILING_THREAD = "thread = threading.Thread(target=lambda: [].pop())\nthread.start()\nthread.join()\n"
FAILS_WITHOUT_A_WORD = {
    "thread": JOINS + "if communicator.rank == 1:\n    " + FAILING_THREAD.replace("\n", "\n    "),
    "atexit": AT_EXIT["after"],
    "thread before it joins": "import singa_lite\n" + FAILING_THREAD + JOINS,
}


@WAYS
@slow_but_first("what", FAILS_WITHOUT_A_WORD)
def test_a_failure_that_cannot_be_printed_fails_the_job(tmp_path, way, what):
    result = run_with(way, write_script(tmp_path, FULL_ERRORS + FAILS_WITHOUT_A_WORD[what]))
    assert result.returncode != 0, result
    assert_nothing_left(tmp_path)


@WAYS
def test_the_others_learn_of_an_error_that_a_hook_of_the_script_cannot_print(tmp_path, way):
    text = "import sys\ndef hook(*_): raise OSError\nsys.excepthook = hook\n" + JOINS
    text += "if communicator.rank == 1:\n    [].pop()\ncommunicator.barrier()\n"
    result = run_with(way, write_script(tmp_path, text))
    assert result.returncode == 1 and "rank 1 aborted: IndexError" in result.stderr, result
    assert_nothing_left(tmp_path)


RANK_1_OF_MULTIPROCESSING = """
import multiprocessing
from singa_lite import singa_wrap as singa
def train(rank, holder):
    communicator = singa.Communicator(rank, 2, holder, 1000)
    if rank == 1:
{does}
if __name__ == "__main__":
    holder = singa.NcclIdHolder()
    ranks = [multiprocessing.get_context("fork").Process(target=train, args=(rank, holder)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    print([process.exitcode for process in ranks])
"""


def test_a_thread_of_multiprocessing_whose_failure_cannot_be_printed_fails_its_process(tmp_path):
    thread = "".join(f"        {line}\n" for line in FAILING_THREAD.splitlines())
    text = FULL_ERRORS + RANK_1_OF_MULTIPROCESSING.replace("{does}", thread)
    result = run_command([sys.executable, str(write_script(tmp_path, text))])
    assert result.stdout == "[0, 1]\n"


def test_output_of_multiprocessing_that_cannot_be_flushed_is_an_error_with_a_text(tmp_path):
    lost = "        import os, sys\n        os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    lost += "        sys.stdout = open(1, 'w', closefd=False)\n        print('lost')\n"
    script = write_script(tmp_path, RANK_1_OF_MULTIPROCESSING.replace("{does}", lost))
    result = run_command([sys.executable, str(script)])
    assert result.stdout == "[0, 1]\n"
    assert result.stderr == "singa_lite: output is lost: [Errno 28] No space left on device\n"


@WAYS
def test_output_that_cannot_be_flushed_keeps_no_rank_from_leaving(tmp_path, way):
    text = (
        JOINS + "import os\nif communicator.rank == 1:\n    os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    )
    text += "    sys.stdout = open(1, 'w', closefd=False)\n    print('lost')\n"
    result = run_with(way, write_script(tmp_path, "import sys\n" + text))
    assert result.returncode != 0 and "No space left on device" in result.stderr
    assert "exit_hooks" not in result.stderr and "without leaving the MPI job" not in result.stderr
    assert_nothing_left(tmp_path)


@WAYS
@slow_but_first("group", ["pair", "reverse"])
def test_members_of_a_group_get_the_error_of_one_by_its_number_in_the_world(tmp_path, way, group):
    text = STEP + "pair = communicator.new_group([1, 2])\nreverse = pair and pair.new_group([1, 0])\n"
    text += "if rank == 2:\n    raise ValueError('the cause')\n"
    text += f"({group} or communicator).barrier()\n"
    result = run_with(way, write_script(tmp_path, text), 3)
    assert result.returncode == 1
    expected = r"CommError: rank 1: all_reduce #\d+ 'barrier': rank 2 aborted: ValueError: the cause"
    assert re.search(expected, result.stderr), result.stderr
    assert_nothing_left(tmp_path)


@WAYS
def test_a_thread_that_fails_before_its_process_joins_fails_the_job(tmp_path, way):
    thread = (
        "thread = threading.Thread(target=lambda: [].pop(), name='loader')\nthread.start()\nthread.join()\n"
    )
    result = run_with(way, write_script(tmp_path, "import threading, singa_lite\n" + thread + JOINS))
    assert result.returncode != 0, result
    assert "CommError: connect: thread 'loader': IndexError: pop from empty list; this" in result.stderr
    assert_nothing_left(tmp_path)


@WAYS
def test_a_daemon_thread_that_fails_before_its_process_joins_fails_nothing(tmp_path, way):
    thread = (
        "thread = threading.Thread(target=lambda: [].pop(), daemon=True)\nthread.start()\nthread.join()\n"
    )
    result = run_with(way, write_script(tmp_path, "import threading, singa_lite\n" + thread + JOINS))
    assert result.returncode == 0 and "IndexError" in result.stderr, result


def test_what_a_rank_calls_after_its_thread_has_failed_names_the_cause(tmp_path):
    text = JOINS + "import threading\nif communicator.rank == 1:\n"
    text += "    thread = threading.Thread(target=lambda: [].pop())\n    thread.start()\n    thread.join()\n"
    text += "communicator.all_reduce(np.zeros(2, np.float32), 'sum').wait()\n"
    result = run_ranks_of(write_script(tmp_path, text), 2, is_patient=True)
    assert result.returncode == 1
    cause = "this communicator is closed: rank 1: this rank aborted: thread .*IndexError: pop from empty list"
    assert re.search(f"CommError: rank 1: {cause}", result.stderr), result.stderr


HANDLED = """
sys.excepthook = lambda *_: None
def fail():
    [].pop()
try:
    fail()
except IndexError as error:
    error.__traceback__ = error.__traceback__.tb_next  # as those have that a prompt, or a window's loop, has handled
    sys.last_value = error
communicator.barrier()
print("done")
"""


def test_an_exception_that_others_have_handled_ends_no_rank(tmp_path):
    result = run_ranks_of(
        write_script(tmp_path, STEP + HANDLED + "if rank == 0:\n    time.sleep(.3)\n" + AGAIN), 2
    )
    assert result.returncode == 0 and result.stdout.count("done") == 2, result.stderr


@pytest.mark.parametrize("what", ["thread", "atexit"])
def test_a_failure_in_a_forked_child_is_its_own(tmp_path, what):
    thread = "thread = threading.Thread(target=lambda: [].pop())\n    thread.start()\n    thread.join()\n"
    fails = {"thread": thread, "atexit": "atexit.register(lambda: [].pop())\n"}[what]
    text = STEP + f"import atexit, threading\nif os.fork() == 0:\n    {fails}    sys.exit(0)\n"
    text += "print('child', os.wait()[1])\ncommunicator.barrier()\n"
    result = run_ranks_of(write_script(tmp_path, text), 2)
    assert result.returncode == 0 and result.stdout.count("child 0") == 2, result


def test_peers_get_the_error_of_a_script_with_an_excepthook_of_its_own(tmp_path):
    text = (
        STEP
        + "if rank == 1:\n    sys.excepthook = lambda *_: print('mine')\n    raise ValueError('the cause')\n"
    )
    result = run_ranks_of(write_script(tmp_path, text + AGAIN), 3, is_patient=True)
    assert result.returncode == 1 and "[1] mine" in result.stdout
    for rank in (0, 2):
        assert re.search(rf"rank {rank}: .*rank 1 aborted: ValueError: the cause", result.stderr), result
