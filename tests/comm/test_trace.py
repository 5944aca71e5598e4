# SPDX-License-Identifier: Apache-2.0
"""`singa-lite run --trace`: what ranks did, on one time line, also after a failure and from several hosts."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from singa_lite import cli
from singa_lite.comm.chrome_trace import COMPUTE, EXCHANGE, WAIT, WIRE, chrome_trace
from singa_lite.comm.clock_offset import Offset, measure_offset, offset_at, pairs_with_rank_0
from singa_lite.comm.trace_file import join_trace, parts_folder, tracing
from singa_lite.comm.trace_part import Part, read_part
from singa_lite.errors import CommError, OptionError
from singa_lite.graph import trace as trace_module
from singa_lite.graph.clock import Span, Waited
from singa_lite.graph.trace import TraceWriter
from tests.comm.processes import run_command
from tests.ranks import run_ranks

TRAIN = """
import os, signal, sys
import numpy as np
from singa_lite import layer, model, opt, tensor
from singa_lite.errors import ShapeError

class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.loss = layer.Linear(300), layer.Linear(10), layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.second(self.first(x))

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss)
        return out, loss

option, graph, end = sys.argv[1:]
sgd = opt.SGD(0.01, momentum=0.9)
dist = opt.DistOpt(sgd, dist_option=option) if option != "none" else sgd
rank = dist.global_rank if option != "none" else 0
net = Net()
net.set_optimizer(dist)
rng = np.random.default_rng(rank)
x = tensor.from_numpy(rng.standard_normal((32, 200)).astype(np.float32))
y = tensor.from_numpy(rng.integers(0, 10, 32).astype(np.int32))
net.compile([x], use_graph=graph == "graph")
if end == "retry" and rank == 0:
    try:
        net(x, tensor.from_numpy(np.zeros(31, np.int32)))
    except ShapeError:
        pass
