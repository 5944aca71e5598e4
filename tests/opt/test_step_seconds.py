# SPDX-License-Identifier: Apache-2.0
"""DistOpt.step_seconds: where the time of a step went, eagerly and in a replay, by every dist_option."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from singa_lite import layer, model, opt
from singa_lite.comm.base import World
from singa_lite.comm.link import parse_link
from singa_lite.comm.link_communicator import LinkCommunicator
from singa_lite.comm.local import LocalCommunicator
from singa_lite.graph import clock
from singa_lite.tensor import from_numpy
from tests.opt.every_scheme import ACTIVE, check_that_none_is_missing
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first

LATE_S = 0.6


class Net(model.Model):
    """Two layers, whose forward pass takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer.Linear(24), layer.Linear(4)
        self.relu, self.loss = layer.ReLU(), layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.second(self.relu(self.first(x)))

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss)
        return out, loss


def net(communicator, option="fp32", use_graph=False, **options):
    made = Net()
    dist = opt.DistOpt(
        opt.SGD(0.01, momentum=0.9), communicator=communicator, dist_option=option, threshold=50, **options
    )
    made.set_optimizer(dist)
    rng = np.random.default_rng(communicator.rank)
    x = from_numpy(rng.standard_normal((8, 16)).astype(np.float32))
    y = from_numpy(rng.integers(0, 4, 8).astype(np.int32))
    made.compile([x], use_graph=use_graph)
    return made, dist, x, y


def all_options(communicator, use_graph):
    found = {}
    for option in ACTIVE.values():
        made, dist, x, y = net(communicator, option, use_graph)
        assert dist.step_seconds is None
        packed_in_place = []
        for _ in range(4):
            start = time.perf_counter()
            made(x, y)
            elapsed = time.perf_counter() - start
            packed_in_place.append(dist.step_seconds.pack < dist.step_seconds.compute)
        seconds = dist.step_seconds
        parts = [seconds.compute, seconds.pack, seconds.compress, seconds.wait, seconds.decompress]
        assert min([*parts, seconds.update]) >= 0, option
        assert 0 < seconds.total <= elapsed, option
        assert seconds.compute > 0 and seconds.update > 0, option
        assert any(packed_in_place[1:]) or not use_graph, option  # gradients are computed in their buckets
        assert seconds.wire is not None and 0 <= seconds.hidden <= seconds.wire + 1e-9, option
        if use_graph:
            assert {info.break_reason for info in made.graph_info()} == {None}, option
        found[option] = seconds.wire, dist.bytes_sent
    return found


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@slow_but_first(("transport", "size"), [("shm", 3), ("local", 1), ("mpi", 2)])
def test_parts_add_up_to_no_more_than_the_step_by_every_option(transport, size, use_graph):
    check_that_none_is_missing()
    for rank in run_ranks(all_options, size, use_graph, transport=transport):
        assert {option: wire > 0 for option, (wire, _) in rank.items()} == {
            option: sent > 0 for option, (_, sent) in rank.items()
        }
        assert any(sent > 0 for _, sent in rank.values()) == (size > 1)


def over_a_link(communicator, use_graph):
    made, dist, x, y = net(LinkCommunicator(communicator, parse_link("test", "1mbit,1ms")), "fp32", use_graph)
    for _ in range(3):
        made(x, y)
    return dist.step_seconds, dist.bytes_sent, dist.wait_s


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
def test_an_emulated_link_is_the_wire_and_is_waited_for(use_graph):
    for seconds, sent, wait_s in run_ranks(over_a_link, 3, use_graph):
        expected = sent * 8 / 1e6 + 4 * 1e-3
        assert expected - 1e-4 <= seconds.wire  # later only where the machine is busy
        assert seconds.wait == pytest.approx(wait_s, rel=0.05)
        assert seconds.wait + seconds.hidden >= expected - 1e-3


def behind_a_late_rank(communicator):
    found = []
    for option, use_graph in itertools.product(("fp32", "dgc:0.1"), (False, True)):
        made, dist, x, y = net(communicator, option, use_graph)
        for _ in range(3):
            made(x, y)
        if communicator.rank == 1:
            time.sleep(LATE_S)
        made(x, y)
        found.append((dist.step_seconds, dist.wait_s))
    return found


