# SPDX-License-Identifier: Apache-2.0
"""Requests to stop: all ranks end at the same step, however the request comes and gradients travel."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from singa_lite import opt
from singa_lite.comm.base import World
from singa_lite.comm.dispatch import DispatchCommunicator
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.progress import RECORD, Progress, ProgressFile
from singa_lite.comm.shm import ShmWork
from singa_lite.comm.stop_requests import StopRequests
from singa_lite.comm.stopping import REPEAT_S, StopAgreement, StopHandler
from singa_lite.errors import CommError, OptionError
from tests.comm.processes import (
    assert_nothing_left,
    fresh_environment,
    launch_command,
    run_ranks_of,
    running,
    wait_until,
    write_script,
)
from tests.limits import LIMIT_S
from tests.ranks import mpi_missing, run_ranks
from tests.slow_cases import slow_but_first

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several ranks need Linux")
TRANSPORTS = [
    "shm",
    pytest.param("mpi", marks=pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi works")),
]
TOO_MANY = 200_000  # steps: minutes


# ---- the bit -----------------------------------------------------------------------------------------


def test_what_a_rank_sends_changes_only_where_a_step_begins_or_ends():
    requests = StopRequests()
    requests.begin_step()
    requests.is_requested = True
    requests.receive(False)
    assert not requests.is_sent and requests.end_step() is False
    assert requests.is_sent  # for what comes between two steps
    requests.begin_step()
    assert requests.end_step() is None  # no collective, so nothing is known


def test_a_received_request_is_passed_on_in_the_same_step():
    requests = StopRequests()
    requests.begin_step()
    requests.receive(True)
    requests.receive(False)
    assert requests.is_sent and requests.end_step() is True


# ---- all ranks at the same step ----------------------------------------------------------------------


def steps_by_hand(communicator, asking, at, scheme):
    """Make steps until should_stop, asked by ``asking`` at step ``at``; return the steps and those of each kind."""
    sgd = opt.DistOpt(opt.SGD(), communicator=communicator, dist_option=scheme)
    sizes = []
    for step in range(at + 20):
        if sgd.should_stop:
            break
        if communicator.rank == asking and step == at:
            sgd.request_stop()
        before = communicator.traffic.copy()
        gradient = np.full(7, communicator.rank, np.float32)
        sgd.all_reduce(gradient)
        assert gradient[0] == sum(range(communicator.size))
        sgd.step()
        sizes.append(communicator.traffic.since(before).bytes_payload)
    return sgd.step_counter, sizes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_request_by_hand_is_decided_at_the_end_of_the_next_step_and_sends_nothing_more(transport):
    results = run_ranks(steps_by_hand, 3, 1, 4, "fp32", transport=transport)
    # asked before step 4 begins, where nothing says that a step begins: sent from its end on
    # the first step compares what parameters began with: there are none, so two characters and their number, 10 bytes
    assert results == [(6, [38] + [28] * 5)] * 3


def large_and_small(communicator):
    """Return what the collectives of each kind carried when rank 1 asked, over arrays of several sizes."""
    found = []
    requests = communicator.stop_requests
    for is_asked in (False, True):
        if is_asked and communicator.rank == 1:
            requests.is_requested = True
        for size in (0, 3, 3000, 3_000_000):
            for kind in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all"):
                array = np.ones(size, np.float32)
                requests.begin_step()
                if kind in ("all_reduce", "reduce", "reduce_scatter"):
                    work = getattr(communicator, kind)(array, "sum")
                else:
                    work = getattr(communicator, kind)(array)
                work.wait()
                found.append((is_asked, requests.end_step()))
                requests.is_sent = False  # or the first would decide all others
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_kind_of_collective_carries_a_request(transport):
    for found in run_ranks(large_and_small, 3, transport=transport):
        assert len(found) == 48 and all(expected is heard for expected, heard in found)


TRAINING = """
import json, os, random, signal, sys, threading, time
from pathlib import Path
import numpy as np
from singa_lite import autograd, device, layer, model, opt, tensor
rank = int(os.environ.get("SINGA_LITE_RANK", os.environ.get("PMI_RANK", 0)))
folder = Path(__file__).parent
option, graph, how, who, delay = json.loads(sys.argv[1])
if option.startswith("hierarchical"):
    os.environ["SINGA_LITE_HOST"] = "ab"[rank // 2]

class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layer.Linear(16), layer.Linear(4)
    def forward(self, x):
        return self.out(autograd.relu(self.hidden(x)))
    def train_one_batch(self, x, y):
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss

sgd = opt.DistOpt(opt.SGD(lr=0.01), dist_option=option, threshold=32, bucket_bytes=100)
net = Net()
net.set_optimizer(sgd)
values = np.random.default_rng(rank).random((8, 4), np.float32)
x = y = tensor.from_numpy(values)
net.compile([x], use_graph=graph)
sgd.stop_on_signals()
if rank in who:
    def ask():
        time.sleep(delay)
        os.kill(os.getpid(), getattr(signal, how))
    threading.Thread(target=ask, daemon=True).start()
collectives, bytes_of_step = set(), set()
launch = sgd.communicator.launch
def counting(*arguments):
    counting.number += 1
    return launch(*arguments)
sgd.communicator.launch = counting
(folder / f"training-{rank}").touch()
while not sgd.should_stop and sgd.step_counter < TOO_MANY:
    counting.number = 0
    net(x, y)
    collectives.add(counting.number)
    bytes_of_step.add(sgd.bytes_sent)
    assert sgd.step_counter < 3 or not graph or net.graph_info()[0].break_reason is None
sys.stdout.write(f"stopped {rank} {sgd.step_counter} {sorted(collectives)} {sorted(bytes_of_step)}\\n")
""".replace("TOO_MANY", str(TOO_MANY))


def stopped(output: str) -> dict[int, tuple[int, str]]:
    """Return of each rank at which step it stopped, and how many collectives and bytes its steps had."""
    found = re.findall(r"stopped (\d) (\d+) (\[.*)", output)
    return {int(rank): (int(step), rest) for rank, step, rest in found}


def train(
    folder: Path, size: int, transport: str, option: str, graph: bool, *request
) -> dict[int, tuple[int, str]]:
    import json

    script = write_script(folder, TRAINING)
    argument = json.dumps([option, graph, *request])
    if transport == "mpi":
        mpiexec = Path(sys.executable).with_name("mpiexec")
        command = [
            str(mpiexec if mpiexec.exists() else "mpiexec"),
            "-n",
            str(size),
            sys.executable,
            str(script),
        ]
        result = subprocess.run(
            [*command, argument], capture_output=True, text=True, timeout=LIMIT_S, env=fresh_environment()
        )
    else:
        result = run_ranks_of(script, size, argument)
    assert result.returncode == 0, result.stderr
    ends = stopped(result.stdout)
    assert set(ends) == set(range(size)), result.stdout + result.stderr
    return ends


def check_all_stop(folder, transport, graph, how):
    who = random.randrange(3)
    ends = train(folder, 3, transport, "fp32", graph, how, [who], random.uniform(0, 0.5))
    assert len({step for step, _ in ends.values()}) == 1
    [(step, rest)] = set(ends.values())
    assert 0 < step < TOO_MANY
    # the steps that carried the request are as all others
    assert re.fullmatch(r"\[[1-9]\] \[\d+\]", rest), rest


@pytest.mark.parametrize("transport", TRANSPORTS)
@slow_but_first("graph", [True, False], ids=["recorded", "eager"])
def test_a_signal_to_one_of_three_ranks_stops_all_at_the_same_step(tmp_path, transport, graph):
    check_all_stop(tmp_path, transport, graph, "SIGTERM")


def test_sigusr1_to_one_of_three_ranks_stops_all_as_well(tmp_path):
    check_all_stop(tmp_path, "shm", True, "SIGUSR1")


@slow_but_first(
    ("option", "size"),
    [("localSGD:7", 3), ("hierarchical", 4), ("hierarchical:sparseTopK", 4), ("dgc", 3)],
    count=2,
)
def test_schemes_stop_at_the_same_step(tmp_path, option, size):
    ends = train(tmp_path, size, "shm", option, True, "SIGTERM", [size - 1], random.uniform(0, 0.5))
    steps = {step for step, _ in ends.values()}
    assert len(steps) == 1 and 0 < max(steps) < TOO_MANY
    if option == "localSGD:7":
        assert max(steps) % 7 == 0  # at an average, as other steps have no collective


def test_signals_to_several_ranks_at_the_same_time_are_one_request(tmp_path):
    ends = train(tmp_path, 3, "shm", "fp32", True, "SIGTERM", [0, 1, 2], 0.1)
    assert len(set(ends.values())) == 1


def test_a_process_alone_stops_too(tmp_path):
    ends = train(tmp_path, 1, "shm", "fp32", True, "SIGUSR1", [0], 0.1)
    assert 0 < ends[0][0] < TOO_MANY


# ---- over NCCL ---------------------------------------------------------------------------------------


def without_requests(communicator, listens):
    """Make steps as if gradients travelled over NCCL: their collectives carry no requests.

    Ranks 0 and 1 are in a group, whose collectives of the host are none of rank 2's.
    """
    both = DispatchCommunicator(communicator)
    is_asked = ShmWork._is_asked_to_stop
    both.carries_requests = False
    ShmWork._is_asked_to_stop = lambda work: (
        is_asked(work) if work.name in ("stop requests", "of a group") else None
    )
    group = communicator.new_group([0, 1])
    if group is not None:
        group.share_stop_requests(communicator.stop_requests)
    sgd = opt.DistOpt(opt.SGD(), communicator=both)
    if listens:
        sgd.stop_on_signals(())
    if both.rank == 2:
        sgd.request_stop()
    for _ in range(9):
        if sgd.should_stop:
            break
        sgd.all_reduce(np.ones(3, np.float32))
        if group is not None:
            group.barrier(name="of a group")
        sgd.step()
    return sgd.step_counter


def test_over_nccl_the_host_exchanges_the_requests():
    assert run_ranks(without_requests, 3, True) == [1, 1, 1]


def test_over_nccl_a_request_that_nobody_would_hear_is_an_error():
    errors = run_ranks(without_requests, 3, False, return_exceptions=True)
    assert isinstance(errors[2], OptionError) and "call stop_on_signals() on every rank" in str(errors[2])
    assert all(isinstance(error, CommError) for error in errors[:2])


def listen_on_one(communicator):
    if communicator.rank == 1:
        opt.DistOpt(opt.SGD(), communicator=communicator).stop_on_signals(())
    else:
        communicator.all_reduce(np.ones(1, np.float32), "sum", name="gradients").wait()


def test_stop_on_signals_on_one_rank_alone_is_an_error_on_all():
    for error in run_ranks(listen_on_one, 3, return_exceptions=True):
        assert isinstance(error, CommError) and "stop_on_signals" in str(error) and "gradients" in str(error)


# ---- signals -----------------------------------------------------------------------------------------


@pytest.fixture
def agreement():
    """An agreement of a world of one; handlers are as before afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    yield StopAgreement(LocalCommunicator(World()))
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_handler_of_the_script_is_left_alone(agreement):
    calls = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with pytest.raises(
        OptionError, match=r"SIGTERM has a handler of this script.*call request_stop\(\) in that"
    ):
        agreement.listen([signal.SIGUSR1, signal.SIGTERM])
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL  # nothing has changed
    signal.raise_signal(signal.SIGTERM)
    assert calls == [signal.SIGTERM]


def test_an_ignored_signal_stays_ignored_and_others_ask(agreement):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    agreement.listen([signal.SIGUSR1, signal.SIGUSR2])
    signal.raise_signal(signal.SIGUSR1)
    agreement.end_step(1)
    assert not agreement.is_decided
    signal.raise_signal(signal.SIGUSR2)
    assert not agreement.is_decided
    agreement.end_step(2)
    assert agreement.is_decided


def test_two_worlds_share_a_handler(agreement):
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    other = StopAgreement(LocalCommunicator(World()))
    agreement.listen([signal.SIGUSR2])
    other.listen([signal.SIGUSR2])
    signal.raise_signal(signal.SIGUSR2)
    for each in (agreement, other):
        each.end_step(1)
        assert each.is_decided


def test_the_same_signal_later_does_what_it_did_before(monkeypatch):
    calls, now = [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        handler = StopHandler(signal.getsignal(signal.SIGTERM))
        handler.requests.append(StopRequests())
        signal.signal(signal.SIGTERM, handler)
        for now[0], expected in ((0.0, 0), (REPEAT_S / 2, 0), (REPEAT_S, 1)):
            signal.raise_signal(signal.SIGTERM)
            assert len(calls) == expected
        assert handler.requests[0].is_requested
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigusr1_is_a_request_however_often_it_comes(agreement, monkeypatch):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    agreement.listen([signal.SIGUSR1])
    for now in (0.0, 5.0, 9.0):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        signal.raise_signal(signal.SIGUSR1)
    agreement.end_step(1)
    assert agreement.is_decided


def test_a_signal_behind_the_end_of_the_script_does_not_end_the_process(tmp_path):
    """The launcher tells one rank after the other; the last may have stopped before, by what the first was told."""
    text = """
import atexit, os, signal
atexit.register(lambda: print("ended"))
from singa_lite import opt
class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
late = Late()
opt.DistOpt().stop_on_signals()
"""
    ended = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, env=fresh_environment(), timeout=LIMIT_S
    )
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr


def test_a_forked_child_dies_of_the_signal(agreement):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    agreement.listen([signal.SIGTERM])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"1")
        # a signal just before one long sleep would be handled only after it
        for _ in range(int(LIMIT_S * 100)):
            time.sleep(0.01)
        os._exit(0)
    os.read(reader, 1)  # Python forgets signals that come while it makes a forked process ready
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    agreement.end_step(1)
    assert not agreement.is_decided


