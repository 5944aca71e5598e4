# SPDX-License-Identifier: Apache-2.0
"""Schemes whose steps depend on their number, learning rate or momentum: recorded steps have the bits of eager ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, opt
from singa_lite.sync import find_schemes
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks
from tests.sync.by_hand import bits
from tests.sync.training import Net, made, steps, values

OPTIONS = ["dgc:0.1:warmup=6", "dgc:0.1:clip=0.1", "sign", "sign:corr=0", "randomK:0.2", "localSGD:3:start=4"]
STEPS = 16


class Sums(opt.DecayScheduler):
    """A momentum that changes at every step."""

    def call(self, step: int) -> float:
        return self.init_value + 0.02 * (step % 5)


def train(communicator: Any) -> dict[str, list[dict[str, bytes]]]:
    """Where a rank is after each option: eager, recorded, and resumed half-way and recorded."""
    found = {}
    for option in OPTIONS:
        nets = [
            made(communicator, use_graph, option, momentum=Sums(0.8), weight_decay=0.01)
            for use_graph in (False, True, True)
        ]
        for net in nets[:2]:
            steps(net, communicator.rank, 0, STEPS // 2)
        nets[2].set_params(values(nets[1]))
        nets[2].optimizer.set_states(nets[1].optimizer.get_states())
        for net in nets:
            steps(net, communicator.rank, STEPS // 2, STEPS)
            breaks = [info.break_reason for info in net.graph_info()]
            assert breaks == [None] * len(breaks), (option, breaks)
            assert len(breaks) <= 5, (option, len(breaks))
        found[option] = [bits(values(net)) | bits(net.optimizer.get_states()) for net in nets]
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_recorded_and_resumed_steps_have_the_bits_of_eager_ones(size: int) -> None:
    ranks = run_ranks(train, size, transport="local" if size == 1 else "shm")
    for option in OPTIONS:
        keeps_equal = find_schemes()[option.partition(":")[0]].keeps_equal
        for of_rank in ranks:
            eager, recorded, resumed = of_rank[option]
            assert eager == recorded == resumed, option
            if keeps_equal:
                assert {k: v for k, v in eager.items() if "sync/" not in k} == {
                    k: v for k, v in ranks[0][option][0].items() if "sync/" not in k
                }, option


class TwoCalls(Net):
    """A step with two updates of the same parameters, and after each one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Tensor(data=np.ones(9), stores_grad=True, name="other")

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(2):
            loss = super().train_one_batch(x, y)
            self.optimizer(autograd.reduce_sum(self.other * self.other * autograd.reduce_sum(x), keepdims=0))
        return loss


class Shares(opt.DecayScheduler):
    """0.5, and 0.1 at every third step."""

    def call(self, step: int) -> float:
        return 0.1 if step % 3 == 2 else 0.5


# options, attribute ``spars``, and how many records there may be
SEVERAL = [
    ("partialUpdate", 0.05, 3),
    ("sparseTopK", Shares(0), 3),
    ("dgc:0.01:warmup=9", 0.05, 6),
    ("localSGD:3", 0.05, 4),
    ("localSGD:5:start=7", 0.05, 9),
]


def call_several_times(communicator: Any) -> None:
    """Eagerly and recorded, the same bits."""
    for option, spars, most in SEVERAL:
        found = []
        for use_graph in (False, True):
            net = made(communicator, use_graph, option, kind=TwoCalls, momentum=0.5)
            net.optimizer.spars = spars
            steps(net, communicator.rank, 0, 17)
            states = bits(values(net)) | bits(net.optimizer.get_states())
            found.append(states | {"other": to_numpy(net.other).tobytes()})
        breaks = [info.break_reason for info in net.graph_info()]
        assert breaks == [None] * len(breaks) and len(breaks) <= most, (option, breaks)
        assert found[0] == found[1], option


@pytest.mark.parametrize("size", [1, 2])
def test_several_calls_of_a_recorded_step_have_the_bits_of_eager_ones(size: int) -> None:
    run_ranks(call_several_times, size, transport="local" if size == 1 else "shm")
