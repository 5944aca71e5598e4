# SPDX-License-Identifier: Apache-2.0
"""What the mpi transport does beyond the contract: sums in rank order, agreement, the end of failed jobs.

`make test-openmpi` runs this file under Open MPI, `make test` under MPICH.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from singa_lite import layer, model, opt, tensor
from singa_lite.comm import mpi
from singa_lite.comm.combine import combine
from singa_lite.comm.mpi import CHUNK_ELEMENTS, SMALL_BYTES
from singa_lite.errors import CommError
from tests.comm.processes import (
    assert_nothing_left,
    at_once,
    launch_command,
    run_command,
    wait_until,
    write_script,
)
from tests.limits import LIMIT_S
from tests.ranks import _mpiexec, mpi_missing, run_ranks
from tests.slow_cases import slow_but_first

pytestmark = pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi works")
# Open MPI needs leave to run as root and with more ranks than cores
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@pytest.fixture(autouse=True)
def open_mpi_may_run(monkeypatch):
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)


def over_mpi(function, size, *arguments, **options):
    return run_ranks(function, size, *arguments, transport="mpi", timeout_s=LIMIT_S, **options)


def in_turn(communicator, names):
    return {name: globals()[name](communicator) for name in names}


@functools.cache
def one_job(size):
    """What the calls of IN_ONE_JOB return, of each rank: a start over MPI takes longer than all of them."""
    return over_mpi(in_turn, size, IN_ONE_JOB[size])


def results_of(function, size):
    return [of_rank[function.__name__] for of_rank in one_job(size)]


# what closes the communicator comes last
IN_ONE_JOB = {
    2: ["all_reduced", "used_after_close"],
    3: ["all_reduced", "narrowed", "extremes", "exchanged", "many", "recorded", "grouped", "too_many_groups"],
}

# ---- sums --------------------------------------------------------------------------------------------


def data_of(rank, num_elements, dtype):
    """Numbers whose sum depends on the order it is taken in."""
    generator = np.random.default_rng(rank)
    return (generator.standard_normal(num_elements) * 10.0 ** generator.integers(-3, 4)).astype(dtype)


def reduced(communicator, num_elements, dtype, op):
    array = data_of(communicator.rank, num_elements, dtype)
    communicator.all_reduce(array, op).wait()
    scattered = communicator.reduce_scatter(data_of(communicator.rank, 6 * num_elements, dtype), op).wait()
    at_root = data_of(communicator.rank, num_elements, dtype)
    communicator.reduce(at_root, op, communicator.size - 1).wait()
    return array, scattered, at_root


SUMS = {("float32", 7), ("float32", 3 * CHUNK_ELEMENTS + 5), ("float16", 7), ("float16", 30001)}


def all_reduced(communicator):
    return {case: reduced(communicator, case[1], case[0], "mean") for case in sorted(SUMS)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("dtype", "num_elements"), sorted(SUMS))
def test_sums_run_in_rank_order_small_and_large(size, num_elements, dtype):
    results = [result[dtype, num_elements] for result in results_of(all_reduced, size)]

    def expected(count):
        total = data_of(0, count, dtype).astype("float32")
        for rank in range(1, size):
            total = total + data_of(rank, count, dtype).astype("float32")
        return (total / np.float32(size)).astype(dtype)

    whole, rows = expected(num_elements), np.split(expected(6 * num_elements), size)
    for rank, (array, scattered, at_root) in enumerate(results):
        np.testing.assert_array_equal(array, whole)
        np.testing.assert_array_equal(scattered, rows[rank])
        is_root = rank == size - 1
        np.testing.assert_array_equal(at_root, whole if is_root else data_of(rank, num_elements, dtype))


def narrowed(communicator):
    arrays = [data_of(communicator.rank, length, "float32") for length in (5, CHUNK_ELEMENTS + 3)]
    for array in arrays:
        communicator.all_reduce(array, "sum", wire_dtype="float16").wait()
    return arrays


def test_half_on_the_wire_is_summed_in_float32():
    for arrays in results_of(narrowed, 3):
        for array in arrays:
            sources = [data_of(rank, len(array), "float32") for rank in range(3)]
            halves = [source.astype("float16").astype("float32") for source in sources]
            expected = ((halves[0] + halves[1]) + halves[2]).astype("float16").astype("float32")
            np.testing.assert_array_equal(array, expected)


def extremes(communicator):
    found = []
    for num_elements in (4, SMALL_BYTES):
        array = np.full(num_elements, communicator.rank, "float32")
        array[communicator.rank] = np.nan
        largest, smallest = array.copy(), array.copy()
        communicator.all_reduce([largest], "max").wait()
        communicator.all_reduce([smallest], "min").wait()
        found.append((largest, smallest))
    return found


def test_nan_wins_in_max_and_min():
    for largest, smallest in itertools.chain(*results_of(extremes, 3)):
        assert np.isnan(largest[:3]).all() and np.isnan(smallest[:3]).all()
        assert (largest[3:] == 2).all() and (smallest[3:] == 0).all()


ROWS = [250, 999]  # of 24 bytes: one piece, and four with a shorter last one


def exchanged(communicator):
    """An all_to_all in pieces, which are limited by what an MPI takes at once, by the number of rows."""
    limit, found = mpi.COPY_BYTES, {}
    mpi.COPY_BYTES = 6000 * communicator.size
    for rows in ROWS:
        array = data_of(communicator.rank, communicator.size * rows * 3, "float64")
        found[rows] = communicator.all_to_all(array.reshape(-1, 3)).wait()
    mpi.COPY_BYTES = limit
    return found


@pytest.mark.parametrize("rows", ROWS)
def test_an_all_to_all_beyond_what_mpi_takes_goes_in_pieces(rows):
    results = [of_rank[rows] for of_rank in results_of(exchanged, 3)]
    inputs = [data_of(rank, 9 * rows, "float64").reshape(3, rows, 3) for rank in range(3)]
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, np.concatenate([each[rank] for each in inputs]))


def test_combine_leaves_read_only_rows_alone():
    rows = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    rows[0].flags.writeable = False
    np.testing.assert_array_equal(combine(rows, "mean"), [2.0, 3.0])
    np.testing.assert_array_equal(rows[0], [1.0, 2.0])


def many(communicator):
    arrays = [np.full(3 + 9000 * (i % 3), communicator.rank + i, "float64") for i in range(12)]
    works = [communicator.all_reduce(array, "sum", name=f"array {i}") for i, array in enumerate(arrays)]
    for work in reversed(works):
        work.wait()
    gathered = communicator.all_gather(np.full((2, 5000), communicator.rank, "int32")).wait()
    return [array[-1] for array in arrays], gathered[:, 1, 4999].tolist(), all(work.done() for work in works)


def test_many_works_in_flight_small_and_large_end_in_any_order_of_waiting():
    for sums, gathered, all_done in results_of(many, 3):
        assert sums == [3 + 3 * i for i in range(12)]
        assert gathered == [0, 1, 2] and all_done


class Wide(model.Model):
    """Whose gradients are messages of more than SMALL_BYTES, also as int8."""

    def __init__(self):
        super().__init__()
        self.linear = layer.Linear(3001)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.linear(x)

    def train_one_batch(self, x, y):
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


RECORDED = ["fp32", "int8", "sign", "sparseTopK:0.5", "dgc:0.5"]


def recorded(communicator):
    return {option: steps_of(communicator, option) for option in RECORDED}


def steps_of(communicator, option):
    """Return why the steps of each record run eagerly, and the parameters after four steps."""
    net = Wide()
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1), communicator=communicator, dist_option=option))
    rng = np.random.default_rng(communicator.rank)
    x = tensor.from_numpy(rng.standard_normal((4, 8)).astype(np.float32))
    net.compile([x], use_graph=True)
    for _ in range(4):
        net(x, tensor.from_numpy(rng.integers(0, 3001, 4).astype(np.int32)))
    params = {name: tensor.to_numpy(value) for name, value in net.get_params().items()}
    return [info.break_reason for info in net.graph_info()], params


@pytest.mark.parametrize("option", RECORDED)
def test_steps_are_recorded_whatever_their_messages(option):
    """A transport that keeps what it has gathered until the next collective would keep arrays of the step alive."""
    results = [result[option] for result in results_of(recorded, 3)]
    for reasons, params in results:
        assert reasons == [None]
        for name, value in params.items():
            np.testing.assert_array_equal(value, results[0][1][name])


def grouped(communicator):
    group = communicator.new_group([2, 0])
    array = np.full(5000, communicator.rank + 1.0, "float32")
    if group is not None:
        group.all_reduce(array, "sum").wait()
        return group.rank, float(array[0])
    return None


def test_a_group_ranks_its_members_as_given():
    assert results_of(grouped, 3) == [(1, 4.0), None, (0, 4.0)]


def too_many_groups(communicator):
    def full(*_):
        raise communicator._mpi.Exception(communicator._mpi.ERR_OTHER)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CommError) as raised:
        patch.setattr(mpi, "within", full)  # as behind some 2,000 groups
        communicator.new_group([0, 1, 2], name="one more")
    return str(raised.value)


def test_a_group_that_mpi_cannot_make_is_an_error_of_ours():
    assert all(
        text.startswith("new_group 'one more': MPI failed: ") for text in results_of(too_many_groups, 3)
    )


def without_a_thread(communicator):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CommError) as raised:
        patch.setattr(threading.Thread, "start", no_thread)
        communicator.all_reduce(np.ones(50_000, "float32"), "sum", name="conv1.W").wait()
    array = np.ones(50_000, "float32")
    communicator.all_reduce(array, "sum").wait()
    return str(raised.value), array.sum()


def no_thread(self):
    raise RuntimeError("can't start new thread")


def test_a_system_that_gives_no_thread_is_an_error_of_ours_and_a_later_call_tries_again():
    for text, total in over_mpi(without_a_thread, 2):
        assert "'conv1.W'" in text and text.endswith("gives no thread to send in: can't start new thread")
        assert total == 2 * 50_000


# ---- agreement ---------------------------------------------------------------------------------------


def disagreeing(communicator, num_elements):
    array = np.ones(num_elements, "float32")
    if communicator.rank == 1:
        communicator.broadcast(array, 0, name="fc.b").wait()
    communicator.all_reduce(array, "sum", name="conv1.W").wait()


def over_mpi_at_once(function, size, all_lengths=(3, 50_000), **options):
    """What the ranks of one job for each length return; the jobs run at the same time."""
    return at_once([functools.partial(over_mpi, function, size, length, **options) for length in all_lengths])


def test_ranks_that_disagree_name_each_other_and_both_calls():
    jobs = over_mpi_at_once(disagreeing, 3, return_exceptions=True)
    for rank, error in [pair for errors in jobs for pair in enumerate(errors)]:
        assert isinstance(error, CommError)
        text = str(error)
        assert text.startswith(f"rank {rank}: ") and "rank 1 calls broadcast #0 'fc.b'" in text
        assert "calls all_reduce #0 'conv1.W' sum" in text


def other_length(communicator):
    communicator.all_reduce(np.ones(20_000 + communicator.rank, "float32"), "sum").wait()


def test_unequal_lengths_are_an_error_not_a_truncation():
    for error in over_mpi(other_length, 2, return_exceptions=True):
        assert isinstance(error, CommError) and "float32[20001]" in str(error)


def one_step_more(communicator, num_elements):
    for _ in range(2 if communicator.rank == 1 else 1):
        communicator.all_reduce(np.ones(num_elements, "float32"), "sum").wait()
    if communicator.rank != 1:
        communicator.close()
        time.sleep(1)  # the other rank's message must arrive although this one does nothing


def test_a_rank_that_makes_one_step_more_learns_that_the_others_closed():
    for results in over_mpi_at_once(one_step_more, 3, return_exceptions=True):
        assert results[0] is None and results[2] is None
        assert isinstance(results[1], CommError)
        assert "all_reduce #1" in str(results[1]) and "has closed its communicator" in str(results[1])


def used_after_close(communicator):
    communicator.close()
    with pytest.raises(CommError) as error:
        communicator.barrier()
    return str(error.value)


def test_a_closed_communicator_refuses_calls():
    for text in results_of(used_after_close, 2):
        assert "is closed" in text


def late(communicator, num_elements, folder):
    given_up = Path(folder) / str(num_elements)
    if communicator.rank == 1:
        wait_until(given_up.exists, "the other rank's time-out")
        return "late"
    communicator.timeout_s = 0.5  # not before all have joined
    try:
        communicator.all_reduce(np.ones(num_elements, "float32"), "sum", name="conv1.W").wait(
            None if num_elements < 10 else 0.5
        )
    except CommError as error:
        return str(error)
    finally:
        given_up.touch()


def test_a_late_rank_is_named(tmp_path):
    jobs = [functools.partial(over_mpi, late, 2, length, str(tmp_path)) for length in (3, 50_000)]
    for text, other in at_once(jobs):
        assert other == "late"
        assert text.startswith("rank 0: all_reduce #0 'conv1.W': waited 0.5 s for rank 1")


# ---- whole jobs --------------------------------------------------------------------------------------

STEP = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from singa_lite.comm.rendezvous import process_communicator
communicator = process_communicator(timeout_s=300)
rank = communicator.rank
array = np.full(int(sys.argv[2]), rank + 1, np.float32)
communicator.all_reduce(array, "sum", name="first").wait()
communicator.host.timeout_s = float(sys.argv[1])  # not before all have joined
"""
# ranks that fail end the job only when all that will fail have printed why
TOGETHER = """
from singa_lite.comm.mpi_job import MpiJob
end_job, own = MpiJob.abort_after_final_output, f"{{Path(__file__).stem}}-{{rank}}.failed"
def end_together(job):
    Path(__file__).with_name(own).touch()
    while len(list(Path(__file__).parent.glob(f"{{Path(__file__).stem}}-*.failed"))) < {num_ranks}:
        time.sleep(.01)
    end_job(job)
MpiJob.abort_after_final_output = end_together
"""
AGAIN = "\ncommunicator.all_reduce(array, 'sum', name='conv1.W').wait()\n"