@pytest.mark.parametrize(
    ("number", "message"),
    [(0, "expected a signal, such as signal.SIGTERM, got 0"), (signal.SIGKILL, "SIGKILL ends or stops")],
)
def test_what_is_no_signal_to_handle_is_refused(agreement, number, message):
    with pytest.raises(OptionError, match=message):
        agreement.listen([number])


def test_a_number_is_no_list_of_signals(agreement):
    with pytest.raises(OptionError, match="expected a list of signals, got 15"):
        agreement.listen(15)


def test_signals_need_the_main_thread(agreement):
    errors = []

    def listen():
        try:
            agreement.listen([signal.SIGTERM])
        except OptionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


# ---- the launcher ------------------------------------------------------------------------------------


def start_training(folder: Path, text: str = TRAINING, *options: str, size: int = 3) -> subprocess.Popen[str]:
    command = launch_command(write_script(folder, text), size, '["fp32", true, "", [], 0]', options=options)
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=fresh_environment()
    )
    wait_until(
        lambda: len(list(folder.glob("training-*"))) == size or job.poll() is not None, "the first step"
    )
    return job


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_launcher_passes_a_request_on_and_the_job_ends_well(tmp_path, number):
    job = start_training(tmp_path, TRAINING, "--max-restarts", "5")
    job.send_signal(number)
    output, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, errors
    assert (
        errors.endswith(f"all ranks have ended as {number.name} asked them to\n")
        and "restart 1" not in errors
    )
    assert len({step for step, _ in stopped(output).values()}) == 1 and len(stopped(output)) == 3
    assert_nothing_left(tmp_path)


