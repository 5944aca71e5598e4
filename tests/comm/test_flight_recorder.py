# SPDX-License-Identifier: Apache-2.0
"""What every rank was doing: reports of failures, of SIGQUIT and of `singa-lite inspect`, and what they are made of."""

from __future__ import annotations

import contextlib
import io
import os
import pdb
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import _native, autograd, layer, model, opt, tensor
from singa_lite.comm import flight_record, flight_report, stacks
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.call_site import CallSites
from singa_lite.comm.flight_record import ALL_THERE, ENDED, FAILED, STARTED, Call, FlightRecord, RankRecord
from singa_lite.comm.flight_recorder import is_recording, title_of
from singa_lite.comm.flight_signals import report_at_sigquit
from singa_lite.comm.inspect_job import inspect_job
from singa_lite.comm.shm import ShmCommunicator
from singa_lite.error_stream import tell
from singa_lite.errors import CommError, OptionError
from tests.comm.processes import (
    assert_nothing_left,
    fresh_environment,
    launch_command,
    run_command,
    wait_until,
    write_script,
)
from tests.limits import LIMIT_S
from tests.ranks import _mpiexec, mpi_missing, run_ranks
from tests.slow_cases import slow_but_first

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the flight recorder needs Linux")

LATE_S = 1.0  # the time-out of the call for which a rank is late
HERE = Path(__file__)


def line_of(mark: str) -> int:
    """The number of the line of this file that ends with the comment ``mark``."""
    lines = HERE.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


# ---- a late rank ---------------------------------------------------------------------------------------


def be_late(kind: str, folder: Path) -> None:
    """Do something else until the others have failed."""
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "loop":
        while not (folder / "done-2").exists() or not (folder / "done-0").exists():  # the endless loop
            pass
    elif kind == "native":
        with os.fdopen(os.open(folder / "pipe", os.O_RDWR)) as pipe:
            pipe.readline()  # the native call
    else:
        with os.fdopen(os.open(folder / "pipe", os.O_RDWR)) as pipe:
            debugger = pdb.Pdb(stdin=pipe, stdout=io.StringIO(), readrc=False)
            debugger.set_trace()  # where Python 3.13 stops
            debugger.set_continue()  # the breakpoint


def end_lateness(kind: str, folder: Path, pid: int) -> None:
    """Have the late rank go on, once both others have failed."""
    wait_until(lambda: (folder / "done-2").exists(), "the other rank's failure")
    if kind == "stop":
        os.kill(pid, signal.SIGCONT)
    if kind in ("native", "pdb"):
        (folder / "pipe").write_text("continue\n")


def warns_into(communicator: Communicator, stream: str) -> None:
    """Wait for a rank, and report, where the error stream takes nothing."""
    with open("/dev/full" if stream == "full" else os.devnull, "w") as errors:
        sys.stderr = None if stream == "none" else errors
        if stream == "closed":
            errors.close()
        if communicator.rank == 1:
            time.sleep(1.5 * LATE_S)
        # a tenth: a warning
        communicator.all_reduce(np.ones(3, np.float32), "sum", name="grad").wait(10 * LATE_S)
        report_at_sigquit()
        for _ in range(3):
            signal.raise_signal(signal.SIGQUIT)
        communicator.all_reduce(np.ones(3, np.float32), "sum", name="end").wait()
        sys.stderr = sys.__stderr__


@slow_but_first("stream", ["full", "closed", "none"])
def test_an_error_stream_that_takes_nothing_is_no_error(stream: str) -> None:
    run_ranks(warns_into, 2, stream)


def waits_for_rank_1(c: Communicator, kind: str, folder: Path, has_logs: bool) -> tuple[str, str]:
    """The error of a rank that waits for another, and what it wrote to the error stream."""
    if has_logs:
        os.environ["SINGA_LITE_LOG_DIR"] = str(folder / "logs")
    pids = c.all_gather_object(os.getpid())
    array = np.full((4, 2), float(c.rank), np.float32)
    c.all_reduce(array, "sum", name="before").wait()  # the call before
    if c.rank == 1:
        be_late(kind, folder)
        return "", ""
    sys.stderr = io.StringIO()
    getattr(c, "host", c).timeout_s = LATE_S  # a small collective over MPI waits in its call
    with pytest.raises(CommError) as caught:
        c.all_reduce(array, "max", name="grad").wait(LATE_S)  # the late call
    text, sys.stderr = sys.stderr.getvalue(), sys.__stderr__
    (folder / f"done-{c.rank}").touch()
    if c.rank == 0:
        end_lateness(kind, folder, pids[1])
    return str(caught.value), text


