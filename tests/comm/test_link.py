# SPDX-License-Identifier: Apache-2.0
"""Emulated links: the schedule by a clock that the test sets, real waits by their lower bound, and the same results."""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from singa_lite import cli
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.job import Job
from singa_lite.comm.link import Link, parse_link
from singa_lite.comm.link_communicator import Line, LinkCommunicator, num_hops
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.rendezvous import connect, connect_messenger
from singa_lite.errors import CommError, DTypeError, OptionError
from tests.comm.processes import launch_command, run_command, write_script
from tests.comm.test_contract import FACTS, run_facts
from tests.ranks import run_ranks

needs_ranks = pytest.mark.skipif(sys.platform != "linux", reason="several ranks need Linux")
MS, SECOND = 10**6, 10**9  # nanoseconds
SLOW = Link(8_000_000, 2 * MS)  # 1 byte takes 1 us, so 1000 bytes 1 ms
FAST = "10gbit,20us"


class Clock:
    """A clock that only the test and a sleep advance."""

    def __init__(self, now: int = 0) -> None:
        self.now = now
        self.slept: list[float] = []

    def __call__(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += round(seconds * 10**9)


# ---- texts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bits_per_s", "latency_ns"),
    [
        ("100mbit,1ms", 100_000_000, 1_000_000),
        ("2.5gbit,0.5us", 2_500_000_000, 500),
        ("56kbit,0s", 56_000, 0),
        ("1gbit,2s", 1_000_000_000, 2_000_000_000),
        ("1000000gbit,3600s", 10**15, 3600 * 10**9),
        ("0.001kbit,0.001us", 1, 1),
        ("123456.789012345gbit,100.5ms", 123_456_789_012_345, 100_500_000),
    ],
)
def test_a_link_is_read_from_its_text_and_back(text, bits_per_s, latency_ns):
    link = parse_link("--link", text)
    assert link == Link(bits_per_s, latency_ns)
    assert parse_link("--link", str(link)) == link


@pytest.mark.parametrize(
    "text",
    [
        "",
        "100mbit",
        "100,1",
        "100Mbit,1ms",
        "1ms,100mbit",
        "100mbit,1ms,2",
        "-1mbit,1ms",
        "1e3mbit,1ms",
        "100mbit, 1ms",
        "0mbit,1ms",
        "0.0001kbit,1ms",
        "١mbit,1ms",
        "100mbit,1ns",
        "100mbit,1ms\n",
        "1000001gbit,1ms",
        "1gbit,3601s",
        f"{'9' * 400}gbit,1ms",
        f"1gbit,{'9' * 400}s",
        f"1gbit,{'9' * 5000}s",
        f"1gbit,0.{'1' * 5000}s",
    ],
    ids=lambda text: text[:30],
)
def test_a_wrong_text_is_refused_with_what_is_expected(text):
    with pytest.raises(
        OptionError, match=r"--link: expected RATE,LATENCY such as 100mbit,1ms: .*kbit.*us"
    ) as error:
        parse_link("--link", text)
    assert repr(text) in str(error.value)


# ---- schedule ----------------------------------------------------------------------------------------


def test_collectives_leave_one_after_the_other_from_the_last_call_on():
    line = Line(SLOW)
    assert line.send(5 * MS, 1000, 2) == (5 + 1 + 4) * MS
    assert line.send(5 * MS, 3000, 1) == (6 + 3 + 2) * MS  # behind the first
    assert line.send(20 * MS, 500, 0) == 20 * MS + MS // 2  # the line was free
    assert line.send(20 * MS, 0, 4) == 20 * MS + MS // 2 + 8 * MS  # nothing to send still has to arrive
    assert line.free_ns == 20 * MS + MS // 2