def mpi_job(folder, text, size=3, timeout_s=300, num_elements=4):
    script = write_script(folder, text, f"script{num_elements}.py")
    mpiexec = _mpiexec()
    assert mpiexec
    command = [mpiexec, "-n", str(size), sys.executable, str(script), str(timeout_s), str(num_elements)]
    return run_command(command, **OPEN_MPI)


def mpi_jobs(folder, text, all_lengths=(4, 50_000), **options):
    """One job for each length, at the same time."""
    return at_once(
        [
            functools.partial(mpi_job, folder, text, num_elements=num_elements, **options)
            for num_elements in all_lengths
        ]
    )


def test_mpiexec_makes_the_world(tmp_path):
    result = mpi_job(tmp_path, STEP + "sys.stdout.write(f'{communicator.world} {array[0]}\\n')")
    assert result.returncode == 0, result.stderr
    expected = [
        f"World(rank={r}, size=3, local_rank={r}, local_size=3, rendezvous_id='', transport='mpi') 6.0"
        for r in range(3)
    ]
    assert sorted(result.stdout.splitlines()) == expected


def test_an_mpi4py_set_not_to_start_mpi_is_started(tmp_path):
    text = "import mpi4py\nmpi4py.rc.initialize = False\n" + STEP + "sys.stdout.write(f'{array[0]}\\n')"
    result = mpi_job(tmp_path, text)
    assert (result.returncode, result.stdout) == (0, "6.0\n" * 3), result.stderr