def run_late(kind: str, folder: Path, transport: str, has_logs: bool) -> tuple[list[str], list[str]]:
    """The errors and the output of ranks 0 and 2."""
    os.mkfifo(folder / "pipe")
    options: dict[str, Any] = {"transport": transport, "return_exceptions": True}
    results = run_ranks(waits_for_rank_1, 3, kind, folder, has_logs, **options)
    texts = [result if isinstance(result, tuple) else (repr(result), "") for result in results]
    return [texts[0][0], texts[2][0]], [texts[0][1], texts[2][1]]


BREAKPOINT = "where Python 3.13 stops" if sys.version_info >= (3, 13) else "the breakpoint"
EVIDENCE = {
    "stop": "none: the process is stopped by a signal",
    "loop": f'File "{HERE}", line {line_of("the endless loop")}',
    "native": f'File "{HERE}", line {line_of("the native call")} in be_late',
    "pdb": f'File "{HERE}", line {line_of(BREAKPOINT)} in be_late',
}


def assert_names_rank_1(report: str, kind: str) -> None:
    where = rf"{re.escape(str(HERE))[-90:]}:{line_of('the late call')}"
    assert re.search(
        rf"First call where ranks differ: #\d+ of the world\n.*'grad' max float32\[4, 2\] at .*{where}",
        report,
    )
    last = rf"'before' sum float32\[4, 2\] at .*:{line_of('the call before')}"
    assert re.search(rf"rank 1 has not called it; the last call is #\d+ all_reduce {last}", report)
    assert re.search(
        r"rank 1 \(process \d+, [^)]+\): after #\d+ of the world, .*last sign of life [\d.]+ s ago", report
    )
    assert EVIDENCE[kind] in report
    assert ("in a debugger" in report) == (kind == "pdb")


@slow_but_first("kind", EVIDENCE)
def test_a_late_rank_is_named_with_its_call_and_line(kind: str, tmp_path: Path) -> None:
    errors, outputs = run_late(kind, tmp_path, "shm", True)
    (path,) = (tmp_path / "logs").iterdir()
    for error, output in zip(errors, outputs, strict=True):
        assert f"what every rank was doing: {path}" in error
        assert re.search(
            rf"warning: rank [02] has waited 0\.\d+ s in all_reduce #\d+ 'grad' \(.*:{line_of('the late call')}\) for "
            r"rank 1; `singa-lite inspect \d+`",
            output,
        )
        assert output.count("warning") == 1 and "What every rank" not in output
    report = path.read_text()
    assert report.count("What every rank was doing") == 1
    assert_names_rank_1(report, kind)


def test_without_a_folder_one_rank_prints_the_report(tmp_path: Path) -> None:
    errors, outputs = run_late("loop", tmp_path, "shm", False)
    assert all("what every rank was doing" not in error for error in errors)
    (report,) = [output for output in outputs if "What every rank was doing" in output]
    assert_names_rank_1(report, "loop")


@pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi works")
@slow_but_first("kind", ["loop", "stop"])
def test_over_mpi_one_rank_of_the_host_reports_too(kind: str, tmp_path: Path) -> None:
    run_late(kind, tmp_path, "mpi", True)
    (path,) = (tmp_path / "logs").iterdir()
    report = path.read_text()
    assert report.count("What every rank was doing") == 1
    assert_names_rank_1(report, kind)


def waits_for_a_rank_in_its_call(c: Communicator, folder: Path) -> str:
    os.environ["SINGA_LITE_LOG_DIR"] = str(folder / "logs")
    # more rounds than there are slots, and too small for a thread that would move them
    work = c.all_reduce(np.zeros(750_000, np.float32), "sum", name="grad")
    if c.rank == 1:
        be_late("loop", folder)
        return ""
    with pytest.raises(CommError) as caught:
        work.wait(LATE_S)
    (folder / f"done-{c.rank}").touch()
    return str(caught.value)


def test_a_rank_that_is_late_in_a_call_of_all_has_its_stack_in_the_report(tmp_path: Path) -> None:
    errors = run_ranks(waits_for_a_rank_in_its_call, 3, tmp_path)
    assert any("waited 1 s for rank 1" in error for error in errors), errors
    report = next((tmp_path / "logs").iterdir()).read_text()
    assert "The ranks do not differ in the calls of the world." in report
    stack = report.split("Python stack of rank 1:")[1]
    assert EVIDENCE["loop"] in stack


# ---- other failures ------------------------------------------------------------------------------------


def calls_another(c: Communicator, folder: Path) -> str:
    os.environ["SINGA_LITE_LOG_DIR"] = str(folder)
    array = np.full(5, float(c.rank), np.float32)
    with pytest.raises(CommError) as caught:
        if c.rank == 1:
            c.broadcast(array, 2, name="loss").wait()  # the other call
        c.all_reduce(array, "mean", name="grad", wire_dtype="float16").wait()  # the usual call
    return str(caught.value)


