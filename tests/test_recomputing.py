# SPDX-License-Identifier: Apache-2.0
"""Outputs that a recorded step in mixed precision does not keep for backward: same bits, less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.autograd.engine import Recomputed
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.device import get_default_device
from singa_lite.tensor import Tensor, bfloat16, from_numpy, to_numpy
from tests.ranks import run_ranks

CHANNELS, SIZE, BATCH = 32, 16, 8
IMAGE_BYTES = 2 * BATCH * CHANNELS * SIZE * SIZE  # of bfloat16


class Block(layer.Layer):
    """relu(norm(conv(relu(norm(conv(x))))) + shortcut(x))."""

    def __init__(self, has_projection: bool) -> None:
        super().__init__()
        self.conv, self.norm = layer.Conv2d(CHANNELS, 3, padding=1, bias=False), layer.BatchNorm2d()
        self.again, self.last = layer.Conv2d(CHANNELS, 3, padding=1, bias=False), layer.BatchNorm2d()
        if has_projection:
            self.project, self.scale = layer.Conv2d(CHANNELS, 1, bias=False), layer.BatchNorm2d()
        self.has_projection = has_projection

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.again(autograd.relu(self.norm(self.conv(x)))))
        return autograd.relu(y + (self.scale(self.project(x)) if self.has_projection else x))


class Net(model.Model):
    """A stem and blocks without ("i") or with ("p") a projection."""

    def __init__(self, blocks: str) -> None:
        super().__init__()
        self.conv, self.norm = layer.Conv2d(CHANNELS, 3, padding=1, bias=False), layer.BatchNorm2d()
        self.blocks = [Block(kind == "p") for kind in blocks]
        self.register_layers(*self.blocks)
        self.linear = layer.Linear(4)

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.relu(self.norm(self.conv(x)))
        for block in self.blocks:
            y = block(y)
        return self.linear(autograd.flatten(y))

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Any:
        loss = autograd.softmax_cross_entropy(self.forward(x), labels)
        self.optimizer(loss)
        return loss


class ChangesNorms(Net):
    """Writes to the scale and bias of a norm between forward and backward."""

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Any:
        loss = autograd.softmax_cross_entropy(self.forward(x), labels)
        self.norm.scale += 1
        self.norm.bias += 1
        self.optimizer(loss)
        return loss


class ReturnsFeatures(Net):
    """Hands on an output that backward computes again."""

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Any:
        features = autograd.relu(self.norm(self.conv(x)))
        loss = autograd.softmax_cross_entropy(self.linear(autograd.flatten(self.blocks[0](features))), labels)
        self.optimizer(loss)
        return loss, features


class EvaluatesOne(Net):
    """One norm uses its running statistics in training."""

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Any:
        autograd.training = False
        y = self.norm(self.conv(x))
        autograd.training = True
        loss = autograd.softmax_cross_entropy(
            self.linear(autograd.flatten(self.blocks[0](autograd.relu(y)))), labels
        )
        self.optimizer(loss)
        return loss


@pytest.fixture(autouse=True)
def evaluation_afterwards() -> Iterator[None]:
    yield
    autograd.training = False


def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([step, rank])
    x = rng.standard_normal((BATCH, 3, SIZE, SIZE)).astype(np.float32)
    return from_numpy(x), from_numpy(rng.integers(0, 4, BATCH).astype(np.int32))


def trained(
    make: Callable[[], Net],
    use_graph: bool = True,
    precision: str = "bf16",
    communicator: Communicator | None = None,
    **options: Any,
) -> tuple[Net, dict[str, bytes]]:
    """A model after four steps, and its states."""
    get_default_device().SetRandSeed(3)
    communicator = communicator or LocalCommunicator(World())
    net = make()
    net.set_optimizer(opt.DistOpt(opt.SGD(0.05, momentum=0.9), communicator=communicator, **options))
    net.compile([batch(0)[0]], use_graph=use_graph, precision=precision)
    results = [net(*batch(step, communicator.rank)) for step in range(4)]
    states = {name: to_numpy(value).tobytes() for name, value in net.get_states().items()}
    last = results[-1] if isinstance(results[-1], tuple) else (results[-1],)
    return net, states | {f"result {k}": to_numpy(value).tobytes() for k, value in enumerate(last)}


def num_norms(net: Net) -> int:
    [info] = net.graph_info()
    assert info.break_reason is None
    return sum(node.startswith("batchnorm_2d_train") for node in info.nodes)


MODELS = {
    "identity": lambda: Net("ii"),
    "projection": lambda: Net("pi"),
    "changes norms": lambda: ChangesNorms("i"),
    "evaluates one": lambda: EvaluatesOne("i"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_has_the_same_bits_as_one_that_keeps_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, states = trained(MODELS[name])
    monkeypatch.setattr(Recomputed, "MOST_KERNELS", 0)
    keeps, others = trained(MODELS[name])
    assert num_norms(net) > num_norms(keeps)
    assert states == others


def test_an_output_that_the_step_returns_is_that_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    net, states = trained(lambda: ReturnsFeatures("p"))
    monkeypatch.setattr(Recomputed, "MOST_KERNELS", 0)
    keeps, others = trained(lambda: ReturnsFeatures("p"))
    assert num_norms(net) > num_norms(keeps)
    for name, value in states.items():  # weights of another layout of the images are summed in another order
        dtype = bfloat16 if name == "result 1" else np.float32
        mine, other = (np.frombuffer(each, dtype).astype(np.float32) for each in (value, others[name]))
        np.testing.assert_allclose(mine, other, rtol=1e-2, atol=1e-3)


def on_ranks(communicator: Communicator, dist_option: str) -> dict[str, bytes]:
    _, states = trained(lambda: Net("pi"), communicator=communicator, dist_option=dist_option)
    Recomputed.MOST_KERNELS = 0
    _, others = trained(lambda: Net("pi"), communicator=communicator, dist_option=dist_option)
    assert states == others
    return {name: value for name, value in states.items() if not name.startswith("result")}


@pytest.mark.parametrize("dist_option", ["bf16", "sparseTopK"])
def test_ranks_hold_equal_bits(dist_option: str) -> None:
    params = run_ranks(on_ranks, 3, dist_option)
    means = [{name: value for name, value in one.items() if "running" not in name} for one in params]
    assert means[0] == means[1] == means[2]


def test_memory_is_that_of_the_outputs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    net, _ = trained(lambda: Net("pi"))
    monkeypatch.setattr(Recomputed, "MOST_KERNELS", 0)
    keeps, _ = trained(lambda: Net("pi"))
    [less], [more] = net.graph_info(), keeps.graph_info()
    # those of the stem, of the first norm of each block, and of the block with a projection; one at a time is there
    assert more.num_bytes - less.num_bytes >= 3 * IMAGE_BYTES


def test_a_chain_of_residual_blocks_is_not_computed_again_from_its_start() -> None:
    net, _ = trained(lambda: Net("iiiiii"))
    # 13 of the forward pass, the first of each block and of the stem, and what the first block's output takes
    assert num_norms(net) == 13 + 7 + 2


@pytest.mark.parametrize(
    ("use_graph", "precision"), [(True, "fp32"), (False, "bf16")], ids=["float32", "eager"]
)
def test_other_steps_keep_all(use_graph: bool, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Recomputed, *arguments: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(Recomputed, "__init__", refuse)
    trained(lambda: Net("pi"), use_graph, precision)
