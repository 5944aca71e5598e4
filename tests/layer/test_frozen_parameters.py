# SPDX-License-Identifier: Apache-2.0
"""Parameters that are frozen, by either flag, stay parameters of their layers: in files, on ranks, for unfreezing."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

from singa_lite import autograd, checkpoint, gluon, layer, model, opt
from singa_lite.comm.base import Communicator
from singa_lite.device import get_default_device
from singa_lite.errors import CheckpointError, DTypeError
from singa_lite.tensor import Tensor, from_numpy, to_numpy
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first

FLAGS = [("requires_grad",), ("stores_grad",), ("requires_grad", "stores_grad")]
FROZEN = ("body.W", "body.b")


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.body = layer.Linear(5)
        self.head = layer.Linear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(autograd.relu(self.body(x)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, y)
        self.optimizer(loss)
        return out, loss


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    return from_numpy(rng.normal(size=(8, 6)).astype(np.float32)), from_numpy(rng.integers(0, 3, 8, np.int32))


def frozen(flags: tuple[str, ...], use_graph: bool = False) -> Net:
    net = Net()
    net.set_optimizer(opt.SGD(0.1, momentum=0.9))
    net.compile(batch()[:1], use_graph=use_graph)
    for name in FROZEN:
        for flag in flags:
            setattr(net.get_params()[name], flag, False)
    return net


def bits(net: Net) -> dict[str, bytes]:
    return {name: to_numpy(value).tobytes() for name, value in net.get_params().items()}


@pytest.mark.parametrize("flags", FLAGS)
def test_a_checkpoint_has_them_and_a_load_sets_them(tmp_path: Path, flags: tuple[str, ...]) -> None:
    net, other = frozen(flags), frozen(flags)
    net(*batch())
    assert list(net.get_params()) == list(net.get_states()) == ["body.W", "body.b", "head.W", "head.b"]
    net.save_states(str(tmp_path / "net.zip"))
    checkpoint.save_job(tmp_path / "job", net)
    assert bits(other)["body.W"] != bits(net)["body.W"]
    other.load_states(str(tmp_path / "net.zip"))
    assert bits(other) == bits(net)
    third = frozen(())
    assert checkpoint.load_job(tmp_path / "job", third) is not None
    assert bits(third) == bits(net)


@pytest.mark.parametrize("use_graph", [False, True])
@pytest.mark.parametrize("flags", FLAGS)
def test_they_stay_as_they_are_until_they_are_unfrozen(flags: tuple[str, ...], use_graph: bool) -> None:
    net = frozen(flags, use_graph)
    before = bits(net)
    for step in range(4):
        net(*batch(step))
    after = bits(net)
    assert [name for name in before if before[name] == after[name]] == list(FROZEN)
    for param in net.get_params().values():
        param.requires_grad = param.stores_grad = True
    for step in range(4):
        net(*batch(step))
    assert all(bits(net)[name] != after[name] for name in after)
    assert use_graph == bool(net.graph_info())


def bits_of_rank(
    communicator: Communicator, flags: tuple[str, ...], option: str, use_graph: bool
) -> dict[str, bytes]:
    get_default_device().SetRandSeed(communicator.rank)
    net = frozen(flags, use_graph)  # with other values on each rank
    net.set_optimizer(opt.DistOpt(opt.SGD(0.1, momentum=0.9), communicator=communicator, dist_option=option))
    for step in range(4):
        net(*batch(10 * step + communicator.rank))
    return bits(net)


@slow_but_first("use_graph", [True, False])
@pytest.mark.parametrize("option", ["fp32", "sparseTopK:0.2", "powerSGD:2"])
def test_all_ranks_hold_those_of_rank_0(option: str, use_graph: bool) -> None:
    by_flags = [run_ranks(bits_of_rank, 3, flags, option, use_graph) for flags in FLAGS]
    for found in by_flags:
        assert len(found[0]) == 4 and found[0] == found[1] == found[2]


def test_a_tensor_that_no_layer_had_as_a_parameter_is_none() -> None:
    net = frozen(())
    net.mean = net.head.W.clone()
    net.mean.stores_grad = False
    assert "mean" not in net.get_states()


@pytest.mark.parametrize("flags", FLAGS)
def test_a_trainer_refuses_them_and_takes_the_others(flags: tuple[str, ...]) -> None:
    params = frozen(flags).get_params()
    with pytest.raises(DTypeError, match=r"body\.W: expected .*requires_grad=True, got .* leave out"):
        gluon.Trainer(params, "sgd")
    gluon.Trainer({name: params[name] for name in params if name not in FROZEN}, "sgd")


def test_another_optimizer_takes_the_weights_of_a_file_alone_before_it_is_set(tmp_path: Path) -> None:
    net, other = frozen(()), Net()
    net(*batch())
    net.save_states(str(tmp_path / "net.zip"))
    other.compile(batch()[:1])
    other.load_states(str(tmp_path / "net.zip"))
    assert bits(other) == bits(net)
    other.set_optimizer(opt.Adam(0.01))
    with pytest.raises(CheckpointError, match="load_states before set_optimizer"):
        other.load_states(str(tmp_path / "net.zip"))


class Renamed(Net):
    def get_params(self) -> dict[str, Tensor]:
        return {name.replace(".", "/"): value for name, value in super().get_params().items()}


def test_a_model_that_names_its_parameters_itself_can_save_a_job(tmp_path: Path) -> None:
    net = Renamed()
    net.set_optimizer(opt.SGD(0.1))
    net.compile(batch()[:1])
    net(*batch())
    checkpoint.save_job(tmp_path / "job", net)
    assert checkpoint.load_job(tmp_path / "job", net) is not None


class Shadow(layer.Layer):
    buffers = ("shadow",)

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.shadow = copy.deepcopy(value)
        self.shadow.stores_grad = False


def test_a_copy_of_a_parameter_that_a_layer_calls_a_buffer_is_one() -> None:
    net = frozen(())
    net.average = Shadow(net.get_params()["head.W"])
    assert "average.shadow" in net.get_states() and "average.shadow" not in net.get_params()