def test_ranks_that_call_different_collectives_are_shown_with_their_lines(tmp_path: Path) -> None:
    errors = run_ranks(calls_another, 3, tmp_path)
    (path,) = tmp_path.iterdir()
    assert any(str(path) in error for error in errors)
    report = path.read_text()
    assert "First call where ranks differ: #0 of the world" in report
    usual, other = line_of("the usual call"), line_of("the other call")
    # a late one may be missing
    assert re.search(
        rf"rank (0, 2|0|2): all_reduce 'grad' mean float32\[5\] as float16 at .*:{usual}", report
    )
    assert re.search(rf"rank 1: broadcast 'loss' float32\[5\] root 2 at .*:{other}", report)


def calls_by_odd_names(c: Communicator, folder: Path) -> str:
    os.environ["SINGA_LITE_LOG_DIR"] = str(folder)
    with pytest.raises(CommError) as caught:
        c.all_reduce(np.zeros(3), "sum", name=f"loss\n\0\x7f{c.rank}" + "x" * 100).wait()
    return str(caught.value)


TRANSPORTS = [
    "shm",
    pytest.param("mpi", marks=pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi works")),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_names_are_escaped_and_cut_ones_are_marked(transport: str, tmp_path: Path) -> None:
    errors = run_ranks(calls_by_odd_names, 2, tmp_path, transport=transport)
    (path,) = tmp_path.iterdir()
    report = path.read_text()
    for rank in range(2):
        shown = rf"'loss\n\x00\x7f{rank}"
        assert all(error.isprintable() and shown + "x" * 100 + "' " in error for error in errors), errors
        assert shown + "x" * 88 + "...' sum" in report  # of 96 bytes
    assert report.count("\n") == len(report.splitlines())  # no other ends of lines


def fails_twice(c: Communicator, folder: Path) -> list[str]:
    os.environ["SINGA_LITE_LOG_DIR"] = str(folder)
    pair, errors = c.new_group([1, 0], name="pair"), []
    for each, name in ((pair, "first"), (c, "second")):
        assert each is not None
        with pytest.raises(CommError) as caught:
            each.all_reduce(np.zeros(2), "sum", name=f"{name} of rank {c.rank}").wait()
        errors.append(str(caught.value))
    return errors


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failure_after_one_that_was_caught_has_a_report_too(transport: str, tmp_path: Path) -> None:
    texts = run_ranks(fails_twice, 2, tmp_path, transport=transport)
    (path,) = tmp_path.iterdir()
    reports = path.read_text().split("What every rank was doing, ")[1:]
    assert len(reports) == 2
    for number, (report, name) in enumerate(zip(reports, ("first", "second"), strict=True)):
        assert f"'{name} of rank" in report.split("Reason: ")[1].splitlines()[0]
        assert any(f"what every rank was doing: {path}" in errors[number] for errors in texts)


def fails_again_without_a_report(c: Communicator, folder: Path) -> list[str]:
    os.environ["SINGA_LITE_LOG_DIR"] = str(folder)
    pair, errors = c.new_group([1, 0], name="pair"), []
    assert pair is not None
    with pytest.raises(CommError):
        pair.all_reduce(np.zeros(2), "sum", name=f"rank {c.rank}").wait()
    if (child := os.fork()) == 0:
        try:
            pair.barrier()
        except CommError as error:
            os._exit("what every rank" in str(error))
    errors.append(f"exit code {os.waitpid(child, 0)[1]}")
    c.barrier()
    if c.rank == 1:
        c.abort("ValueError: the loss is NaN")
    pair.close()
    for each in (c, pair):
        with pytest.raises(CommError) as caught:
            each.barrier()
        errors.append(str(caught.value))
    return errors


def test_an_error_without_a_report_names_no_older_one(tmp_path: Path) -> None:
    for errors in run_ranks(fails_again_without_a_report, 2, tmp_path):
        assert errors[0] == "exit code 0"
        assert all("what every rank" not in error for error in errors), errors


def fails_by_itself(c: Communicator, folder: Path) -> str:
    os.environ["SINGA_LITE_LOG_DIR"] = str(folder)
    c.barrier()
    if c.rank == 1:
        c.abort("ValueError: the loss is NaN")
        return ""
    with pytest.raises(CommError) as caught:
        c.barrier()
    return str(caught.value)


def test_an_error_of_the_users_own_needs_no_report(tmp_path: Path) -> None:
    results = run_ranks(fails_by_itself, 3, tmp_path)
    assert all("the loss is NaN" in results[rank] for rank in (0, 2))
    assert list(tmp_path.iterdir()) == []


def dies(c: Communicator, folder: Path) -> str:
    os.environ["SINGA_LITE_LOG_DIR"] = str(folder)
    c.all_reduce(np.full(3, float(c.rank)), "min", name="last").wait()
    if c.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError) as caught:
        c.all_reduce(np.zeros(3), "sum", name="next").wait()
    return str(caught.value)


def test_a_dead_rank_is_shown_where_it_was(tmp_path: Path) -> None:
    run_ranks(dies, 3, tmp_path, return_exceptions=True)
    (path,) = tmp_path.iterdir()
    assert re.search(
        r"rank 1 \(process \d+, ended\): after #0 of the world, .*'last' min float64\[3\]", path.read_text()
    )


def fails_in_a_group(c: Communicator, folder: Path) -> str:
    os.environ["SINGA_LITE_LOG_DIR"] = str(folder)
    group = c.new_group([2, 0], name="pair")
    if group is None:
        (folder / "outside").touch()
        wait_until(lambda: list(folder.glob("done-*")) != [], "the report")
        return ""
    wait_until((folder / "outside").exists, "rank 1 to leave new_group")
    with pytest.raises(CommError) as caught:
        if c.rank == 0:
            group.all_reduce(np.zeros(2), "sum", name="in pair").wait()
        group.all_gather(np.zeros(2), name="another").wait()
    (folder / f"done-{c.rank}").touch()
    return str(caught.value)


def test_a_group_is_reported_with_the_ranks_of_the_world(tmp_path: Path) -> None:
    run_ranks(fails_in_a_group, 3, tmp_path)
    (path,) = tmp_path.glob("flight-record-*")
    report = path.read_text()
    assert "First call where ranks differ: #0 of the group 'pair' of rank 2, 0" in report
    assert "rank 2: all_gather 'another'" in report and "rank 0: all_reduce 'in pair'" in report
    assert re.search(r"rank 1 \(process \d+, \w+\): after #\d+ of the world", report)


# ---- what is recorded ----------------------------------------------------------------------------------


def record_of(c: Communicator) -> FlightRecord:
    assert c.flight_recorder is not None
    return c.flight_recorder.read()


def call_often(c: Communicator) -> FlightRecord:
    for number in range(70):
        array = np.full((2, 1, 1, 1, 3), float(c.rank), np.float32)
        c.all_reduce(array, "sum", name=f"step {number % 2}").wait()
    work = c.all_reduce(np.zeros(2, np.int64), "max", name="x" * 200)
    c.barrier()
    work.wait()
    return record_of(c)


def test_the_last_64_calls_are_kept_with_state_and_times() -> None:
    for record in run_ranks(call_often, 3):
        assert [rank.rank for rank in record.ranks] == [0, 1, 2]
        for rank in record.ranks:
            assert rank.num_calls == 72 and [call.number for call in rank.calls] == list(range(8, 72))
            call = rank.calls[0]
            assert (call.kind, call.op, call.dtype, call.name) == ("all_reduce", "sum", "float32", "step 0")
            assert call.shape == (2, 1, 1, 1) and call.has_more_axes and call.count == 6
            assert call.file.endswith(str(HERE)[-80:])
            assert rank.calls[-2].name == "x" * 96 + "..." and rank.calls[-2].shape == (2,)
            for call in rank.calls[:-2]:
                assert call.state == ENDED and 0 < call.called <= call.all_there <= call.ended


def call_and_look(c: Communicator) -> tuple[int, int]:
    c.barrier()
    assert c.flight_recorder is not None
    if c.rank == 2:
        time.sleep(0.2)
    work = c.all_reduce(np.zeros(3_000_000), "sum", name="large")
    if c.rank == 0:
        before = record_of(c).ranks[0].calls[-1].state
        work.wait()
        return before, record_of(c).ranks[0].calls[-1].state
    work.wait()
    return STARTED, ENDED


def test_a_collective_in_flight_has_started() -> None:
    before, after = run_ranks(call_and_look, 3)[0]
    assert before in (STARTED, ALL_THERE) and after == ENDED


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = layer.Linear(3)

    def forward(self, x):
        return self.linear(x)

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, y)
        self.optimizer(loss)  # the step
        return out, loss


