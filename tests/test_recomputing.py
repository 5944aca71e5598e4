# SPDX-License-Identifier: Apache-2.0
"""Outputs that a recorded step in mixed precision does not keep for backward: same bits, less memory."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.autograd.engine import Context, Recomputed
from singa_lite.autograd.ops import arithmetic
from singa_lite.autograd.ops.arithmetic import Add
from singa_lite.autograd.ops.norm import BatchNorm2d
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.device import get_default_device
from singa_lite.tensor import Tensor, from_numpy, to_numpy
from tests.ranks import run_ranks

CHANNELS, SIZE, BATCH = 32, 16, 8
IMAGE_BYTES = 2 * BATCH * CHANNELS * SIZE * SIZE  # of bfloat16


class Block(layer.Layer):
    """relu(norm(conv(relu(norm(conv(x))))) + shortcut(x))."""

    def __init__(self, has_projection: bool, stride: int = 1) -> None:
        super().__init__()
        self.conv = layer.Conv2d(CHANNELS, 3, stride=stride, padding=1, bias=False)
        self.norm = layer.BatchNorm2d(eps=0.1)
        self.again, self.last = layer.Conv2d(CHANNELS, 3, padding=1, bias=False), layer.BatchNorm2d()
        if has_projection:
            self.project = layer.Conv2d(CHANNELS, 1, stride=stride, bias=False)
            self.scale = layer.BatchNorm2d()
        self.has_projection = has_projection

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.scale(self.project(x)) if self.has_projection else x
        y = self.last(self.again(autograd.relu(self.norm(self.conv(x)))))
        return autograd.relu(y + shortcut)


class Net(model.Model):
    """A stem and blocks: "i" without a projection, "p" with one, "h" with one that halves the image."""

    def __init__(self, blocks: str) -> None:
        super().__init__()
        self.conv, self.norm = layer.Conv2d(CHANNELS, 3, padding=1, bias=False), layer.BatchNorm2d()
        self.blocks = [Block(kind != "i", 2 if kind == "h" else 1) for kind in blocks]
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


class ChangesBias(Net):
    """Writes to the bias of a norm between forward and backward, which does not read it."""

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Any:
        loss = autograd.softmax_cross_entropy(self.forward(x), labels)
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


class AddsNorms(Net):
    """Adds a norm with a ReLU, which no gradient of a weight needs."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        for block in self.blocks:
            y = y + autograd.relu(block.norm(block.conv(y)))
        return self.linear(autograd.flatten(y))