STAYS = TRAINING.replace("while not sgd.should_stop and", "while")


def test_ranks_that_do_not_stop_are_ended_after_the_stop_timeout(tmp_path):
    job = start_training(tmp_path, STAYS, "--stop-timeout", "3")
    start = time.monotonic()
    job.terminate()
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 143 and time.monotonic() - start >= 3
    assert re.search(r"rank 0, rank 1, rank 2 had not ended 3 s after SIGTERM .*--stop-timeout", errors)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_them_at_once(tmp_path, second):
    job = start_training(tmp_path, STAYS, "--stop-timeout", str(LIMIT_S))
    job.terminate()
    wait_until(lambda: job.poll() is None, "the first signal")
    time.sleep(0.2)
    job.send_signal(second)
    job.communicate(timeout=LIMIT_S / 2)
    assert job.returncode == 143
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("at_once", [False, True])
def test_an_interrupt_after_a_request_ends_the_job_as_ever(tmp_path, at_once):
    job = start_training(tmp_path, STAYS, "--stop-timeout", str(LIMIT_S))
    if at_once:  # it gets both when it goes on, in whatever order
        job.send_signal(signal.SIGSTOP)
    job.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    job.send_signal(signal.SIGINT)
    job.send_signal(signal.SIGCONT)
    _, errors = job.communicate(timeout=LIMIT_S / 2)
    assert job.returncode in (128 + signal.SIGUSR1, 128 + signal.SIGINT) and "KeyboardInterrupt" in errors
    assert_nothing_left(tmp_path)