def train(c: Communicator) -> list[tuple[int, list[tuple[str, int]]]]:
    rng = np.random.default_rng(c.rank)
    x = tensor.from_numpy(rng.standard_normal((4, 5)).astype(np.float32))
    y = tensor.from_numpy(rng.integers(0, 3, 4).astype(np.int32))
    net = Net()
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1), communicator=c))
    net.compile([x], is_train=True, use_graph=True)
    seen = []
    for _ in range(4):
        net(x, y)
        rank = record_of(c).ranks[c.rank]
        seen.append((rank.num_calls, [(call.kind, call.line) for call in rank.calls]))
    net(x, y)
    seen.append((record_of(c).ranks[c.rank].num_calls, []))
    return seen


def test_a_replayed_step_adds_calls_with_the_line_that_recorded_them() -> None:
    for seen in run_ranks(train, 3):
        counts = [count for count, _ in seen]
        per_step = counts[-1] - counts[-2]
        assert per_step > 0 and counts[2] - counts[1] == counts[3] - counts[2] == per_step
        assert {line for _, line in seen[3][1][-per_step:]} == {line_of("the step")}


def test_the_first_line_of_a_kind_and_name_is_kept() -> None:
    sites = CallSites()
    found = [
        sites.find("reduce", "a"),  # first
        sites.find("reduce", "a"),
        sites.find("broadcast", "a"),  # another
    ]
    first, another = line_of("first"), line_of("another")
    assert found == [(str(HERE), first), (str(HERE), first), (str(HERE), another)]


