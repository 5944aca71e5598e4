# SPDX-License-Identifier: Apache-2.0
"""hierarchical: what reaches the outer scheme, what all ranks are told, and which ranks errors name."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, opt
from singa_lite.comm.work import ring_bytes
from singa_lite.errors import CommError, DTypeError, OptionError
from singa_lite.tensor import Tensor
from tests.limits import LIMIT_S
from tests.ranks import mpi_missing, run_ranks
from tests.slow_cases import slow_but_first
from tests.sync.by_hand import sparse_bytes
from tests.sync.make_scheme import begin, make_scheme
from tests.sync.test_hierarchical import Net, bits, train_step

HOSTS = "aab"


def refused(communicator: Any, outer: str, dtype: str) -> list[str]:
    """The error on this rank, and what the next step, of float32, sends in the end."""
    os.environ["SINGA_LITE_HOST"] = HOSTS[communicator.rank]
    scheme: Any = make_scheme("hierarchical", communicator, 10, 40)
    good, bad = Tensor((20,), name="good"), Tensor((20,), name="bad", dtype=np.dtype(dtype))
    begin(scheme, outer=outer)
    scheme.add_gradient(good, Tensor(data=np.ones(20, np.float32)))
    with pytest.raises(DTypeError) as raised:
        scheme.add_gradient(bad, Tensor(data=np.ones(20, dtype), dtype=np.dtype(dtype)))
        list(scheme.finish())
    return [str(raised.value)]


@pytest.mark.parametrize(
    ("outer", "dtype"),
    [
        ("int8", "float64"),
        ("fp16", "float64"),
        ("bf16", "float64"),
        ("sign", "float16"),
        ("randomK", "float16"),
    ],
)
def test_a_dtype_that_the_outer_scheme_refuses_is_an_error_on_all_ranks(outer: str, dtype: str) -> None:
    found = run_ranks(refused, 3, outer, dtype)
    assert found == [found[0]] * 3
    assert found[0][0].startswith(f"{outer}: bad is {dtype}")


def net_of(communicator: Any, use_graph: bool, **given: Any) -> Net:
    net = Net()
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1), communicator=communicator, **given))
    net.compile([Tensor((5, 20))], use_graph=use_graph)
    rng = np.random.default_rng(2)
    start = {name: rng.standard_normal(p.shape) / 4 for name, p in net.get_params().items()}
    net.set_params({name: value.astype(np.float32) for name, value in start.items()})
    return net


class Falls(opt.DecayScheduler):
    def __init__(self) -> None:
        super().__init__(0.5)

    def call(self, step: int) -> float:
        return [0.5, 0.25][step >= 3]


def trained(
    communicator: Any, use_graph: bool, attribute: float | None = None, **given: Any
) -> tuple[Any, ...]:
    """Parameters in the end, and of each step bytes in all, inside and between."""
    net = net_of(communicator, use_graph, **given)
    sent = []
    for step in range(6):
        if attribute is not None:
            net.optimizer.spars = attribute
        train_step(net, communicator.rank, step)
        sgd = net.optimizer
        sent.append((sgd.bytes_sent, sgd.bytes_inside_hosts, sgd.bytes_between_hosts))
    return bits(net), sent


def ways_to_say_it(communicator: Any, use_graph: bool) -> list[tuple[Any, ...]]:
    os.environ["SINGA_LITE_HOST"] = HOSTS[communicator.rank]
    return [
        trained(communicator, use_graph, dist_option="hierarchical:sparseTopK:0.5:corr=0"),
        trained(communicator, use_graph, dist_option="hierarchical:sparseTopK", spars=0.5, corr=False),
        trained(communicator, use_graph, dist_option="hierarchical", outer="sparseTopK:0.5", corr=False),
        trained(communicator, use_graph, 0.5, dist_option="hierarchical:outer=sparseTopK:corr=0"),
        trained(communicator, use_graph, dist_option="hierarchical:sparseTopK", spars=Falls(), corr=False),
        trained(communicator, use_graph, dist_option="hierarchical:sparseThreshold", spars=Falls()),
        trained(communicator, use_graph, dist_option="fp32"),
    ]


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
def test_options_reach_the_outer_scheme_in_every_way(use_graph: bool) -> None:
    ranks = run_ranks(ways_to_say_it, 3, use_graph)
    n = 723  # elements of the model
    inside = ring_bytes("reduce", 4 * n, 2) + ring_bytes("broadcast", 4 * n, 2)
    for rank, (text, *others) in enumerate(ranks):
        *same, falling, threshold, plain = others
        assert [way for way in same if way != text] == []
        assert falling[0] != text[0]
        assert (len(set(threshold[1])) > 1) == (rank != 1)  # that of no leader sends as much in each step
        assert all(way[0] == ranks[0][number][0] for number, way in enumerate(ranks[rank]))
        is_leader, has_peers = rank in (0, 2), rank in (0, 1)
        between = [0.5] * 3 + [0.25] * 3
        expected = [
            (inside if has_peers else 0, sparse_bytes(n, -(-n // round(1 / share))) if is_leader else 0)
            for share in between
        ]
        assert [step[1:] for step in falling[1]] == expected
        assert [step[0] for step in falling[1]] == [sum(pair) for pair in expected]
        assert [step[1:] for step in text[1]] == expected[:1] * 6
        assert {step[1:] for step in plain[1]} == {(0, 0)} and plain[1][0][0] > 0


def test_an_option_of_the_outer_scheme_given_twice_or_unknown_is_refused() -> None:
    for given, message in [
        ({"dist_option": "hierarchical:sparseTopK:0.1", "spars": 0.2}, "spars is given twice"),
        ({"dist_option": "hierarchical:int8:seed=1", "seed": 1}, "seed is given twice"),
        ({"dist_option": "hierarchical:int8", "corr": False}, "int8 has no option corr"),
        ({"dist_option": "hierarchical:sparseTopK", "spars": 2.0}, "spars = 2.0 must be in"),
    ]:
        with pytest.raises(OptionError, match=message):
            opt.DistOpt(**given)


def changed_outer(communicator: Any, use_graph: bool) -> str:
    """The error of every rank when rank 3, which leads no host, changes the outer scheme's options."""
    os.environ["SINGA_LITE_HOST"] = "abab"[communicator.rank]
    net = net_of(communicator, use_graph, dist_option="hierarchical:sparseTopK:0.5")
    try:
        for step in range(8):
            if step == 4 and communicator.rank == 3:
                net.optimizer.dist_option = "hierarchical:sparseTopK:0.5:corr=0"
            train_step(net, communicator.rank, step)
    except CommError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@slow_but_first("transport", ["shm", "mpi"])