def test_the_time_of_a_byte_is_rounded_up():
    assert Link(3, 0).sending_ns(1) == -(-8 * 10**9 // 3)
    assert [Link(10**9, 0).sending_ns(number) for number in (0, 1, 10**9)] == [0, 8, 8 * 10**9]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_an_all_reduce_goes_round_the_ring_twice(size):
    kinds = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
    assert [num_hops(kind, size) for kind in kinds] == [2 * (size - 1)] + 4 * [size - 1]


# a call: when it comes on rank 0, 1 and 2 in milliseconds, its kind, and how many float32 the array has
CALLS = [
    ((3, 9, 1), "all_reduce", 250),
    ((4, 10, 2), "all_gather", 500),
    ((4, 11, 30), "all_reduce", 1000),
    ((31, 31, 31), "broadcast", 3),
    ((90, 80, 70), "reduce_scatter", 300),
]


def expected_ends(size: int) -> list[int]:
    """The ends of CALLS in nanoseconds, by the formula, rounded up where a byte takes no whole number of them."""
    free, ends = Fraction(0), []
    for times, kind, count in CALLS:
        payload = 4 * count
        ring = {"all_reduce": Fraction(2 * (size - 1), size), "all_gather": Fraction(size - 1)}
        num_bytes = -(-payload * ring.get(kind, Fraction(size - 1, size)) // 1)
        free = max(Fraction(max(times[:size])) * MS, free) + num_bytes * 1000
        ends.append(int(free + (2 if kind == "all_reduce" else 1) * (size - 1) * 2 * MS))
    return ends


def call_all(c: Communicator) -> tuple[list[int | None], list[bool], list[int], int]:
    """Start CALLS at their times; return their ends, if any was done before, the clock after each wait, and bytes."""
    clock = Clock()
    linked = LinkCommunicator(c, SLOW, clock=clock, sleep=clock.sleep)
    works: list[Any] = []
    for times, kind, count in CALLS:
        clock.now = times[c.rank] * MS
        array = np.full(count, c.rank + 1, np.float32)
        works.append(
            {
                "all_reduce": lambda array=array: linked.all_reduce(array, "sum"),
                "all_gather": lambda array=array: linked.all_gather(array),
                "broadcast": lambda array=array: linked.broadcast(array),
                "reduce_scatter": lambda array=array: linked.reduce_scatter(array, "sum"),
            }[kind]()
        )
    c.barrier()  # all have called all
    works[-1]._moved._wait(None)
    too_early = []
    for work in works:  # the ends are known, and have not come
        work.timing._wait(None)
        clock.now = 0
        too_early.append(work.done())
        clock.now = work.end_ns - 1
        too_early.append(work.done())
    clock.now, after = 0, []
    for work in works:
        work.wait()
        assert work.done()
        after.append(clock.now)
    return [work.end_ns for work in works], too_early, after, linked.traffic.bytes_sent


@needs_ranks
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_compute_the_same_ends_of_collectives_in_flight(size):
    ends = expected_ends(size)
    for found, too_early, after, bytes_sent in run_ranks(call_all, size):
        assert found == ends
        assert not any(too_early)
        assert after == list(np.maximum.accumulate(ends))  # a wait ends at its end, or is late already
        plain = [(2 * (size - 1) * 1000, size), ((size - 1) * 2000, 1), (2 * (size - 1) * 4000, size)]
        plain += [((size - 1) * 12, size), ((size - 1) * 1200, size)]
        assert bytes_sent == sum(-(-number // divisor) for number, divisor in plain)


def wait_for_the_last_alone(c: Communicator) -> tuple[int | None, int, int]:
    clock = Clock()
    linked = LinkCommunicator(c, SLOW, clock=clock, sleep=clock.sleep)
    first = linked.all_reduce(np.ones(250, np.float32), "sum")
    second = linked.all_reduce(np.ones(250, np.float32), "sum")
    second.wait()
    return first.end_ns, second.end_ns, clock.now  # type: ignore[attr-defined]


@needs_ranks
def test_waiting_for_a_later_collective_schedules_the_earlier_first():
    for found in run_ranks(wait_for_the_last_alone, 2):
        assert found == (5 * MS, 6 * MS, 6 * MS)


def never_wait(c: Communicator) -> int:
    clock = Clock()
    linked = LinkCommunicator(c, Link(10**12, 0), clock=clock, sleep=clock.sleep)
    for number in range(300):
        clock.now += MS
        linked.all_reduce(np.ones(1, np.float32), "sum")
        if number % 50 == 49:
            c.barrier()
    return len(linked._works) + len(linked._unscheduled)


@needs_ranks
def test_collectives_that_nobody_waits_for_are_forgotten():
    assert all(left < 250 for left in run_ranks(never_wait, 2))


def groups_share_the_line(c: Communicator) -> list[int]:
    """Ranks 0 and 1 send alone first; then all three send while the lines of these are in use."""
    clock = Clock()
    linked = LinkCommunicator(c, SLOW, clock=clock, sleep=clock.sleep)
    pair = linked.new_group([0, 1])
    alone = linked.new_group([2])
    start = clock.now = 10**9
    ends = []
    if pair is not None:
        work: Any = pair.all_reduce(np.ones(5000, np.float32), "sum")
        work.wait()
        ends.append(work.end_ns - start)
    if alone is not None:
        alone.all_reduce(np.ones(5000, np.float32), "sum").wait()
        ends.append(clock.now - start)
    clock.now = start
    work = linked.all_gather(np.ones(250, np.float32))
    work.wait()
    return [*ends, work.end_ns - start]


@needs_ranks
def test_groups_share_the_link_of_their_rank():
    pair, everyone = 20 + 4, 20 + 2 + 4
    found = run_ranks(groups_share_the_line, 3)
    assert found == [[pair * MS, everyone * MS], [pair * MS, everyone * MS], [0, everyone * MS]]


def groups_of_hosts(c: Communicator) -> list[int]:
    """Ranks 0 and 1 play one host, rank 2 another; return the clock after an all-reduce in each group."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SINGA_LITE_HOST", "a" if c.rank < 2 else "b")
        linked = LinkCommunicator(c, SLOW, clock=clock, sleep=clock.sleep)
        clock.now = 0
        inner, outer = linked.split_by_host()
    before = clock.now
    inner.all_reduce(np.ones(250, np.float32), "sum").wait()
    after = [clock.now - before]
    if outer is not None:
        work: Any = outer.all_reduce(np.ones(250, np.float32), "sum")
        work.wait()
        after.append(work.end_ns - int(work.calls.max()))
    return after


@needs_ranks
def test_a_group_within_a_host_that_is_played_uses_no_link():
    assert run_ranks(groups_of_hosts, 3) == [[0, (1 + 4) * MS], [0], [0, (1 + 4) * MS]]


def times_of_two(c: Communicator) -> list[tuple[Any, Any]]:
    clock = Clock(time.monotonic_ns() + 3600 * SECOND)  # later than any time that the transport reads
    linked = LinkCommunicator(c, Link(8_000_000, 3 * MS), clock=clock, sleep=clock.sleep)
    seen = []
    for count in (1, 1000):
        work: Any = linked.all_reduce(np.ones(count, np.float32), "sum")
        with pytest.raises(OptionError, match="has not ended"):
            work.times()
        work.wait()
        seen.append((work.times(), work.end_ns))
    return seen


@needs_ranks
def test_the_times_of_a_collective_end_when_it_ends_on_the_link():
    for seen in run_ranks(times_of_two, 2):
        for times, end_ns in seen:
            assert times.posted <= times.all_there <= times.ended
            assert times.ended == end_ns / SECOND


def times_with_a_pause(c: Communicator) -> Any:
    def clock() -> int:
        """As a clock whose reader is kept from its core, on one rank, before it goes on to move data."""
        now = time.monotonic_ns()
        if c.rank == 1:
            time.sleep(0.02)
        return now

    work: Any = LinkCommunicator(c, Link(8_000_000, 3 * MS), clock=clock).all_reduce(
        np.ones(9, np.float32), "sum"
    )
    work.wait()
    return work.times()


@needs_ranks
def test_the_link_takes_as_long_where_a_rank_is_kept_from_its_core_in_the_call():
    for times in run_ranks(times_with_a_pause, 3):
        assert times.posted <= times.all_there
        assert times.ended - times.all_there >= 4 * 3e-3  # 4 hops


# ---- real waits --------------------------------------------------------------------------------------


def real_waits(c: Communicator) -> list[tuple[int, int, int]]:
    linked = LinkCommunicator(c, Link(8_000_000, 3 * MS))
    seen = []
    for count in (1, 2500):
        time.sleep(0.01 * c.rank)
        called = time.monotonic_ns()
        work: Any = linked.all_reduce(np.ones(count, np.float32), "sum")
        was_done = work.done()
        looked = time.monotonic_ns()
        work.wait()
        left = time.monotonic_ns()
        assert not was_done or looked >= work.end_ns
        seen.append((called, work.end_ns, left))
    assert linked.traffic.wait_s > 0
    return seen


@needs_ranks
@pytest.mark.parametrize("size", [2, 3])
def test_wait_returns_not_before_the_end_that_follows_from_the_last_call(size):
    for number, count in enumerate((1, 2500)):
        seen = [log[number] for log in run_ranks(real_waits, size)]
        [end] = {end for _, end, _ in seen}
        num_bytes = -(-2 * (size - 1) * 4 * count // size)
        assert end >= max(called for called, _, _ in seen) + num_bytes * 1000 + 2 * (size - 1) * 3 * MS
        assert all(left >= end for _, _, left in seen)


def test_a_world_of_one_never_waits():
    linked = LinkCommunicator(LocalCommunicator(World()), Link(1, 10**12))
    work = linked.all_reduce(np.ones(1000, np.float32), "sum")
    assert work.done() and work.wait() is None


# ---- the contract, and what is refused ---------------------------------------------------------------


def facts_over_a_link(c: Communicator) -> dict[str, str]:
    return run_facts(LinkCommunicator(c, parse_link("test", FAST)))


@functools.cache
def outcomes(size: int) -> list[dict[str, str]]:
    return run_ranks(facts_over_a_link, size, transport="local" if size == 1 else "shm")


@needs_ranks
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", [check.__name__ for check in FACTS])
def test_over_a_link_it_holds_that(name, size):
    texts = [outcome.get(name, "not reached") for outcome in outcomes(size)]
    assert not any(texts), "\n".join(texts)


def disagreement(c: Communicator) -> str:
    linked = LinkCommunicator(c, SLOW)
    with pytest.raises(CommError) as error:
        linked.all_reduce(np.ones(5, np.float32), "sum", name=f"w{c.rank}").wait()
    return str(error.value)


@needs_ranks
def test_ranks_that_disagree_get_the_error_of_the_transport():
    for text in run_ranks(disagreement, 3):
        assert "the ranks disagree" in text and "all_reduce" in text and "'w0'" in text


def connect_with(world: World, texts: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SINGA_LITE_LINK", texts[world.rank])
        try:
            connect(world).barrier()
        except CommError as error:
            return str(error)
    return ""


@needs_ranks
def test_ranks_with_different_links_get_an_error_that_names_both():
    texts = run_ranks(connect_with, 3, ["1mbit,1ms", "1mbit,1ms", "2mbit,1ms"], transport="none")
    for text in texts:
        assert "'SINGA_LITE_LINK=1mbit,1ms'" in text and "'SINGA_LITE_LINK=2mbit,1ms'" in text, text
        assert "rank 2 calls all_gather" in text, text


@needs_ranks
def test_a_rank_without_a_link_is_an_error_on_all():
    texts = run_ranks(connect_with, 3, ["", "1mbit,1ms", ""], transport="none")
    assert all("rank 1 calls all_gather #0 'SINGA_LITE_LINK=1mbit,1ms'" in text for text in texts), texts


def test_a_link_is_for_local_and_shm_alone(monkeypatch):
    monkeypatch.setenv("SINGA_LITE_LINK", "100mbit,1ms")
    with pytest.raises(OptionError, match=r"SINGA_LITE_LINK=100mbit,1ms.*'mpi', whose links are real"):
        connect(World(0, 2, 0, 2, transport="mpi"))
    with pytest.raises(OptionError, match="not for messages to servers"):
        connect_messenger(Job(0, 1, 1, "x", "shm"))
    assert isinstance(connect(World()), LinkCommunicator)
    monkeypatch.setenv("SINGA_LITE_LINK", "fast")
    with pytest.raises(OptionError, match="SINGA_LITE_LINK: expected RATE,LATENCY"):
        connect(World())


def test_arrays_on_a_gpu_are_refused():
    linked = LinkCommunicator(LocalCommunicator(World()), SLOW)
    array: Any = SimpleNamespace(__cuda_array_interface__={})
    with pytest.raises(DTypeError, match="whose links are real; leave out --link"):
        linked.all_reduce(array, "sum")


# ---- the command line, and training ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--link", "fast"], "--link: expected RATE,LATENCY such as 100mbit,1ms"),
        (["--link", "1gbit,1ms", "-s", "1"], "--link: is for collectives, not for messages to servers"),
        (["--link", "1gbit,1ms", "-H", "hosts"], "--link: not with -H; links between hosts are real"),
    ],
)
def test_the_command_line_refuses_a_link_that_cannot_be(options, text, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["run", "-n", "2", *options, "train.py"])
    assert error.value.code == 2 and text in capsys.readouterr().err


TRAIN = """
import hashlib, json, os, sys
import numpy as np
from singa_lite import device, layer, model, opt, tensor
from singa_lite.comm.rendezvous import process_communicator
from singa_lite.sync import find_schemes

class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.relu, self.out = layer.Linear(6), layer.ReLU(), layer.Linear(3)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.out(self.relu(self.hidden(x)))

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss)
        return out, loss

found = {}
for word in sorted({scheme.names[0] for scheme in find_schemes().values()}):
    for use_graph in (False, True):
        device.get_default_device().SetRandSeed(3)
        sgd = opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), dist_option=word)
        net = Net()
        net.set_optimizer(sgd)
        rng = np.random.default_rng([5, sgd.global_rank])
        x = tensor.from_numpy(rng.standard_normal((4, 5)).astype(np.float32))
        y = tensor.from_numpy(rng.integers(0, 3, 4).astype(np.int32))
        net.compile([x], is_train=True, use_graph=use_graph)
        for step in range(6):
            net(x, y)
        sgd.synchronize(net)
        values = b"".join(tensor.to_numpy(value).tobytes() for _, value in sorted(net.get_params().items()))
        found[f"{word} {use_graph}"] = [hashlib.sha256(values).hexdigest(), sgd.bytes_sent]
        if use_graph:
            found[f"{word} recorded"] = [[info.break_reason, info.num_collectives] for info in net.graph_info()]
communicator = process_communicator()
print(json.dumps({"found": found, "link": os.environ.get("SINGA_LITE_LINK"), "repr": repr(communicator)}))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each of three ranks printed, without a link and with one."""
    script = write_script(tmp_path_factory.mktemp("link"), TRAIN)
    logs = []
    for options in ([], ["--link", FAST]):
        result = run_command(launch_command(script, 3, options=options))
        assert result.returncode == 0, result.stderr
        logs.append(
            [json.loads(line) for line in re.findall(r"^\[\d\] (\{.*)$", result.stdout, re.MULTILINE)]
        )
    return logs


@needs_ranks
def test_the_launcher_gives_the_link_to_all_ranks(trained):
    plain, linked = trained
    assert [log["link"] for log in plain] == [None] * 3
    assert [log["link"] for log in linked] == [FAST] * 3
    assert all("over 10gbit,0.02ms" in log["repr"] for log in linked)


@needs_ranks
def test_every_dist_option_gives_the_same_bits_and_bytes_over_a_link_eager_and_recorded(trained):
    plain, linked = trained
    assert len(plain) == len(linked) == 3 and len(plain[0]["found"]) >= 13
    assert all(log["found"]["fp32 recorded"] == [[None, 1]] for log in linked)
    digests = [sorted(json.dumps(log["found"]) for log in logs) for logs in trained]
    assert digests[0] == digests[1]