def record_nothing(c: Communicator) -> tuple[bool, str]:
    os.environ["SINGA_LITE_FLIGHT_RECORDER"] = "off"
    group = c.new_group([0, 1, 2])
    assert group is not None
    work = group.all_reduce(np.zeros(2), "sum", name="a" * (c.rank + 1))
    with pytest.raises(CommError) as caught:
        work.wait()
    return group.flight_recorder is None, str(caught.value)


def test_the_recorder_can_be_switched_off() -> None:
    results = run_ranks(record_nothing, 3)
    assert all(is_off and "disagree" in text and "doing" not in text for is_off, text in results)


def test_a_switch_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in {"": True, "on": True, "1": True, "off": False, "0": False}.items():
        monkeypatch.setenv("SINGA_LITE_FLIGHT_RECORDER", value)
        assert is_recording() == expected
    monkeypatch.setenv("SINGA_LITE_FLIGHT_RECORDER", "OFF")
    with pytest.raises(OptionError, match="SINGA_LITE_FLIGHT_RECORDER=OFF: expected on or off"):
        is_recording()


# ---- comparing records ---------------------------------------------------------------------------------


def call(number: int, name: str = "a", state: int = ENDED) -> Call:
    return Call(
        number,
        "all_reduce",
        "sum",
        "float32",
        "",
        0,
        3,
        name,
        hash(name),
        (3,),
        False,
        "t.py",
        7,
        state,
        1,
        1,
        1,
    )


def rank_with(rank: int, *names: str, start: int = 0, state: int = ENDED) -> RankRecord:
    calls = tuple(call(start + number, name, state) for number, name in enumerate(names))
    return RankRecord(rank, 100 + rank, 0.5, start + len(names), calls)


@pytest.mark.parametrize(
    ("ranks", "number", "calls", "missing"),
    [
        ([["a", "b"], ["a", "b"], ["a", "b"]], None, [], []),
        ([["a", "b"], ["a"], ["a", "b"]], 1, [[0, 2]], [1]),
        ([["a", "b", "c"], ["a", "x"], ["a", "b"]], 1, [[0, 2], [1]], []),
        ([["a", "b"], ["a", "b", "c"], []], 0, [[0, 1]], [2]),
        ([["a", "b"], ["x", "b"], ["a"]], 0, [[0, 2], [1]], []),
    ],
)
def test_the_first_difference_is_found(ranks, number, calls, missing) -> None:
    record = FlightRecord("id", "world", tuple(rank_with(rank, *names) for rank, names in enumerate(ranks)))
    found = flight_report.first_difference(record)
    if number is None:
        assert found is None
        return
    assert found is not None and found.number == number
    assert [who for _, who in found.calls] == calls
    assert [rank.rank for rank in found.missing] == missing


@pytest.mark.parametrize(
    ("ranks", "failed", "late"),
    [
        ([rank_with(0, "a", "b"), rank_with(1, "a")], "id", [101]),
        ([rank_with(0, "a"), rank_with(1, "a"), rank_with(2, "a", state=STARTED)], "id", [102]),
        ([rank_with(0, "a"), rank_with(1, "a"), rank_with(2, "a", state=STARTED)], "another", []),
        ([rank_with(0, "a", state=FAILED), rank_with(1, "a", state=ALL_THERE)], "id", [101]),
        ([rank_with(0, "a", state=FAILED), rank_with(1, "a", "b", state=ALL_THERE)], "id", [100, 101]),
        ([rank_with(0, "a", state=FAILED), rank_with(1, "b", state=ALL_THERE)], "id", []),
    ],
)
def test_late_are_ranks_without_the_call_or_where_all_have_it_in_it(ranks, failed, late) -> None:
    assert flight_report.late_pids([FlightRecord("id", "world", tuple(ranks))], failed) == late


def test_a_call_of_long_ago_is_called_unknown() -> None:
    record = FlightRecord("id", "world", (rank_with(0, "a", "b", start=90), rank_with(1, "a", start=3)))
    found = flight_report.first_difference(record)
    assert found is not None and found.number == 4 and found.unknown == [0]


