# SPDX-License-Identifier: Apache-2.0
"""Model.compile(precision="bf16"): eager and recorded steps, ranks, resume, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, data, layer, model, opt
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.config import this_thread
from singa_lite.device import get_default_device
from singa_lite.errors import DeviceError, DTypeError, OptionError
from singa_lite.tensor import Tensor, bfloat16, from_numpy, to_numpy
from tests.ranks import run_ranks

FIXTURE = Path(__file__).parent / "fixtures" / "mnist"


class Net(model.Model):
    """conv, norm, ReLU, pool, a residual addition, attention, layer norm, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = layer.Conv2d(4, 3, padding=1), layer.BatchNorm2d()
        self.again, self.pool = layer.Conv2d(4, 3, padding=1), layer.MaxPool2d(2, 2)
        self.attention, self.last = layer.MultiHeadAttention(2), layer.LayerNorm()
        self.linear = layer.Linear(4)
        self.dropout = layer.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.relu(self.norm(self.conv(x)))
        y = self.pool(y + self.again(y))
        y = autograd.reshape(y, (x.shape[0], 4, -1))
        y = self.dropout(self.last(y + self.attention(y)))
        return self.linear(autograd.flatten(y))

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Any:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, labels)
        self.optimizer(loss)
        return out, loss


class Plain(Net):
    """Without dropout, whose masks are others in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = layer.Dropout(0.0)


@pytest.fixture(autouse=True)
def evaluation_afterwards() -> Iterator[None]:
    yield
    autograd.training = False
    assert this_thread.autocast is None


def batch(step: int, rank: int = 0, count: int = 8) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([step, rank])
    labels = rng.integers(0, 4, count)
    x = rng.standard_normal((count, 1, 8, 8)) + labels.reshape(-1, 1, 1, 1)
    return from_numpy(x), from_numpy(labels)


def compiled(
    use_graph: bool,
    precision: str = "bf16",
    communicator: Communicator | None = None,
    kind: type[Net] = Net,
    lr: float = 0.02,
    **options: Any,
) -> Net:
    get_default_device().SetRandSeed(3)
    net = kind()
    sgd = opt.SGD(lr=lr, momentum=0.9, weight_decay=1e-4)
    net.set_optimizer(opt.DistOpt(sgd, communicator=communicator or LocalCommunicator(World()), **options))
    net.compile([batch(0)[0]], use_graph=use_graph, precision=precision)
    return net


def train(net: Net, steps: range, rank: int = 0, count: int = 8) -> list[float]:
    net.train()
    return [net(*batch(step, rank, count))[1].item() for step in steps]


def bits(net: Net) -> dict[str, bytes]:
    states = {name: to_numpy(value).tobytes() for name, value in net.get_states().items()}
    return states | {name: value.tobytes() for name, value in net.optimizer.get_states().items()}


def test_fifty_recorded_steps_follow_eager_ones_and_those_in_float32() -> None:
    losses = {
        (use_graph, precision): train(
            compiled(use_graph, precision, kind=Plain, lr=0.01), range(50), count=32
        )
        for use_graph, precision in ((False, "bf16"), (True, "bf16"), (True, "fp32"))
    }
    eager, recorded, wide = (np.array(values) for values in losses.values())
    assert np.mean(wide[-10:]) < 0.5 * wide[0]
    np.testing.assert_allclose(recorded, eager, rtol=0, atol=2e-2)
    assert (recorded != wide).any()
    np.testing.assert_allclose(np.mean(recorded[-10:]), np.mean(wide[-10:]), rtol=0.1, atol=2e-2)


@pytest.mark.parametrize("use_graph", [False, True])
def test_results_are_bfloat16_and_states_stay_float32(use_graph: bool) -> None:
    net = compiled(use_graph)
    for step in range(3):
        out, loss = net(*batch(step))
        assert (out.dtype, loss.dtype) == (bfloat16, "float32")
    assert {str(state.dtype) for state in net.get_states().values()} == {"float32"}
    net.eval()
    assert net(batch(9)[0]).dtype == bfloat16


def test_a_recorded_step_casts_the_weights_of_products_and_convolutions_once() -> None:
    net = compiled(True)
    train(net, range(3))
    (info,) = net.graph_info()
    assert info.break_reason is None and info.inputs.endswith(", bf16")
    casts = [node.removeprefix("cast -> bfloat16") for node in info.nodes if node.startswith("cast -> bf")]
    weights = [p for name, p in net.get_params().items() if name.split(".")[-1] == "W"]
    images, logits = [8, 1, 8, 8], [8, 4]  # the last on the way back
    assert sorted(casts) == sorted(map(str, [images, logits, *(list(w.shape) for w in weights)]))
    assert any(node.startswith(("conv2d -> bfloat16", "matmul -> bfloat16")) for node in info.nodes)


def test_a_record_belongs_to_the_precision_of_its_call() -> None:
    net = compiled(True, "fp32")
    train(net, range(2))
    with autograd.autocast("bf16"):
        narrow = [net(*batch(step))[0].dtype for step in range(3)]
    assert narrow == [bfloat16] * 3
    assert [net(*batch(step))[0].dtype for step in range(2)] == ["float32"] * 2
    assert [info.break_reason for info in net.graph_info()] == [None, None]
    assert sum(info.inputs.endswith(", bf16") for info in net.graph_info()) == 1


def test_a_block_in_train_one_batch_is_recorded() -> None:
    class Own(Plain):
        def train_one_batch(self, x: Tensor, labels: Tensor) -> Any:
            with autograd.autocast("bf16"):
                return super().train_one_batch(x, labels)

    net = compiled(True, "fp32", kind=Own)
    eager = compiled(False, "bf16", kind=Plain)
    np.testing.assert_allclose(train(net, range(6)), train(eager, range(6)), rtol=0, atol=1e-2)
    assert net.graph_info()[0].break_reason is None


class Twice(Plain):
    """Two updates a step: the second forward pass sees the parameters of the first."""

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Any:
        super().train_one_batch(x, labels)
        return super().train_one_batch(x, labels)


def test_a_second_update_in_a_step_uses_parameters_of_the_first() -> None:
    twice, once = compiled(False, kind=Twice), compiled(False, kind=Plain)
    for step in range(3):
        twice(*batch(step))
        once(*batch(step))
        once(*batch(step))
    assert bits(twice) == bits(once)
    recorded = compiled(True, kind=Twice)
    for step in range(3):
        recorded(*batch(step))
    weights = [to_numpy(net.conv.W) for net in (recorded, once)]
    np.testing.assert_allclose(*weights, rtol=0, atol=2e-3)
    assert recorded.graph_info()[0].break_reason is None


def test_a_graph_by_hand_makes_copies_of_its_own() -> None:
    device = get_default_device()
    x, w = Tensor(data=np.eye(2)), Tensor(data=np.eye(2), stores_grad=True)
    with autograd.autocast():
        y = autograd.matmul(x, w)  # its copy of w is not that of the graph
        device.EnableGraph(True)
        z = autograd.matmul(x, w)
        device.EnableGraph(False)
    w *= 3.0
    device.RunGraph()
    device.ResetGraph()
    np.testing.assert_array_equal(to_numpy(z).astype(float), 3 * np.eye(2))
    np.testing.assert_array_equal(to_numpy(y).astype(float), np.eye(2))


def trained(communicator: Communicator, use_graph: bool) -> list[Any]:
    found = []
    for dist_option in ("fp32", "bf16", "sparseTopK"):
        options = {"spars": 0.1} if dist_option == "sparseTopK" else {}
        net = compiled(use_graph, "bf16", communicator, dist_option=dist_option, **options)
        losses = train(net, range(6), communicator.rank)
        params = b"".join(to_numpy(param).tobytes() for param in net.get_params().values())
        found.append((params, losses))
    return found


@pytest.mark.parametrize("use_graph", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_hold_the_same_bits(size: int, use_graph: bool) -> None:
    results = run_ranks(trained, size, use_graph)
    for options in zip(*results, strict=True):
        assert len({params for params, _ in options}) == 1
        assert len({tuple(losses) for _, losses in options}) == size  # of different data
    assert len({params for params, _ in results[0]}) == 3


def resumed(communicator: Communicator, folder: str, use_graph: bool) -> bool:
    path = f"{folder}/{communicator.rank}"
    net = compiled(use_graph, "bf16", communicator, dist_option="bf16")
    train(net, range(4), communicator.rank)
    net.save_states(path)
    train(net, range(4, 9), communicator.rank)
    other = compiled(use_graph, "bf16", communicator, dist_option="bf16")
    other.load_states(path)
    train(other, range(4, 9), communicator.rank)
    return bits(net) == bits(other)


@pytest.mark.parametrize("use_graph", [False, True])
def test_a_run_that_goes_on_from_a_file_ends_with_the_same_bits(tmp_path: Path, use_graph: bool) -> None:
    assert run_ranks(resumed, 2, str(tmp_path), use_graph) == [True, True]


def test_a_file_of_one_precision_is_loaded_in_the_other(tmp_path: Path) -> None:
    net, other = compiled(False), compiled(False, "fp32")
    train(net, range(3))
    net.save_states(tmp_path / "states")
    other.load_states(tmp_path / "states")
    assert bits(net) == bits(other)


def gradients_sent(communicator: Communicator) -> tuple[np.ndarray, np.ndarray]:
    """The update of a weight by dist_option bf16, and the gradients of this rank in float32."""
    net = compiled(False, "bf16", communicator, Plain)
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=1.0), communicator=communicator, dist_option="bf16"))
    before = to_numpy(net.linear.W)
    with autograd.autocast("bf16"):
        x, labels = batch(0, communicator.rank)
        autograd.training = True
        loss = autograd.softmax_cross_entropy(net.forward(x), labels)
        own = to_numpy(autograd.gradients(loss)[net.linear.W])
        loss = autograd.softmax_cross_entropy(net.forward(x), labels)
    net.optimizer(loss)
    return to_numpy(net.linear.W) - before, own


def test_a_gradient_is_rounded_for_the_wire_and_as_a_mean_alone() -> None:
    results = run_ranks(gradients_sent, 2)
    exact = np.mean([own for _, own in results], axis=0)
    assert (results[0][1] != results[0][1].astype(bfloat16).astype("f")).mean() > 0.9  # none before the wire
    rounded = [own.astype(bfloat16).astype("f") for _, own in results]
    expected = np.mean(rounded, axis=0).astype(bfloat16).astype("f")
    np.testing.assert_allclose(-results[0][0], expected, rtol=1e-3, atol=1e-7)
    assert abs(results[0][0] + exact).max() <= 2**-7 * abs(exact).max()


class Digits(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = layer.Conv2d(8, 3), layer.MaxPool2d(2, 2)
        self.linear = layer.Linear(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(autograd.flatten(self.pool(autograd.relu(self.conv(x)))))

    def train_one_batch(self, x: Tensor, labels: Tensor) -> Any:
        loss = autograd.softmax_cross_entropy(self.forward(x), labels)
        self.optimizer(loss)
        return loss


def test_a_net_learns_digits_as_well_as_in_float32() -> None:
    mnist = data.load_mnist(FIXTURE)
    correct = {}
    for precision in ("fp32", "bf16"):
        get_default_device().SetRandSeed(1)
        net = Digits()
        net.set_optimizer(opt.SGD(lr=0.05, momentum=0.9))
        net.compile([Tensor((50, 1, 28, 28))], use_graph=True, precision=precision)
        for _ in range(8):
            for start in range(0, 300, 50):
                x, y = data.make_batch(mnist.train_images, mnist.train_labels, slice(start, start + 50))
                net(from_numpy(x), from_numpy(y))
        net.eval()
        x, y = data.make_batch(mnist.test_images, mnist.test_labels, slice(0, 100))
        correct[precision] = int((to_numpy(net(from_numpy(x))).astype("f").argmax(axis=1) == y).sum())
    assert correct["bf16"] >= 75 and abs(correct["bf16"] - correct["fp32"]) <= 3


def test_compile_refuses_what_it_does_not_compute_and_changes_nothing() -> None:
    net = Net()
    with pytest.raises(OptionError, match=r"compile: precision.*choose one of 'fp32', 'bf16', 'fp16'"):
        net.compile([batch(0)[0]], precision="bf8")
    with pytest.raises(DeviceError, match=r"compile: precision 'fp16' .*CPUs have no instructions"):
        net.compile([batch(0)[0]], precision="fp16")
    with pytest.raises(OptionError, match="compile: precision"):
        net.compile([batch(0)[0]], precision=None)  # type: ignore[arg-type]
    assert not net.get_params()
    with pytest.raises(DTypeError, match=r"Conv2d: .*not float64.*precision\.md"):
        net.compile([Tensor((2, 1, 8, 8), dtype="float64")], precision="bf16")
    net.compile([batch(0)[0]], is_train=False)
    assert net(batch(0)[0]).dtype == "float32"


class HoldsItsBatch(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer.Linear(16), layer.Linear(4)
        self.batch = Tensor((4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(autograd.relu(self.first(x)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def test_a_run_whose_batch_is_the_models_resumes_with_the_same_bits(tmp_path: Path) -> None:
    def made() -> HoldsItsBatch:
        get_default_device().SetRandSeed(7)
        net = HoldsItsBatch()
        net.set_optimizer(opt.SGD(lr=0.05, momentum=0.9))
        net.compile([net.batch], use_graph=True, precision="bf16")
        return net

    def train(net: HoldsItsBatch, steps: range) -> None:
        for step in steps:
            rng = np.random.default_rng(step)
            net.batch.copy_from_numpy(rng.standard_normal((4, 8)).astype(np.float32))
            net(net.batch, from_numpy(rng.standard_normal((4, 4)).astype(np.float32)))

    saved, resumed = made(), made()
    train(saved, range(3))
    saved.save_states(tmp_path / "states.zip")
    resumed.load_states(tmp_path / "states.zip")
    for net in (saved, resumed):
        train(net, range(3, 9))
        assert [info.break_reason for info in net.graph_info()] == [None]
    for name, value in saved.get_params().items():
        np.testing.assert_array_equal(to_numpy(value), to_numpy(resumed.get_params()[name]))