def test_a_rank_that_fails_after_a_request_fails_the_job_without_a_restart(tmp_path):
    text = TRAINING.replace("sys.stdout.write", "rank == 1 and sys.exit(9)\nsys.stdout.write")
    job = start_training(tmp_path, text, "--max-restarts", "5")
    job.terminate()
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 9 and "rank 1 failed first (exit code 9)" in errors and "restart 1" not in errors


def test_servers_serve_until_the_workers_have_stopped(tmp_path):
    server = "if rank == 2:\n    (folder / 'training-2').touch()\n"
    server += "    while not (folder / 'left').exists():\n        time.sleep(0.02)\n    sys.exit(0)\n"
    text = (
        TRAINING.replace("class Net", server + "class Net") + "time.sleep(0.3)\n(folder / 'left').touch()\n"
    )
    write_script(tmp_path, text)
    command = launch_command(tmp_path / "script.py", 2, '["fp32", true, "", [], 0]', options=["-s", "1"])
    job = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=fresh_environment())
    wait_until(lambda: len(list(tmp_path.glob("training-*"))) == 3, "the first step")
    job.terminate()
    _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, errors
    assert not running(tmp_path)


# ---- the progress file -------------------------------------------------------------------------------


def test_the_progress_file_has_each_ranks_newest_step(tmp_path):
    file = ProgressFile(tmp_path / "progress", 3)
    assert file.steps() == [None, None, None] and file.takers() == [] and file.first_failure() == (None, 0)
    first, last = Progress(str(tmp_path / "progress"), 0), Progress(str(tmp_path / "progress"), 2)
    first.note_step(0)
    last.note_step(7)
    last.note_step(8)
    last.note_takes_requests()
    first.note_failure()
    assert file.steps() == [0, None, 8] and file.takers() == [2] and file.failed() == [0]
    file.remove()
    assert file.steps() == [None, None, None] and not (tmp_path / "progress").exists()