def test_parts_of_one_communicator_are_joined() -> None:
    mine = FlightRecord("id", "world", (rank_with(0, "a"), RankRecord(1, 101)))
    theirs = FlightRecord("id", "world", (RankRecord(0, 100), rank_with(1, "a", "b")))
    other = FlightRecord("id2", "group", (rank_with(0),))
    joined = flight_record.merge([mine, other, theirs])
    assert joined == [FlightRecord("id", "world", (rank_with(0, "a"), rank_with(1, "a", "b"))), other]


def test_the_title_of_a_group_is_escaped_and_cut() -> None:
    assert title_of([2, 0], "a\n") == r"group 'a\n' of rank 2, 0"
    title = title_of([2, 0], "é" * 200, flight_record.GPU_TITLE)
    assert len(title.encode()) <= 108 and title.endswith("é..." + flight_record.GPU_TITLE)


def test_a_text_for_the_user_is_written_at_once_and_whole(capfd: pytest.CaptureFixture[str]) -> None:
    text = "a line of \udcff\n" * 10_000
    tell(text)
    assert capfd.readouterr().err == text.replace("\udcff", "\\udcff")
    sys.stderr, before = io.StringIO(), sys.stderr
    try:
        tell("into an object")
        assert sys.stderr.getvalue() == "into an object"
    finally:
        sys.stderr = before


ODD_PATH = """
import numpy as np
from singa_lite.comm.rendezvous import process_communicator
c = process_communicator()
c.all_reduce(np.ones(3, np.float32), "sum", name="grad").wait()
"""


def test_a_script_whose_path_is_not_utf_8_communicates(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"odd \xff '\n")
    folder.mkdir()
    result = run_command(launch_command(write_script(folder, ODD_PATH), 2))
    assert (result.returncode, result.stderr) == (0, "")


# ---- stacks --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``code``; it and what it has forked are killed afterwards."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_process_without_a_file_for_stacks_gets_no_signal() -> None:
    with running("import time; time.sleep(600)") as process:
        assert stacks.stacks_of([process.pid])[process.pid].startswith("none: ")
        assert process.poll() is None


KEEPS_HANDLER = """
import os, signal, sys
from singa_lite.comm import stacks
from singa_lite.comm.flight_signals import report_at_sigquit
signal.signal(stacks.SIGNAL, lambda *_: print("mine", flush=True))
signal.signal(signal.SIGQUIT, lambda *_: print("quit", flush=True))
stacks.write_stacks()
report_at_sigquit()
os.kill(os.getpid(), stacks.SIGNAL)
os.kill(os.getpid(), signal.SIGQUIT)
"""


def test_handlers_of_the_program_stay() -> None:
    result = run_command([sys.executable, "-c", KEEPS_HANDLER])
    assert (result.returncode, result.stdout.split(), result.stderr) == (0, ["mine", "quit"], "")


FORKS = """
import os, time
from singa_lite.comm import stacks
stacks.write_stacks()
is_child = os.fork() == 0
stacks.write_stacks()
os.write(1, b"%d\\n" % os.getpid())  # in one piece
def child():
    time.sleep(600)
def parent():
    time.sleep(600)
child() if is_child else parent()
"""


def test_a_forked_child_writes_stacks_into_its_own_file() -> None:
    with running(FORKS) as process:
        assert process.stdout
        pids = {int(process.stdout.readline()) for _ in range(2)}
        (child,) = pids - {process.pid}
        wait_until(lambda: "in child" in stacks.stacks_of([child])[child], "the child's stack")
        wait_until(lambda: "in parent" in stacks.stacks_of([process.pid])[process.pid], "the parent's stack")
        both = stacks.stacks_of(pids)
        assert "in parent" not in both[child] and "in child" not in both[process.pid]


RUNS_BESIDE = """
import sys, threading
from singa_lite.comm import stacks
stacks.write_stacks()
def deep(n):
    return n and deep(n - 1)
def work():
    number = 0
    while True:
        number += 1
        deep(37 * number % 300)
        exec("def shallow(n):\\n    return n and shallow(n - 1)\\nshallow(30)", {})
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
def wait():
    threading.Event().wait(600)
wait()
"""


def test_a_process_whose_other_threads_run_is_asked_unharmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "ANSWER_S", LIMIT_S)
    with running(RUNS_BESIDE) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        wait_until(lambda: "in wait" in stacks.stacks_of([process.pid])[process.pid], "the stack")
        for _ in range(200):
            assert "in wait" in stacks.stacks_of([process.pid])[process.pid]
        assert process.poll() is None