def test_a_script_may_finalize_mpi_and_has_its_functions_called_at_exit(tmp_path):
    last = """
import atexit
from mpi4py import MPI
atexit.register(lambda: sys.stdout.write(f"{error}\\n"))
MPI.Finalize()
try:
    communicator.all_reduce(array, "sum", name="too late").wait()
except CommError as raised:
    error = raised
"""
    result = mpi_job(tmp_path, "from singa_lite.errors import CommError\n" + STEP + last)
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert len(result.stdout.splitlines()) == 3
    assert all(
        "'too late': the script has called MPI.Finalize()" in line for line in result.stdout.splitlines()
    )


def test_an_mpi_without_threads_is_refused_and_leaves_nothing(tmp_path):
    text = """
import re, sys, mpi4py
from pathlib import Path
mpi4py.rc.threads = False
from singa_lite import opt
from singa_lite.errors import CommError
try:
    opt.DistOpt()
except CommError as error:
    from mpi4py import MPI
    sys.stdout.write(f"{MPI.Is_finalized()} {error}\\n")
"""
    result = mpi_job(tmp_path, text, size=2)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2 and all(
        line.startswith("True ") and "without THREAD_MULTIPLE" in line for line in lines
    )


def test_a_forked_child_that_ends_leaves_mpi_alone(tmp_path):
    fork = """
child = os.fork()
if child == 0:
    try:
        communicator.all_reduce(array, "sum", name="of the child").wait()
    except RuntimeError as error:
        sys.exit(5 if "made before fork() is not usable in the child" in str(error) else 6)
    sys.exit(7)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
communicator.all_reduce(array, "sum", name="second").wait()
sys.stdout.write(f"{code} {array[0]}\\n")
"""
    result = mpi_job(tmp_path, STEP + fork)
    assert (result.returncode, result.stdout) == (0, "5 18.0\n" * 3), result.stderr
    assert_nothing_left(tmp_path)