class Rows(Net):
    """Norms of rows, where nothing is large."""

    def __init__(self, blocks: str) -> None:
        super().__init__(blocks)
        self.rows = [layer.Linear(16) for _ in range(3)]
        self.norms = [layer.BatchNorm2d() for _ in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.flatten(x)
        for rows, norm in zip(self.rows, self.norms, strict=True):
            y = autograd.relu(norm(rows(y)))
        return self.linear(y)


class Wide(Net):
    """A gradient larger than all images, the first of backward."""

    def __init__(self, blocks: str) -> None:
        super().__init__(blocks)
        self.linear = layer.Linear(4096)


class ShortcutLast(Net):
    """Makes the norm of a shortcut behind that of the branch, and not before it."""

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.relu(self.norm(self.conv(x)))
        for block in self.blocks:
            branch = block.last(block.again(autograd.relu(block.norm(block.conv(y)))))
            y = autograd.relu(branch + block.scale(block.project(y)))
        return self.linear(autograd.flatten(y))


class AddsOtherShapes(Net):
    """Adds norms that broadcast, and one to itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        for block in self.blocks:
            small = block.last(autograd.avg_pool_2d(y, SIZE, SIZE))
            norm = block.norm(y)
            y = block.conv(autograd.relu(small + norm) + autograd.relu(norm + norm))
        return self.linear(autograd.flatten(y))


class UsesNoAux(Net):
    """Has a branch that the loss does not depend on."""

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Any:
        y = self.conv(x)
        aux = self.blocks[0](autograd.relu(self.norm(y)))
        loss = autograd.softmax_cross_entropy(self.linear(autograd.flatten(y)), labels)
        del aux, y
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
    is_distributed: bool = True,
    **options: Any,
) -> tuple[Net, dict[str, bytes]]:
    """A model after four steps, and its states."""
    get_default_device().SetRandSeed(3)
    communicator = communicator or LocalCommunicator(World())
    net, sgd = make(), opt.SGD(0.05, momentum=0.9)
    net.set_optimizer(opt.DistOpt(sgd, communicator=communicator, **options) if is_distributed else sgd)
    net.compile([batch(0)[0]], use_graph=use_graph, precision=precision)
    results = [net(*batch(step, communicator.rank)) for step in range(4)]
    states = {name: to_numpy(value).tobytes() for name, value in net.get_states().items()}
    last = results[-1] if isinstance(results[-1], tuple) else (results[-1],)
    return net, states | {f"result {k}": to_numpy(value).tobytes() for k, value in enumerate(last)}


def num_norms(net: Net) -> int:
    [info] = net.graph_info()
    assert info.break_reason is None
    return sum(node.startswith("batchnorm_2d_train") for node in info.nodes)


def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchNorm2d, "_recomputation", lambda *arguments: None)


MODELS = {
    "identity": lambda: Net("ii"),
    "projection": lambda: Net("pi"),
    "stages": lambda: Net("iihih"),
    "shortcut last": lambda: ShortcutLast("ph"),
    "changes a bias": lambda: ChangesBias("i"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_has_the_same_bits_as_one_that_keeps_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, states = trained(MODELS[name])
    keep_all(monkeypatch)
    keeps, others = trained(MODELS[name])
    assert num_norms(net) > num_norms(keeps)
    assert states == others


KEPT = {
    "adds norms": lambda: AddsNorms("iii"),
    "rows": lambda: Rows("i"),
    "other shapes": lambda: AddsOtherShapes("ii"),
    "returns features": lambda: ReturnsFeatures("p"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_anyway_or_saves_nothing_is_not_computed_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, states = trained(KEPT[name])
    keep_all(monkeypatch)
    keeps, others = trained(KEPT[name])
    extra = 3 if name == "returns features" else 0  # the norms of its block
    assert num_norms(net) - num_norms(keeps) == extra
    [mine], [other] = net.graph_info(), keeps.graph_info()
    assert mine.num_bytes <= other.num_bytes + 4096 and states == others


def on_ranks(communicator: Communicator, dist_option: str) -> dict[str, bytes]:
    _, states = trained(lambda: Net("pi"), communicator=communicator, dist_option=dist_option)
    BatchNorm2d._recomputation = lambda *arguments: None
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
    keep_all(monkeypatch)
    keeps, _ = trained(lambda: Net("pi"))
    [less], [more] = net.graph_info(), keeps.graph_info()
    # those of the first norm of each block, of which one at a time is there
    assert more.num_bytes - less.num_bytes >= 2 * IMAGE_BYTES


def test_sums_of_large_images_are_not_kept_while_small_ones_are_on_their_way_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, states = trained(lambda: Wide("iihh"), is_distributed=False)
    monkeypatch.setattr(Add, "_recomputation", lambda *arguments: None)
    keeps, others = trained(lambda: Wide("iihh"), is_distributed=False)
    [less], [more] = net.graph_info(), keeps.graph_info()
    assert more.num_bytes - less.num_bytes >= 2 * IMAGE_BYTES and states == others


def test_gradients_of_relus_are_part_of_those_of_their_norms() -> None:
    net, _ = trained(lambda: Net("ii"))
    [info] = net.graph_info()
    assert num_norms(net) == 5 + 8
    assert sum(node.startswith("relu_backward") for node in info.nodes) == 2  # of the sums


def test_sums_behind_many_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "MAX_SUMS", 2)
    net, states = trained(lambda: Net("iiii"))
    keep_all(monkeypatch)
    keeps, others = trained(lambda: Net("iiii"))
    # those of the stem, thrice, of four blocks, and of the sums of two of these, one of them twice
    assert num_norms(net) - num_norms(keeps) == 3 + 4 + 3 and states == others


@pytest.mark.slow
def test_a_stage_of_many_blocks_takes_no_more_of_the_stack_than_a_short_one() -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 250)
    try:
        net, _ = trained(lambda: Net("i" * 70))
    finally:
        sys.setrecursionlimit(before)
    assert num_norms(net) > 2 * 70 + 1


def num_contexts() -> int:
    return sum(isinstance(each, (Context, Recomputed)) for each in gc.get_objects())


def test_contexts_are_given_back_without_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        before = num_contexts()
        trained(lambda: UsesNoAux("i"))
        assert num_contexts() == before
    finally:
        gc.enable()


class SetsSaved(autograd.Operator):
    """An operator of a script that keeps what it likes, and has a method called recompute."""

    is_recordable = True
    autocast = "keep"

    def recompute(self, x: Any) -> Any:
        return x

    def forward(self, context: Any, x: Any) -> Any:
        y = context.empty(x.shape, x.dtype)
        context.run("copy", self.recompute(x), out=y)
        context.saved = {"x": x}
        return y

    def backward(self, context: Any, dy: Any) -> Any:
        assert context.saved["x"].shape == dy.shape
        dx = context.empty(dy.shape, dy.dtype)
        context.run("copy", dy, out=dx)
        return dx


class HasOwn(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = SetsSaved()(autograd.relu(self.norm(self.conv(x))))
        return self.linear(autograd.flatten(self.blocks[0](y)))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
def test_an_operator_of_a_script_may_keep_what_it_likes(use_graph: bool, precision: str) -> None:
    trained(lambda: HasOwn("i"), use_graph, precision)


@pytest.mark.parametrize(
    ("use_graph", "precision"), [(True, "fp32"), (False, "bf16")], ids=["float32", "eager"]
)
def test_other_steps_keep_all(use_graph: bool, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Recomputed, *arguments: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(Recomputed, "__init__", refuse)
    trained(lambda: Net("pi"), use_graph, precision)