@slow_but_first("transport", ["shm", "mpi"])  # mpi waits for small messages in the call
def test_the_time_that_a_rank_is_late_is_waited_by_the_other(transport):
    ranks = run_ranks(behind_a_late_rank, 2, transport=transport)
    for (first, wait_s), (second, _) in zip(*ranks, strict=True):
        assert first.wait == pytest.approx(wait_s, rel=0.05)
        assert first.wait > LATE_S / 2 > second.wait
        assert first.total - first.wait < LATE_S / 2
        assert first.overlap is not None and first.wire < LATE_S / 2


def with_a_check(communicator):
    found = []
    for use_graph in (False, True):
        bytes_sent = []
        for check_finite in (None, "skip"):
            made, dist, x, y = net(communicator, use_graph=use_graph, check_finite=check_finite)
            for _ in range(3):
                made(x, y)
            if communicator.rank == 1:
                time.sleep(LATE_S)
            made(x, y)
            bytes_sent.append(dist.bytes_sent)
        found.append((dist.step_seconds, dist.wait_s, bytes_sent))
    return found


def test_the_collective_of_check_finite_is_of_the_step_but_for_its_bytes():
    ranks = run_ranks(with_a_check, 2)
    for seconds, wait_s, (without, checked) in itertools.chain(*ranks):
        assert seconds.wait == pytest.approx(wait_s, rel=0.05, abs=1e-3)
        assert seconds.wire is not None and seconds.hidden is not None
        assert checked == without > 0
    assert all(wait_s > LATE_S / 2 for _, wait_s, _ in ranks[0])


def profiled(communicator):
    made, dist, x, y = net(communicator, use_graph=True)
    device = x.device
    for _ in range(2):
        made(x, y)
    (info,) = made.graph_info()
    device.SetVerbosity(1)
    try:
        made(x, y)
        (entries,) = device.profile.entries.values()
    finally:
        device.SetVerbosity(0)
    return dist.step_seconds, [entry.name for entry in entries], [node.split(" ")[0] for node in info.nodes]


def test_a_profiled_replay_is_measured_and_its_table_has_no_clock():
    for seconds, names, nodes in run_ranks(profiled, 2):
        assert min(seconds.compute, seconds.compress, seconds.wait, seconds.update) > 0
        assert seconds.wire is not None
        assert names == nodes and "Dist.clock" not in names


class Clock:
    """Seconds that pass where a test says so, in place of ``time.perf_counter``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(clock, "perf_counter", time.perf_counter)


@pytest.fixture
def seconds(monkeypatch):
    return Clock(monkeypatch)


class Slow(Net):
    """Takes a second for its forward pass."""

    def forward(self, x):
        self.seconds.now += 1
        return super().forward(x)


def slow_net(seconds, kind=Slow, **options):
    made, dist, x, y = net(LocalCommunicator(World()), **options)
    made.__class__, made.seconds = kind, seconds
    return made, dist, x, y


def test_only_what_is_between_call_and_update_counts(seconds):
    made, dist, x, y = slow_net(seconds)
    for _ in range(2):
        made(x, y)
        assert dist.step_seconds.compute == dist.step_seconds.total == 1
        seconds.now += 10  # loading data


class Failing(Slow):
    """Fails where its step should end."""

    def train_one_batch(self, x, y):
        self.loss(self.forward(x), y)
        raise ValueError("a bad batch")


def test_a_step_that_failed_does_not_count_for_the_next_one(seconds):
    made, dist, x, y = slow_net(seconds, Failing)
    with pytest.raises(ValueError, match="bad batch"):
        made(x, y)
    made.__class__ = Slow
    made(x, y)
    assert dist.step_seconds.total == 1


def test_accumulation_counts_all_calls_of_the_update(seconds):
    made, dist, x, y = slow_net(seconds, accumulate=3)
    for _ in range(3):
        assert dist.step_seconds is None
        made(x, y)
        seconds.now += 10
    assert dist.step_seconds.compute == dist.step_seconds.total == 3