def test_an_exception_on_one_rank_ends_the_job_and_is_shown_by_all(tmp_path):
    text = STEP + TOGETHER.format(num_ranks=3) + "if rank == 1:\n    raise ValueError('the cause')" + AGAIN
    for result in mpi_jobs(tmp_path, text):
        errors = result.stderr
        assert result.returncode != 0
        assert "rank 1 of 3 failed:\nTraceback" in errors and "\nValueError: the cause" in errors
        for rank in (0, 2):
            assert f"rank {rank}: all_reduce #1 'conv1.W': rank 1 aborted: ValueError: the cause" in errors
    assert_nothing_left(tmp_path)


def test_a_rank_that_leaves_early_ends_the_job(tmp_path):
    for code in (0, 3):
        (tmp_path / str(code)).mkdir()
    step = STEP + TOGETHER.format(num_ranks=2)
    texts = {code: step + f"if rank == 1:\n    sys.exit({code})" + AGAIN for code in (0, 3)}
    for result in at_once([functools.partial(mpi_job, tmp_path / str(code), texts[code]) for code in texts]):
        assert result.returncode != 0
        assert "rank 0: all_reduce #1 'conv1.W': rank 1 has closed its communicator" in result.stderr
    assert_nothing_left(tmp_path)


def test_ranks_of_other_versions_do_not_train_together(tmp_path):
    before = (
        "import os, singa_lite\n"
        "if '1' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK')):\n"
        "    singa_lite.__version__ = '9.8'\n"
    )
    result = mpi_job(tmp_path, before + STEP)
    assert result.returncode != 0
    assert re.search(
        r"MPI: rank 1 on .* has singa_lite 9\.8, rank 0 on .*; install one version", result.stderr
    )
    assert_nothing_left(tmp_path)