KEEPS_ERRNO = """
import ctypes
from singa_lite.comm import stacks
stacks.write_stacks()
libc = ctypes.PyDLL(None)
libc.__errno_location.restype = ctypes.POINTER(ctypes.c_int)
errno = libc.__errno_location()
errno[0] = 5
libc["raise"](int(stacks.SIGNAL))
print(errno[0])
"""


def test_writing_stacks_keeps_the_error_of_a_system_call() -> None:
    result = run_command([sys.executable, "-c", KEEPS_ERRNO])
    assert (result.returncode, result.stdout, result.stderr) == (0, "5\n", "")


WRITES_SLOWLY = """
import os, signal, sys, time
from singa_lite import _native
from singa_lite.comm import stacks
native, _ = _native.load("_comm")
file = os.memfd_create(f"{stacks.NAME}-{os.getpid()}")
def write(*_):
    for piece in (b"end of an older one", native.STACKS_END, native.STACKS_BEGIN, b"first\\n", b"last\\n"):
        os.write(file, piece)
        time.sleep(.1)
    if sys.argv[1] == "end":
        os.write(file, native.STACKS_END)
signal.signal(stacks.SIGNAL, write)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("end", "limit_s", "text"),
    [("end", LIMIT_S, "first\nlast"), ("no end", 3, "first\nlast\nand more that did not come in time")],
)
def test_stacks_are_waited_for_to_their_end(
    end: str, limit_s: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "ANSWER_S", limit_s)
    with running(WRITES_SLOWLY, end) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        assert stacks.stacks_of([process.pid]) == {process.pid: text}


# ---- a running job -------------------------------------------------------------------------------------

RUNS = """
import os, sys, time
from pathlib import Path
import numpy as np
from singa_lite.comm.rendezvous import process_communicator
folder = Path(__file__).parent
c = process_communicator()
for number in range(1_000_000):
    done = c.all_gather_object((folder / "end").exists(), name=f"look {number % 3}")
    if number == 0:  # from now on the latest call of this rank is one of these
        (folder / f"part-{c.rank}").write_text(str(os.getpid()))
        (folder / f"part-{c.rank}").rename(folder / f"pid-{c.rank}")
    if done[0]:
        break
    time.sleep(0.02)
"""


@contextlib.contextmanager
def running_job(command: list[str], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A launcher of three ranks that communicate, and the ranks' processes; they end well afterwards."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=fresh_environment()
    ) as launcher:
        try:
            files = [tmp_path / f"pid-{rank}" for rank in range(3)]
            wait_until(lambda: all(file.exists() for file in files), "the start of all ranks")
            yield launcher, [int(file.read_text()) for file in files]
            (tmp_path / "end").touch()
            launcher.communicate(timeout=LIMIT_S)
            assert launcher.returncode == 0
        finally:
            launcher.kill()
    assert_nothing_left(tmp_path)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """See ``running_job``."""
    with running_job(launch_command(write_script(tmp_path, RUNS), 3), tmp_path) as started:
        yield started


@pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi works")
def test_a_job_of_mpiexec_is_inspected(tmp_path: Path) -> None:
    command = [str(_mpiexec()), "-n", "3", sys.executable, str(write_script(tmp_path, RUNS))]
    with running_job(command, tmp_path) as (launcher, pids):
        for pid in (launcher.pid, pids[1]):
            report = inspect_job(pid)
            for rank in range(3):
                assert re.search(rf"rank {rank} \(process {pids[rank]}, .*all_gather 'look \d'", report)
                stack = report.split(f"Python stack of rank {rank}:")[1].split("rank ")[0]
                assert re.search(r"script\.py\", line \d+ in <module>", stack)


def test_a_job_is_inspected_by_a_rank_or_its_launcher(job) -> None:
    launcher, pids = job
    for pid in (launcher.pid, pids[2]):
        result = run_command([sys.executable, "-m", "singa_lite", "inspect", str(pid), "--calls", "2"])
        assert result.returncode == 0, result.stderr
        for rank in range(3):
            assert f"rank {rank} (process {pids[rank]}, " in result.stdout
            stack = result.stdout.split(f"Python stack of rank {rank}:")[1].split("rank ")[0]
            assert re.search(r"script\.py\", line \d+ in <module>", stack)
            assert f"Last calls of rank {rank} in the world" in result.stdout
        assert re.search(r"#\d+ all_gather 'look \d' uint8\[\d+\] at .*script\.py:9", result.stdout)


def test_sigquit_to_the_launcher_or_a_rank_gives_a_report_and_all_go_on(job) -> None:
    launcher, pids = job
    for pid, beginning in ((launcher.pid, "singa-lite run: "), (pids[1], "[1] ")):
        os.kill(pid, signal.SIGQUIT)
        line = next(line for line in launcher.stderr if "What every rank was doing" in line)
        assert line.startswith(beginning)
        text = "".join(launcher.stderr.readline() for _ in range(15))
        assert f"rank 1 (process {pids[1]}, " in text


STARTS_TWO_JOBS = """
import os, sys, time
from singa_lite.comm.base import World
from singa_lite.comm.shm import ShmCommunicator
for job in range(2):
    for rank in range(2):
        if os.fork() == 0:
            c = ShmCommunicator(World(rank, 2, rank, 2, f"{sys.argv[1]}{job}", "shm"), float(sys.argv[2]))
            c.barrier(name=f"job {job}")
            os.write(1, b"%d %d %d\\n" % (job, rank, os.getpid()))  # in one piece
            time.sleep(600)