def test_a_member_that_differs_is_an_error_on_all_ranks_of_all_hosts(transport: str, use_graph: bool) -> None:
    if transport == "mpi" and (reason := mpi_missing()):
        pytest.skip(reason)
    for text in run_ranks(changed_outer, 4, use_graph, transport=transport, timeout_s=LIMIT_S):
        calls = dict(re.findall(r"rank (\d) calls ([^,]*'[^']*')", text))
        assert set(calls) == {"1", "3"}, text  # ranks of the world, not 0 and 1 of their host
        assert "corr=True" in calls["1"] and "corr=False" in calls["3"], text


class Stops(autograd.Operator):
    """Passes values on; raises in backward while ``is_on``, where the second layer's gradients are on their way."""

    is_on = False

    def forward(self, context: Any, x: Any) -> Any:
        return x.copy()

    def backward(self, context: Any, dy: Any) -> Any:
        if Stops.is_on:
            raise KeyError("in backward")
        return dy


class Stopping(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(Stops()(autograd.tanh(self.first(x))))


def bytes_around_an_exception(communicator: Any, given: dict[str, Any]) -> list[tuple[int, ...]]:
    """What each of four steps sent, the third of which has raised once before."""
    os.environ["SINGA_LITE_HOST"] = "ab"[communicator.rank // 2]
    net, sent = Stopping(), []
    net.set_optimizer(sgd := opt.DistOpt(opt.SGD(0.1), communicator=communicator, bucket_bytes=1, **given))
    net.compile([Tensor((5, 20))])
    for step in range(4):
        if step == 2:
            Stops.is_on = True
            with pytest.raises(KeyError):
                train_step(net, communicator.rank, step)
            Stops.is_on = False
        train_step(net, communicator.rank, step)
        sent.append((sgd.bytes_sent, sgd.bytes_inside_hosts, sgd.bytes_between_hosts, sgd.total_bytes_sent))
    return sent


@pytest.mark.parametrize(
    "given",
    [{"dist_option": "hierarchical:fp32"}, {"order": "fixed", "microbatches": 4}],
    ids=["hosts", "fixed"],
)
def test_what_an_exception_ended_is_not_counted_in_the_next_step(given: dict[str, Any]) -> None:
    for sent in run_ranks(bytes_around_an_exception, 4, given):
        (first, *parts, _), *_ = sent
        assert first > 0 and sent == [(first, *parts, first * (step + 1)) for step in range(4)]