def test_a_killed_rank_ends_the_job(tmp_path):
    result = mpi_job(tmp_path, STEP + "if rank == 1:\n    os.kill(os.getpid(), 9)" + AGAIN)
    assert result.returncode != 0
    assert_nothing_left(tmp_path)


def test_a_stopped_rank_is_named_and_ends_the_job(tmp_path):
    text = STEP + "if rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)" + AGAIN
    for result in mpi_jobs(tmp_path, text, timeout_s=2):
        assert result.returncode != 0
        assert re.search(r"all_reduce #1 'conv1.W': waited 2 s for rank (0, )?1", result.stderr)
    assert_nothing_left(tmp_path)


def test_a_caught_time_out_still_ends_the_job(tmp_path):
    text = STEP + "if rank == 1:\n    time.sleep(600)\n"
    text += "try:\n    communicator.barrier()\nexcept RuntimeError:\n    print('caught')\n"
    result = mpi_job(tmp_path, text, size=2, timeout_s=1)
    assert result.returncode != 0 and result.stdout.strip() == "caught"
    assert_nothing_left(tmp_path)


@slow_but_first("names", [("PMI_SIZE", "PMI_RANK"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")])
def test_an_mpi_that_knows_nothing_of_the_others_is_an_error(tmp_path, names):
    script = write_script(tmp_path, STEP)
    result = run_command([sys.executable, str(script), "5", "4"], **dict(zip(names, "20", strict=True)))
    assert result.returncode != 0
    assert "as rank 0 of 2, but" in result.stderr and "says rank 0 of 1" in result.stderr


def test_the_ranks_of_a_job_share_the_cores(tmp_path):
    text = STEP + "import threadpoolctl\n"
    text += (
        "sys.stdout.write(str(sorted({p['num_threads'] for p in threadpoolctl.threadpool_info()})) + '\\n')"
    )
    result = mpi_job(tmp_path, text, size=2)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert result.stdout.splitlines() == [f"[{share}]"] * 2, result.stderr


STARTS_A_JOB = """
if rank == 1:
    import subprocess
    start = [sys.executable, "-m", "singa_lite", "run", "-n", "2", "-m", "this"]
    ended = subprocess.run(start, stdout=subprocess.PIPE, text=True)
    sys.stdout.write(f"{ended.returncode} {ended.stdout.count('Beautiful')}\\n")
"""


def test_a_rank_may_start_a_job_but_mpiexec_no_launchers(tmp_path):
    result = mpi_job(tmp_path, STEP + STARTS_A_JOB)
    assert (result.returncode, result.stdout) == (0, "0 2\n"), result.stderr
    command = [_mpiexec() or "", "-n", "2", *launch_command(write_script(tmp_path, "print('up')"), 2)]
    result = run_command(command, **OPEN_MPI)
    assert result.returncode != 0 and result.stdout == ""
    assert re.search(r"this launcher is task [01] of 2 of \w+", result.stderr), result.stderr
