# SPDX-License-Identifier: Apache-2.0
"""Layers that only training uses make their parameters after compile: these have names, and ranks compare them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, device, layer, model, opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import CommError
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks

HEADS = ["heads.0.W", "heads.0.b", "heads.1.W", "heads.1.b"]


class Heads(model.Model):
    """A body, which compile sees, and a head for each of two tasks.

    Args:
        is_by_hand: whether its steps are made by hand.
    """

    def __init__(self, is_by_hand: bool = False) -> None:
        super().__init__()
        self.body = layer.Linear(4)
        self.heads = [layer.Linear(2) for _ in range(2)]
        self.task, self.is_by_hand = 0, is_by_hand

    def forward(self, x: Tensor) -> Tensor:
        return autograd.relu(self.body(x))

    def train_one_batch(self, x: Tensor) -> Tensor:
        loss = autograd.reduce_mean(self.heads[self.task](self.forward(x)) ** 2, None, 0)
        if not self.is_by_hand:
            self.optimizer(loss)
            return loss
        for param, grad in autograd.backward(loss):
            self.optimizer.all_reduce(grad)
            self.optimizer.update(param, grad)
        self.optimizer.step()
        return loss


def compiled(net: Heads, optimizer: opt.Optimizer, use_graph: bool) -> Tensor:
    """Return a batch for ``net``, compiled with ``optimizer``."""
    net.set_optimizer(optimizer)
    x = Tensor(data=np.random.default_rng(3).standard_normal((5, 3)), dtype="float32")
    net.compile([x], use_graph=use_graph)
    return x


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["SGD", "DistOpt"])
def test_they_have_their_paths_as_names(is_wrapped: bool, use_graph: bool) -> None:
    sgd: opt.Optimizer = opt.SGD(0.1, momentum=0.9)
    if is_wrapped:
        sgd = opt.DistOpt(sgd, communicator=LocalCommunicator(World()))
    x = compiled(net := Heads(), sgd, use_graph)
    for net.task in (1, 0, 1, 0):
        net(x)
    assert {name: param.name for name, param in net.get_params().items()} == {
        name: name for name in ("body.W", "body.b", *HEADS)
    }
    assert {f"{name}:momentum" for name in HEADS} <= sgd.get_states().keys()


def test_names_are_those_of_the_paths_also_where_an_evaluation_has_made_the_layer() -> None:
    first, second = Heads(), Heads()
    x = compiled(first, opt.SGD(0.1), False)
    compiled(second, opt.SGD(0.1), False)
    first.body.b.name = "no decay"  # of the script
    first.eval()
    first.forward = lambda x: first.heads[1](first.body(x))  # type: ignore[method-assign]
    first(x)
    second.train()
    second(x)
    first.train()
    del first.forward
    first(x)
    assert [param.name for param in first.heads[1].get_params().values()] == HEADS[2:]
    assert first.body.b.name == "no decay"


class Own(layer.Layer):
    """A layer that makes its parameter by methods which training records."""

    def initialize(self, x: Tensor) -> None:
        made = Tensor((4, x.shape[1]), stores_grad=True)
        made.gaussian(0.0, 1.0)
        self.W = made.T().as_type("float64").as_type("float32").reshape((x.shape[1], 4))
        self.W.stores_grad = True

    def forward(self, x: Tensor) -> Tensor:
        return autograd.matmul(x, self.W)


def test_what_initialize_makes_is_a_leaf_also_in_a_training_step() -> None:
    net = Heads()
    x = compiled(net, opt.SGD(0.1), False)
    net.heads[0] = Own()
    losses = [float(net(x)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert net.get_params()["heads.0.W"].creator is None and net.heads[0].W.name == "heads.0.W"


@pytest.mark.filterwarnings("ignore:save_states. the optimizer updates a parameter")
def test_their_optimizer_states_are_loaded_into_the_same_layers(tmp_path: Path) -> None:
    first, second = Heads(), Heads()
    x = compiled(first, opt.SGD(0.1, momentum=0.9), False)
    for first.task in (1, 0, 1):
        first(x)
    first.save_states(tmp_path / "states.zip")
    compiled(second, opt.SGD(0.1, momentum=0.9), False)
    for second.task in (0, 1):  # in the other order
        second(x)
    second.load_states(tmp_path / "states.zip")
    for one, other in zip(first.heads, second.heads, strict=True):
        momenta = [net.optimizer.slots(head.W)["momentum"] for net, head in ((first, one), (second, other))]
        assert to_numpy(momenta[0]).any()
        np.testing.assert_array_equal(*map(to_numpy, momenta))


def trains_other_heads(communicator: Any, use_graph: bool) -> str:
    x = compiled(net := Heads(), opt.DistOpt(opt.SGD(0.1), communicator=communicator), use_graph)
    try:
        for step in range(4):
            net.task = (step + communicator.rank) % 2
            net(x)
    except CommError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_train_other_heads_get_an_error(size: int, use_graph: bool) -> None:
    for text in run_ranks(trains_other_heads, size, use_graph):
        assert "heads.0" in text or "heads.1" in text, text


def begins_otherwise(communicator: Any, use_graph: bool, seed_of_rank: int) -> tuple[list[str], bool]:
    """What a rank is told, and whether parameters are another rank's."""
    net = Heads(is_by_hand=True)
    x = compiled(net, opt.DistOpt(opt.SGD(0.1), communicator=communicator), use_graph)
    device.get_default_device().SetRandSeed(1 + seed_of_rank * communicator.rank)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for net.task in (0, 0, 0, 1, 1):
            net(x)
    values = [to_numpy(param).tolist() for _, param in sorted(net.get_params().items())]
    everyone = communicator.all_gather_object(values)
    return [str(warning.message) for warning in found], all(each == values for each in everyone)


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("size", [2, 3])
def test_steps_by_hand_warn_where_ranks_began_a_layer_with_other_values(size: int, use_graph: bool) -> None:
    for texts, are_equal in run_ranks(begins_otherwise, size, use_graph, 1):
        assert not are_equal
        assert sum("started with different values" in text for text in texts) == 1
    for texts, are_equal in run_ranks(begins_otherwise, size, use_graph, 0):
        assert are_equal and not texts