for step in range(6):
    if step == 4 and rank == 1 and end == "kill" and os.environ["SINGA_LITE_RESTART"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 4 and rank == 1 and end == "raise":
        raise ValueError("a bad batch")
    net(x, y)
"""


def traced(
    folder: Path, *arguments: str, ranks: int = 3, options: tuple[str, ...] = ()
) -> tuple[dict, subprocess.CompletedProcess[str]]:
    """Return the trace of a run of TRAIN, and how the run ended."""
    script, out = folder / "train.py", folder / "out.json"
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "singa_lite", "run", "-n", str(ranks), "--trace", str(out), *options]
    ended = subprocess.run([*command, str(script), *arguments], capture_output=True, text=True, timeout=120)
    assert not parts_folder(out).exists()
    return json.loads(out.read_bytes()), ended


def complete(trace: dict, rank: int, thread: int | None = None) -> list[dict]:
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["pid"] == rank and thread in (None, event["tid"])
    ]


@pytest.mark.parametrize(("option", "graph"), [("fp32", "eager"), ("sparseTopK:0.1", "graph")])
def test_a_trace_has_what_every_rank_did_in_every_step(tmp_path, option, graph):
    trace, ended = traced(tmp_path, option, graph, "well")
    assert ended.returncode == 0, ended.stderr
    for rank in range(3):
        host = [event for thread in (COMPUTE, EXCHANGE, WAIT) for event in complete(trace, rank, thread)]
        assert {"forward", "backward", "update", "compress", "wait"} <= {event["name"] for event in host}
        assert {event["args"]["step"] for event in host} == set(range(1, 7))
        of_step = defaultdict(list)
        for event in host:
            of_step[event["args"]["step"]].append(event)
        for events in of_step.values():  # without holes, one thing at a time
            events.sort(key=lambda event: event["ts"])
            assert next(event["name"] for event in events if event["tid"] == COMPUTE) == "forward"
            for one, other in itertools.pairwise(events):
                assert other["ts"] == pytest.approx(one["ts"] + one["dur"], abs=0.01)
    wires = [complete(trace, rank, WIRE) for rank in range(3)]
    sent = [[event["args"]["bytes_sent"] for event in wire if "waits" not in event["name"]] for wire in wires]
    assert sent[0] == sent[1] == sent[2] and min(sent[0]) > 0
    assert all("layers" in event["args"]["of"] or "first" in event["args"]["of"] for event in wires[0][-2:])


def test_arrows_go_from_the_message_over_the_wire_to_the_gradients(tmp_path):
    trace, _ = traced(tmp_path, "fp16", "eager", "well", ranks=2)
    arrows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    assert arrows
    for start, over, end in arrows.values():
        assert (start["ph"], over["ph"], end["ph"]) == ("s", "t", "f")
        assert start["ts"] <= over["ts"] <= end["ts"] and over["tid"] >= WIRE
        for arrow in (start, over, end):  # each end is within an event, or a viewer does not show it
            around = complete(trace, arrow["pid"], arrow["tid"])
            assert any(e["ts"] - 0.01 <= arrow["ts"] <= e["ts"] + e["dur"] + 0.01 for e in around), arrow


def test_ranks_agree_on_who_was_last_though_one_has_a_step_more(tmp_path):
    trace, ended = traced(tmp_path, "fp32", "eager", "retry", ranks=2)
    assert ended.returncode == 0, ended.stderr
    steps = [{event["args"]["step"] for event in complete(trace, rank)} for rank in range(2)]
    assert steps == [set(range(1, 8)), set(range(1, 7))]
    wires = [
        [event for event in complete(trace, rank, WIRE) if "waits" not in event["name"]] for rank in (0, 1)
    ]
    last = [
        [event["args"]["last_rank"] for event in sorted(wire, key=lambda event: event["ts"])]
        for wire in wires
    ]
    assert last[0] == last[1] and len(last[0]) >= 6


@pytest.mark.parametrize(("end", "code"), [("kill", 128 + signal.SIGKILL), ("raise", 1)])
def test_a_failed_job_leaves_its_trace(tmp_path, end, code):
    trace, ended = traced(tmp_path, "fp32", "eager", end)
    assert ended.returncode == code
    steps = [{event["args"]["step"] for event in complete(trace, rank)} for rank in range(3)]
    assert set(range(1, 5)) <= steps[1]
    assert steps[0] == steps[2] == set(range(1, 6))  # with the step in which they lost rank 1
    assert "unfinished" in {event["name"] for event in complete(trace, 0) if event["args"]["step"] == 5}
    assert "trace of 3 processes" in ended.stderr


def test_a_restarted_job_has_the_ranks_of_each_round(tmp_path):
    trace, ended = traced(tmp_path, "fp32", "eager", "kill", ranks=2, options=("--max-restarts", "1"))
    assert ended.returncode == 0, ended.stderr
    names = {
        event["args"]["name"]: event["pid"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    host = os.uname().nodename
    rounds = [[f"rank {rank} on {host}{round}" for rank in range(2)] for round in ("", ", restart 1")]
    assert set(names) == {*rounds[0], *rounds[1]}
    for ranks, steps in zip(rounds, (4, 6), strict=True):
        events = [event for name in ranks for event in complete(trace, names[name])]
        assert {event["args"]["last_rank"] for event in events if "last_rank" in event["args"]} <= {0, 1}
        assert {event["args"]["step"] for event in complete(trace, names[ranks[1]])} == set(
            range(1, steps + 1)
        )


def test_one_process_without_a_world_has_a_trace(tmp_path):
    trace, ended = traced(tmp_path, "none", "graph", "well", ranks=1)
    assert ended.returncode == 0, ended.stderr
    names = [event["name"] for event in complete(trace, 0)]
    assert [names.count(name) for name in ("forward", "backward", "update")] == [6, 6, 6]


# ---- parts ---------------------------------------------------------------------------------------------


def part(rank: int, spans: list[Span], waited: list[Waited], **facts) -> Part:
    return Part(rank=rank, host="host", steps=[(1, 0, spans, waited)], **facts)


def test_the_last_rank_is_named_and_waited_for():
    def of(rank: int, posted: float) -> Part:
        times = (posted, 7.0, 9.0)
        return part(
            rank,
            [
                Span("compress", "a", 1.0, 8.0),
                Span("wait", "a", 8.0, 9.0),
                Span("decompress", "a", 9.0, 10.0),
            ],
            [Waited("a", "all_reduce", 24, times, 8.0, 9.0)],
        )

    trace = chrome_trace({0: of(0, 5.0), 1: of(1, 7.0), 2: of(2, 6.0)})
    waits = {rank: [event["name"] for event in complete(trace, rank, WIRE)] for rank in range(3)}
    assert waits == {
        0: ["waits for rank 1", "all_reduce"],
        1: ["all_reduce"],
        2: ["waits for rank 1", "all_reduce"],
    }
    first, second = complete(trace, 0, WIRE)
    assert (first["ts"], first["dur"]) == (4e6, 2e6)  # times begin with the first span
    assert (second["ts"], second["dur"]) == (6e6, 2e6)
    assert second["args"] == {
        "step": 1, "of": "a", "bytes_sent": 24, "kind": "all_reduce", "last_rank": 1
    }  # fmt: skip


@pytest.mark.parametrize(
    ("of_rank_1", "there", "last"),
    [
        ([1, 2], 7.0, 2),
        ([1], 7.0, 2),  # rank 2 called when all were there, as ranks of one host know exactly
        ([1], 8.0, None),  # rank 1 may have, and was killed before it wrote the step
        ([1, 2], 8.0, 2),  # as over MPI, where a rank knows when it has got the others' messages
    ],
)
def test_a_rank_that_was_killed_in_its_step_may_have_been_the_last(of_rank_1, there, last):
    def of(rank: int, numbers: list[int], posted: float) -> Part:
        spans = [Span("wait", "a", 1.0, 9.0)]
        waited = [Waited("a", "all_reduce", 24, (posted, there, 9.0), 8.0, 9.0)]
        steps = [(number, 0, spans, waited if number == 2 else []) for number in numbers]
        return Part(rank=rank, host="host", steps=steps)

    trace = chrome_trace({0: of(0, [1, 2], 5.0), 1: of(1, of_rank_1, 0.0), 2: of(2, [1, 2], 7.0)})
    first, second = complete(trace, 0, WIRE)
    assert first["name"] == ("waits for another rank" if last is None else f"waits for rank {last}")
    assert first["args"].get("last_rank") == second["args"].get("last_rank") == last


def one_step(step: int, posted: float, there: float, **facts) -> tuple[int, int, list[Span], list[Waited]]:
    waited = Waited("a", "all_reduce", 24, (posted, there, there + 1.0), posted, there + 1.0, **facts)
    return (step, 0, [Span("wait", "a", posted, there + 1.0)], [waited])


def last_ranks(trace: dict, rank: int) -> list[int | None]:
    events = [event for event in complete(trace, rank, WIRE) if "waits" not in event["name"]]
    return [event["args"].get("last_rank") for event in events]


def test_a_rank_with_a_step_of_its_own_does_not_change_who_was_last():
    alone = (1, 0, [Span("forward", "", 0.0, 0.5), Span("unfinished", "", 0.5, 0.6)], [])
    zero = Part(rank=0, host="host", steps=[alone, one_step(2, 1.0, 2.5), one_step(3, 4.0, 4.5, number=1)])
    one = Part(rank=1, host="host", steps=[one_step(1, 2.0, 2.5), one_step(2, 3.5, 4.5, number=1)])
    trace = chrome_trace({0: zero, 1: one})
    assert last_ranks(trace, 0) == last_ranks(trace, 1) == [1, 0]
    assert [event["name"] for event in complete(trace, 0, WIRE)] == [
        "waits for rank 1",
        "all_reduce",
        "all_reduce",
    ]
    assert {event["args"]["step"] for event in complete(trace, 0, WIRE)} == {2, 3}


def test_who_was_last_is_not_known_where_the_part_of_another_rank_is_cut():
    zero = Part(rank=0, host="host", steps=[one_step(2, 1.0, 2.5)], is_cut=True)
    one = Part(rank=1, host="host", steps=[one_step(1, 2.0, 2.5), one_step(2, 3.5, 4.5, number=1)])
    assert last_ranks(chrome_trace({0: zero, 1: one}), 1) == [1, None]


def test_groups_with_collectives_of_one_name_have_a_last_rank_each():
    def of(rank: int, posted: float, *members: int) -> Part:
        return Part(rank=rank, host="host", steps=[one_step(1, posted, max(members) + 2.5, members=members)])

    parts = {0: of(0, 1.0, 0, 2), 1: of(1, 5.0, 1, 3), 2: of(2, 4.0, 0, 2), 3: of(3, 2.0, 1, 3)}
    trace = chrome_trace(parts)
    assert [last_ranks(trace, rank) for rank in range(4)] == [[2], [1], [2], [1]]


def test_two_communicators_of_the_same_ranks_are_told_apart_by_their_order():
    zero = Part(rank=0, host="host", steps=[one_step(1, 1.0, 2.5), one_step(2, 4.0, 4.5)])
    one = Part(rank=1, host="host", steps=[one_step(1, 2.0, 2.5), one_step(2, 3.5, 4.5)])
    trace = chrome_trace({0: zero, 1: one})
    assert last_ranks(trace, 0) == last_ranks(trace, 1) == [1, 0]


def test_a_part_keeps_which_collective_of_which_ranks_it_was(tmp_path):
    _, _, spans, waited = one_step(1, 1.0, 2.5, number=7, members=(0, 2))
    writer = TraceWriter(tmp_path)
    writer.add_step(spans, waited)
    writer.close()
    [file] = tmp_path.iterdir()
    assert read_part(file.read_bytes().splitlines()).steps == [(1, 0, spans, waited)]


def test_collectives_that_overlap_are_on_several_wires():
    waited = [
        Waited(name, "all_reduce", 8, times, 8.0, 8.0)
        for name, times in [("a", (1.0, 1.0, 4.0)), ("b", (2.0, 2.0, 3.0)), ("c", (5.0, 5.0, 6.0))]
    ]
    trace = chrome_trace({0: part(0, [Span("wait", "", 0.0, 9.0)], waited)})
    assert [event["args"]["of"] for event in complete(trace, 0, WIRE)] == ["a", "c"]
    assert [event["args"]["of"] for event in complete(trace, 0, WIRE + 1)] == ["b"]


def test_times_of_other_hosts_become_those_of_rank_0():
    offsets = {1: [Offset(0.0, 100.0, 1e-3), Offset(100.0, 102.0, 2e-3)]}
    zero = part(0, [Span("forward", "", 0.0, 1.0)], [], offsets=offsets)
    one = part(
        1,
        [Span("forward", "", 151.0, 153.0)],
        [Waited("a", "all_reduce", 8, (151.0, 151.0, 153.0), 152.0, 153.0)],
    )
    trace = chrome_trace({0: zero, 1: one})
    [event] = complete(trace, 1, COMPUTE)
    assert event["ts"] / 1e6 == pytest.approx(50.0)  # rank 0's clock was at 50 when rank 1's was at 151
    [wire] = complete(trace, 1, WIRE)
    assert wire["ts"] == event["ts"]
    assert trace["metadata"]["clocks minus rank 0's"] == {
        "rank 1": {"offset_s": [100.0, 102.0], "error_s": 2e-3}
    }


def test_an_offset_between_two_measurements_is_on_the_line():
    offsets = [Offset(10.0, 5.0, 0.0), Offset(20.0, 6.0, 0.0)]  # the rank's clock was at 15 and at 26
    assert [offset_at(offsets, now) for now in (0.0, 15.0, 20.5, 26.0, 99.0)] == [5.0, 5.0, 5.5, 6.0, 6.0]
    booted = [Offset(10.0, -1e6, 0.0), Offset(20.0, -1e6 + 0.01, 0.0)]
    assert offset_at(booted, -1e6 + 15.005) == pytest.approx(-1e6 + 0.005, abs=1e-4)


def test_a_part_that_a_kill_has_cut_keeps_its_whole_lines():
    step = {"step": 1, "thread": 0, "spans": [["forward", "", 1.0, 2.0]], "waited": []}
    lines = [json.dumps(line) for line in ({"pid": 7, "rank": None}, {"rank": 2, "host": "h"}, step)]
    found = read_part([line.encode() for line in [*lines, '{"step": 2, "thr']])
    assert (found.rank, found.host, len(found.steps)) == (2, "h", 1)


@pytest.mark.parametrize(
    "line",
    ["1", "[]", '{"step": 1, "thr', '{"step": 1}', '{"rank": 1e999}', '{"pid": "x"}', "[" * 100000,
     '{"step": 1, "thread": 0, "spans": [["forward", "", NaN, 2.0]], "waited": []}',
     '{"step": 1, "thread": 0, "spans": [], "waited": [["w", "all_reduce", 4, 0, 1.0, 2.0, 0, []]]}',
     '{"step": 1, "thread": 0, "spans": [], "waited": [["w", "all_reduce", 4, null, 1.0, 2.0, 0, [-1]]]}',
     '{"offset_of": 1, "offset": [1.0, "x", 0.0]}'],
)  # fmt: skip
def test_a_damaged_line_of_a_part_is_an_error_that_names_it(line, tmp_path):
    part = tmp_path / "a.trace-part"
    part.write_text(f'{{"rank": 1}}\n{line}\n{{"host": "h"}}\n')
    with pytest.raises(CommError, match=r"trace: line 2 of .*a\.trace-part is damaged"):
        join_trace(tmp_path, tmp_path / "out.json")
    assert part.exists() and not (tmp_path / "out.json").exists()


def test_a_long_run_is_cut_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trace_module, "MAX_STEPS", 3)
    with tracing(tmp_path / "out.json") as variables:
        writer = TraceWriter(Path(variables["SINGA_LITE_TRACE"]))
        for start in range(5):
            writer.add_step([Span("forward", "", float(start), start + 0.5)], [])
        writer.close()
        writer.add_step([], [])
    assert "of the first steps alone" in capsys.readouterr().err
    trace = json.loads((tmp_path / "out.json").read_bytes())
    assert trace["metadata"]["ranks with more steps than are here"] == [0]
    assert [event["args"]["step"] for event in complete(trace, 0)] == [1, 2, 3]


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to(Path("missing") / "out.json")
    names = ("", "missing/out.json", "fifo", "loop", "dangling")
    for path in (*(tmp_path / name for name in names), Path("/"), Path(os.devnull)):
        with pytest.raises(OptionError, match="--trace"), tracing(path):
            raise AssertionError("the run began")


def test_a_trace_may_be_a_symlink_to_a_new_file(tmp_path):
    (tmp_path / "link").symlink_to("out.json")
    with tracing(tmp_path / "link") as environ:
        TraceWriter(Path(environ["SINGA_LITE_TRACE"])).close()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "out.json").is_file()


def test_a_trace_that_another_job_writes_is_refused(tmp_path, capsys):
    with tracing(tmp_path / "out.json") as environ:
        writer = TraceWriter(Path(environ["SINGA_LITE_TRACE"]))
        writer.add_step([Span("forward", "", 1.0, 2.0)], [])
        with pytest.raises(OptionError, match="another job is writing it"), tracing(tmp_path / "out.json"):
            raise AssertionError("the run began")
        writer.close()
    assert "trace of 1 processes" in capsys.readouterr().err
    with tracing(tmp_path / "out.json"):
        pass


def test_a_trace_whose_folder_another_job_has_removed_meanwhile_is_refused(tmp_path, monkeypatch):
    def lock_late(handle: int) -> bool:
        folder = Path(os.readlink(f"/proc/self/fd/{handle}"))
        folder.rmdir()
        folder.mkdir()
        return True

    monkeypatch.setattr("singa_lite.comm.trace_file.try_lock", lock_late)
    with pytest.raises(OptionError, match="another job is writing it"), tracing(tmp_path / "out.json"):
        raise AssertionError("the run began")
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError), tracing(tmp_path / "out.json"):  # it holds no lock
        _ = 1 // 0


def test_parts_are_joined_by_a_command(tmp_path, capsys):
    writer = TraceWriter(tmp_path / "parts")
    writer.add_step([Span("forward", "", 1.0, 2.0)], [])
    writer.close()
    assert cli.main(["trace", str(tmp_path / "parts"), str(tmp_path / "out.json")]) == 0
    assert "trace of 1 processes" in capsys.readouterr().out
    [event] = complete(json.loads((tmp_path / "out.json").read_bytes()), 0)
    assert (event["name"], event["dur"]) == ("forward", 1e6)
    assert not (tmp_path / "parts").exists()
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", str(tmp_path / "parts"), str(tmp_path / "out.json")])
    assert "no process has written a part" in str(ended.value)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_parts_that_processes_still_write_are_left(tmp_path, capsys, end):
    parts, out = tmp_path / "parts", tmp_path / "out.json"
    ended = TraceWriter(parts)
    ended.add_step([Span("forward", "", 1.0, 2.0)], [])
    ended.close()
    (parts / f"{'0' * 16}{trace_module.SUFFIX}").touch()  # of a process that had no time
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        still = TraceWriter(parts)
        still.add_step([Span("forward", "", 2.0, 3.0)], [])
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        os.write(writer, b"1")
        signal.sigwait([signal.SIGUSR1])
        still.add_step([Span("backward", "", 3.0, 4.0)], [])
        still.close()
        os._exit(0)
    try:
        os.read(reader, 1)
        with pytest.raises(SystemExit) as refused:
            cli.main(["trace", str(parts), str(out)])
        message = f"{out}: 1 processes still write to {parts}: it has what 2 processes did so far, and all parts stay"
        assert message in str(refused.value)
        names = [event["name"] for event in json.loads(out.read_bytes())["traceEvents"] if event["ph"] == "X"]
        assert names.count("forward") == 2 and len(list(parts.iterdir())) == 3
    finally:
        os.kill(child, signal.SIGUSR1 if end == "close" else signal.SIGKILL)
    os.waitpid(child, 0)
    assert cli.main(["trace", str(parts), str(out)]) == 0
    assert "trace of 2 processes" in capsys.readouterr().out
    names = [event["name"] for event in json.loads(out.read_bytes())["traceEvents"] if event["ph"] == "X"]
    assert names.count("backward") == (end == "close") and not parts.exists()


def test_a_closed_part_is_not_written_though_a_forked_child_has_its_file(tmp_path):
    writer = TraceWriter(tmp_path / "parts")
    child = os.fork()
    if child == 0:
        signal.pause()
    writer.close()
    try:
        assert "trace of 1 processes" in join_trace(tmp_path / "parts", tmp_path / "out.json")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_path_that_the_output_cannot_encode_is_printed_with_escapes(tmp_path):
    TraceWriter(tmp_path / "parts").close()
    command = [sys.executable, "-m", "singa_lite", "trace", str(tmp_path / "parts"), str(tmp_path / "ü.json")]
    result = run_command(command, PYTHONIOENCODING="ascii")
    assert result.returncode == 0 and "\\xfc.json" in result.stdout, result.stderr


def test_parts_that_are_missing_are_an_error(tmp_path):
    with pytest.raises(CommError, match="no process has written a part"):
        join_trace(tmp_path, tmp_path / "out.json")


@pytest.mark.parametrize("is_empty_part", [False, True])
def test_a_job_that_ends_before_it_traces_leaves_an_older_trace_and_no_parts(tmp_path, capsys, is_empty_part):
    out = tmp_path / "out.json"
    out.write_text("older")
    with tracing(out) as variables:
        if is_empty_part:  # of a process that was killed before its first line
            (Path(variables["SINGA_LITE_TRACE"]) / f"0{trace_module.SUFFIX}").touch()
    said = capsys.readouterr().err
    assert "the job ended before a process began to trace" in said
    assert f"{out}, if it is there, is of an earlier run" in said
    assert out.read_text() == "older" and not parts_folder(out).exists()


def test_a_script_that_fails_at_its_top_leaves_no_parts(tmp_path):
    (tmp_path / "train.py").write_text("raise ValueError('at the top')")
    command = [sys.executable, "-m", "singa_lite", "run", "-n", "2", "--trace", "out.json", "train.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ended.returncode == 1 and "ended before a process began to trace" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_writer_without_a_disk_says_so_and_goes_on(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    writer = TraceWriter(tmp_path / "file")
    writer.add_step([Span("forward", "", 0.0, 1.0)], [])
    assert "ends here" in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["full", "closed", "none"])
def test_a_writer_without_a_disk_and_an_error_stream_goes_on(tmp_path, monkeypatch, errors):
    (tmp_path / "file").write_text("")
    with open("/dev/full", "w") as stream:
        if errors == "closed":
            stream.close()
        monkeypatch.setattr(sys, "stderr", None if errors == "none" else stream)
        TraceWriter(tmp_path / "file").add_step([Span("forward", "", 0.0, 1.0)], [])


def test_a_disk_that_is_full_in_the_middle_of_a_line_ends_the_part_there(tmp_path, capsys):
    writer = TraceWriter(tmp_path / "parts")
    writer.add_step([Span("forward", "", 0.0, 1.0)], [])
    [part] = (tmp_path / "parts").iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (part.stat().st_size + 40, limits[1]))
    writer.add_step([Span("forward", "", 1.0, 2.0)], [])
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.add_step([Span("forward", "", 2.0, 3.0)], [])
    writer.close()
    assert "ends here" in capsys.readouterr().err
    join_trace(tmp_path / "parts", tmp_path / "out.json")
    trace = json.loads((tmp_path / "out.json").read_bytes())
    assert [event["args"]["step"] for event in complete(trace, 0)] == [1]


# ---- clocks of several hosts ---------------------------------------------------------------------------


def offsets_of_hosts(communicator):
    os.environ["SINGA_LITE_HOST"] = "ab"[communicator.rank // 2]
    try:
        pairs = pairs_with_rank_0(communicator)
    finally:
        del os.environ["SINGA_LITE_HOST"]
    skew = 50.0 * communicator.rank

    def clock() -> float:
        return __import__("time").perf_counter() + skew

    return {rank: measure_offset(pair, clock) for rank, pair in pairs.items()}


@pytest.mark.parametrize(("transport", "size"), [("shm", 3), ("shm", 4), ("mpi", 3)])
def test_clocks_are_compared_to_within_their_error(transport, size):
    found = run_ranks(offsets_of_hosts, size, transport=transport)
    assert sorted(found[0]) == list(range(2, size))
    assert found[1] == {} and all(found[rank] == {rank: None} for rank in range(2, size))
    for rank, offset in found[0].items():
        assert abs(offset.offset_s - 50.0 * rank) <= offset.error_s + 1e-6
        assert offset.error_s < 1.0


GLUON = """
import numpy as np
from singa_lite import autograd, gluon, kvstore, layer, tensor

store = kvstore.create("dist_sync")
net = layer.Linear(4)
x = tensor.from_numpy(np.random.default_rng(store.rank).standard_normal((8, 3)).astype(np.float32))
net(x)
trainer = gluon.Trainer(net.get_params(), "sgd", {"lr": 0.1}, kvstore=store)
for _ in range(3):
    with autograd.record():
        loss = autograd.reduce_mean(net(x) * net(x))
    loss.backward()
    trainer.step(1)
"""


@pytest.mark.parametrize("servers", [0, 1])
def test_steps_of_a_trainer_are_traced(tmp_path, servers):
    (tmp_path / "train.py").write_text(GLUON)
    run = [sys.executable, "-m", "singa_lite", "run", "-n", "2", "-s", str(servers)]
    command = [*run, "--trace", "out.json", "train.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    trace = json.loads((tmp_path / "out.json").read_bytes())
    for rank in range(2):
        names = [event["name"] for event in complete(trace, rank, COMPUTE)]
        assert names.count("forward") == names.count("backward") == 3 and "update" in names
        assert {event["args"]["step"] for event in complete(trace, rank, WAIT)} == {1, 2, 3}


def test_a_forked_child_ends_though_a_thread_of_its_parent_was_writing(tmp_path):
    writer = TraceWriter(tmp_path)
    with writer._lock:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            writer.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    writer.close()