def test_a_step_is_not_written_to_a_file_that_has_got_the_number_of_the_progress_file(tmp_path):
    ProgressFile(tmp_path / "progress", 1)
    progress = Progress(str(tmp_path / "progress"), 0)
    os.close(progress._file)
    progress.note_step(1)  # no file has the number
    users, file = os.open(tmp_path / "data", os.O_WRONLY | os.O_CREAT), progress._file
    os.dup2(users, file)  # if it has not got that number anyway
    progress.note_step(2)
    progress.note_takes_requests()
    del progress
    assert (tmp_path / "data").read_bytes() == b""
    for each in {users, file}:
        os.close(each)  # which is still open


def test_a_step_that_cannot_be_written_is_no_error():
    Progress("/dev/full", 0).note_step(1)


def test_the_failure_nearest_to_the_cause_counts(tmp_path):
    path = tmp_path / "progress"
    file = ProgressFile(path, 3)
    path.write_bytes(RECORD.pack(4, 0, 1, 2) + RECORD.pack(4, 0, -9, 0) + RECORD.pack(4, 0, 1, 1))
    assert file.first_failure() == (1, 0)
    path.write_bytes(RECORD.pack(4, 0, 1, 3) + RECORD.pack(4, 0, 0, 0) + RECORD.pack(4, 0, 1, 2))
    assert file.first_failure() == (2, 2)


def test_a_file_that_cannot_be_made_or_read_says_nothing(tmp_path):
    assert not ProgressFile(tmp_path / "no" / "folder", 2).is_there
    file = ProgressFile(tmp_path / "cut", 2)
    (tmp_path / "cut").write_bytes(b"x")
    assert file.steps() == [None, None]
    nothing = ProgressFile(None, 2)
    assert nothing.environ == {} and nothing.steps() == [None, None]
