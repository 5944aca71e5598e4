# SPDX-License-Identifier: Apache-2.0
"""Schemes whose steps depend on their number, learning rate or momentum: recorded steps have the bits of eager ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.device import get_default_device
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


SETS = ["abc", "bc", "ac", "a"]


class InTurns(Net):
    """A model whose steps use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            setattr(self, name, Tensor(data=np.ones((3, 5)), stores_grad=True, name=name))

    def train_one_batch(self, x: Tensor, names: str) -> Tensor:  # type: ignore[override]
        terms = [autograd.reduce_sum(getattr(self, name) * x, keepdims=0) for name in names]
        loss = sum(terms[1:], terms[0])
        self.optimizer(loss)
        return loss


def train_in_turns(communicator: Any, option: str) -> list[dict[str, bytes]]:
    """Where a rank is after steps whose parameters take turns, eager and recorded."""
    found = []
    for use_graph in (False, True):
        net = made(communicator, use_graph, option, InTurns)
        for step in range(4 * len(SETS)):
            rng = np.random.default_rng([communicator.rank, step])
            net(Tensor(data=rng.standard_normal((3, 5))), SETS[step % len(SETS)])
        autograd.training = False
        assert [info.break_reason for info in net.graph_info()] == [None] * use_graph * len(SETS)
        found.append(bits(values(net)) | bits(net.optimizer.get_states()))
    return found


@pytest.mark.parametrize("option", ["sparseThreshold:0.8", "hierarchical:sparseThreshold:0.8:values=fp16"])
def test_steps_with_other_parameters_than_the_first_are_replayed_with_the_bits_of_eager_ones(
    option: str,
) -> None:
    for eager, recorded in run_ranks(train_in_turns, 3, option):
        assert any("residual" in name for name in eager) or option.startswith("hierarchical")
        assert eager == recorded


class Stacked(Net):
    """Two recurrent layers with dropout: the gradient of their weights is joined of those of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layer.CudnnRNN(5, num_layers=2, dropout=0.3, return_sequences=False)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(autograd.reshape(x, (4, 1, 5))))


def gradients_of_stacked(communicator: Any, option: str) -> list[list[np.ndarray]]:
    """What each of 6 steps has changed the recurrent weights by, eagerly and recorded, with the same masks."""
    found = []
    for use_graph in (False, True):
        net, changes = made(communicator, use_graph, option, Stacked), []
        for step in range(6):
            get_default_device().set_random_state((7, step << 20))
            before = to_numpy(net.first.W)
            steps(net, communicator.rank, step, step + 1)
            changes.append(before - to_numpy(net.first.W))
        assert [info.break_reason for info in net.graph_info()] == [None] * use_graph
        found.append(changes)
    return found


@pytest.mark.parametrize(("option", "size"), [("fp16", 1), ("int8", 1), ("fp32", 2), ("sparseTopK:0.9", 2)])
def test_a_gradient_that_is_joined_of_parts_reaches_the_bucket_at_every_replay(
    option: str, size: int
) -> None:
    transport = "local" if size == 1 else "shm"
    for eager, recorded in run_ranks(gradients_of_stacked, size, option, transport=transport):
        for one, other in zip(eager, recorded, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)


class Warms(opt.SGD):
    """Counts its updates in Python."""

    num_updates = 0

    def scaled(self, pairs: Any) -> list[tuple[Tensor, Tensor]]:
        self.num_updates += 1
        return [(param, grad * float(self.num_updates)) for param, grad in pairs]

    def update_all(self, pairs: Any) -> None:
        super().update_all(self.scaled(pairs))

    def update_velocity(self, pairs: Any) -> None:
        super().update_velocity(self.scaled(pairs))


class Decays(opt.Adam):
    """A weight decay that Python makes."""

    num_updates = 0

    def decay(self) -> dict[str, Any]:
        self.num_updates += 1
        return {"weight_decay": 0.1 * self.num_updates}


class Numbers(opt.SGD):
    """A learning rate that Python makes."""

    num_updates = 0

    def number(self, name: str) -> Any:
        self.num_updates += name == "lr"
        return 0.01 * self.num_updates if name == "lr" else super().number(name)


@pytest.mark.parametrize(
    ("make", "option", "reason"),
    [
        (lambda: Warms(0.01, 0.9), "fp32", None),
        (lambda: Warms(0.01, 0.9), "dgc:1:mask=0", None),
        (lambda: Decays(0.1), "fp32", "Decays overrides decay"),
        (lambda: Numbers(0.1), "fp32", "Numbers overrides number"),
    ],
)
def test_python_of_a_users_optimizer_runs_at_every_step(make: Any, option: str, reason: str | None) -> None:
    found = []
    for use_graph in (False, True):
        net, optimizer = Net(), make()
        net.set_optimizer(opt.DistOpt(optimizer, dist_option=option, communicator=LocalCommunicator(World())))
        net.compile([Tensor((4, 5))], use_graph=use_graph)
        rng = np.random.default_rng(2)
        net.set_params({k: rng.standard_normal(p.shape).astype("f") for k, p in net.get_params().items()})
        steps(net, 0, 0, 6)
        assert optimizer.num_updates == 6
        found.append(bits(values(net)))
        breaks = [info.break_reason for info in net.graph_info()]
    assert found[0] == found[1]
    assert breaks == [None] if reason is None else reason in breaks[0]


class Mixin:
    number = 3


class WithAttributes(opt.Optimizer):
    """Names of a method that only Adam has, and of one that is no function here, stay what they are."""

    decay = 0.9
    __call__ = opt.Optimizer.__call__

    def update_all(self, pairs: Any) -> None:
        for param, grad in pairs:
            param -= grad * (self.lr_value * self.decay)


class WithStatic(Mixin, opt.SGD):
    @staticmethod
    def decay() -> float:
        return 0.5


def test_attributes_of_an_optimizer_that_are_no_methods_of_the_package_stay_as_they_are() -> None:
    assert (WithAttributes.decay, WithStatic.decay(), WithStatic.number) == (0.9, 0.5, 3)
    param, grad = Tensor(data=np.ones(2), stores_grad=True), Tensor(data=np.ones(2))
    WithAttributes(lr=1.0).update(param, grad)
    np.testing.assert_allclose(to_numpy(param), 0.1, rtol=1e-5)