time.sleep(600)
"""


def test_jobs_of_one_parent_are_apart() -> None:
    with running(STARTS_TWO_JOBS, f"test{secrets.token_hex(8)}", str(LIMIT_S)) as process:
        assert process.stdout
        started = [map(int, process.stdout.readline().split()) for _ in range(4)]
        report = inspect_job(process.pid)
        assert report.startswith(f"Process {process.pid} has started 2 jobs.\n")
        reports = report.split("What every rank was doing, ")[1:]
        for job, rank, pid in started:
            (mine,) = [each for each in reports if f"'job {job}'" in each]
            assert len(re.findall(rf"rank {rank} \(process {pid}, ", mine)) == 1
            other = inspect_job(pid)
            assert f"'job {job}'" in other and f"'job {1 - job}'" not in other


def test_what_is_no_job_cannot_be_inspected() -> None:
    for pid, text in (
        (0, "there is no process 0"),
        (2**30, "there is no process"),
        (os.getpid(), "neither process"),
    ):
        with pytest.raises(CommError, match=text):
            inspect_job(pid)
    result = run_command([sys.executable, "-m", "singa_lite", "inspect", "1", "--calls", "0"])
    assert result.returncode == 2 and "--calls 0: must be >= 1" in result.stderr
    result = run_command([sys.executable, "-m", "singa_lite", "inspect", str(2**30)])
    assert result.returncode == 1 and "there is no process" in result.stderr


# ---- damaged records -----------------------------------------------------------------------------------

FLIGHT = (0x464C494748540001).to_bytes(8, sys.byteorder)  # kFlightMagic of native/comm/flight_recorder.cc


def test_random_bytes_in_a_running_jobs_record_do_no_harm(job) -> None:
    _, pids = job
    path = next(
        path
        for path in flight_record.files_of(pids[0], flight_record.SEGMENT)
        if FLIGHT in Path(path).read_bytes()
    )
    whole = Path(path).read_bytes()
    start = whole.index(FLIGHT)
    rng = np.random.default_rng(0)
    texts = []
    with open(path, "r+b", buffering=0) as file:
        for _ in range(30):
            # its rank entries and calls; sometimes its header
            at = int(rng.integers(0 if rng.random() < 0.2 else 384, len(whole) - start - 3000))
            file.seek(start + at)
            file.write(rng.bytes(int(rng.integers(1, 3000))))
            try:
                texts.append(inspect_job(pids[1]))
            except CommError as error:
                texts.append(f"CommError: {error}")
            file.seek(start)
            file.write(whole[start : start + 384 + 3 * 64])
    assert all(text.startswith(("What every rank was doing", "CommError: inspect:")) for text in texts)


def test_reading_random_bytes_is_an_error_or_a_record() -> None:
    native: Any = _native.load("_comm")[0]
    communicator = ShmCommunicator(World(0, 1, 0, 1, f"test{secrets.token_hex(8)}", "shm"), LIMIT_S)
    for _ in range(70):
        communicator.all_reduce(np.zeros((3, 2)), "sum", name="x").wait()
    (path,) = [
        path
        for path in flight_record.files_of(os.getpid(), flight_record.SEGMENT)
        if communicator.world.rendezvous_id in os.readlink(path)
    ]
    whole = Path(path).read_bytes()
    communicator.close()
    start = whole.index(FLIGHT)
    rng, kinds = np.random.default_rng(1), set()
    for number in range(2000):
        damaged = bytearray(whole[start:])
        for _ in range(int(rng.integers(1, 20))):
            at = int(rng.integers(0, len(damaged)))
            damaged[at : at + int(rng.integers(1, 40))] = rng.bytes(int(rng.integers(1, 40)))
        if number % 10 == 0:
            del damaged[int(rng.integers(0, len(damaged))) :]
        try:
            record = flight_record.record_of(native.read_flight(bytes(damaged)))
            flight_report.report_text([record], "", {}, {}, time.monotonic(), 64)
            kinds.add("record")
        except CommError:
            kinds.add("error")
    assert kinds == {"record", "error"}
