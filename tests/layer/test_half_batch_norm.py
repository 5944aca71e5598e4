# SPDX-License-Identifier: Apache-2.0
"""A float16 model with batch normalisation, whose parameters and statistics are float32: it holds two dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.device import get_default_device
from singa_lite.errors import DTypeError
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks


class Net(model.Model):
    """conv, norm, ReLU, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = layer.Conv2d(3, 3), layer.BatchNorm2d(), layer.Linear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(autograd.flatten(autograd.relu(self.norm(self.conv(x)))))

    def train_one_batch(self, x: Tensor, y: Tensor, dist_option: str = "fp32", spars: Any = None) -> Any:
        loss = autograd.softmax_cross_entropy(self.forward(x), y)
        self.optimizer(loss, dist_option, spars)
        return loss


def compiled(communicator: Communicator, dtype: str = "float16", use_graph: bool = False) -> Net:
    get_default_device().SetRandSeed(3)
    net = Net()
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.05, momentum=0.9), communicator=communicator))
    net.compile([Tensor((6, 2, 5, 5), dtype=dtype)], use_graph=use_graph)
    return net


def train(net: Net, dtype: str, seed: int, *options: Any) -> list[float]:
    """The loss of each of six steps."""
    rng = np.random.default_rng(seed)
    losses = []
    for _ in range(6):
        x = Tensor(data=rng.standard_normal((6, 2, 5, 5)), dtype=dtype)
        y = Tensor(data=rng.integers(0, 4, 6), dtype="int32")
        losses.append(float(to_numpy(net(x, y, *options)).item()))
    return losses


@pytest.fixture(autouse=True)
def evaluation_afterwards() -> Any:
    yield
    autograd.training = False


@pytest.mark.usefixtures("device", "training")
def test_small_changes_of_the_statistics_are_not_lost() -> None:
    """1 + 1e-4 is 1 in float16."""
    norm, x = layer.BatchNorm2d(2, momentum=1e-4), Tensor(data=np.full((4, 2), 2.0), dtype="float16")
    norm(x)
    norm.running_mean.set_value(1.0)
    assert norm(x).dtype == "float16"
    np.testing.assert_allclose(to_numpy(norm.running_mean), 1.0001, rtol=1e-6)


@pytest.mark.usefixtures("device", "training")
def test_float16_parameters_are_refused() -> None:
    x, channel = Tensor((4, 3), dtype="float16"), Tensor((3,), dtype="float16")
    with pytest.raises(DTypeError, match="expected float32 scale beside float16 x, got float16"):
        autograd.batchnorm_2d(x, channel, channel, channel, channel)


@pytest.mark.parametrize("use_graph", [False, True])
def test_training_follows_that_in_float32(use_graph: bool) -> None:
    losses = {}
    for dtype in ("float32", "float16"):
        net = compiled(LocalCommunicator(World()), dtype, use_graph)
        losses[dtype] = train(net, dtype, 0)
        dtypes = {name: str(state.dtype) for name, state in net.get_states().items()}
        assert all(
            found == ("float32" if name.startswith("norm") else dtype) for name, found in dtypes.items()
        )
    np.testing.assert_allclose(losses["float16"], losses["float32"], rtol=1e-2)


def test_a_checkpoint_brings_both_dtypes_back(tmp_path: Path) -> None:
    net, other = compiled(LocalCommunicator(World())), compiled(LocalCommunicator(World()))
    train(net, "float16", 0)
    net.save_states(str(tmp_path / "states.zip"))
    other.load_states(str(tmp_path / "states.zip"))
    assert train(net, "float16", 1) == train(other, "float16", 1)


def states_after_each_option(communicator: Communicator, use_graph: bool) -> dict[str, bytes]:
    found = {}
    for option, spars in (("fp32", None), ("fp16", None), ("partialUpdate", None), ("sparseTopK", 0.3)):
        net = compiled(communicator, use_graph=use_graph)
        train(net, "float16", communicator.rank, option, spars)
        if option == "partialUpdate":
            net.optimizer.synchronize(net)
        found[option] = b"".join(to_numpy(param).tobytes() for param in net.get_params().values())
    return found


@pytest.mark.parametrize("use_graph", [False, True])
def test_three_ranks_hold_the_same_bits(use_graph: bool) -> None:
    results = run_ranks(states_after_each_option, 3, use_graph)
    assert results[0] == results[1] == results[2] and len(set(results[0].values())) == 4
