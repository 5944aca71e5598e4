# SPDX-License-Identifier: Apache-2.0
"""Recorded steps update parameters while backward runs, with the bits of eager ones, which update at the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.autograd.parts import backward_in_parts
from singa_lite.backend.cpu import CpuBackend
from singa_lite.opt import base
from singa_lite.tensor import Tensor, from_numpy, to_numpy

STEPS = 4


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parts of a few numbers, and kernels as they were recorded: lowered ones round differently."""
    monkeypatch.setattr(base, "PART_BYTES", 64)
    monkeypatch.setattr(CpuBackend, "lower", lambda self, nodes: nodes)
    yield
    autograd.training = False


class Net(model.Model):
    """Three layers of which the second is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = layer.Linear(6), layer.Linear(6), layer.Linear(1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = autograd.tanh(self.second(autograd.tanh(self.first(x))))
        return self.third(autograd.tanh(self.second(hidden)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


class ReadLater(Net):
    """An operator before the second layer reads its weight, and again for the gradient of its own input."""

    def read(self, x: Tensor, weight: Tensor) -> Tensor:
        return autograd.matmul(x, weight)

    def forward(self, x: Tensor) -> Tensor:
        if not autograd.training:
            return super().forward(x)
        hidden, weight = autograd.tanh(self.first(x)), self.second.W
        weight.requires_grad = False
        hidden = self.read(hidden, weight)
        weight.requires_grad = True
        return self.third(autograd.tanh(self.second(hidden)))


class KeepsOnItself(autograd.Operator):
    """A product as SINGA's operators are written, with what backward needs on the operator."""

    def forward(self, context: Any, *inputs: Any) -> Any:
        self.inputs = inputs
        out = context.empty((inputs[0].shape[0], inputs[1].shape[1]), inputs[0].dtype)
        context.run("matmul", *inputs, out=out, transpose_a=False, transpose_b=False)
        return out

    def backward(self, context: Any, *dys: Any) -> Any:
        (x, w), (dy,) = self.inputs, dys
        dx = context.empty(x.shape, x.dtype)
        context.run("matmul", dy, w, out=dx, transpose_a=False, transpose_b=True)
        return dx, None


class ReadLaterByAnother(ReadLater):
    def read(self, x: Tensor, weight: Tensor) -> Tensor:
        return KeepsOnItself()(x, weight)


def data(step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(step)
    return tuple(from_numpy(rng.standard_normal((5, size)).astype(np.float32)) for size in (6, 1))  # type: ignore[return-value]


def trained(kind: type[Net], optimizer: opt.Optimizer, use_graph: bool) -> tuple[Net, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    net = kind()
    net.set_optimizer(optimizer)
    net.compile([data(0)[0]], use_graph=use_graph)
    for value in net.get_params().values():
        value.copy_from_numpy(0.5 * rng.standard_normal(value.shape).astype(np.float32))
    for step in range(STEPS):
        net(*data(step))
    states = {name: np.array(value) for name, value in optimizer.get_states().items()}
    return net, {**{name: to_numpy(value) for name, value in net.get_params().items()}, **states}


def num_updates(net: Net) -> int:
    (info,) = net.graph_info()
    assert info.break_reason is None
    return sum("_update" in node.split(" ")[0] for node in info.nodes)


OPTIMIZERS = [
    lambda: opt.SGD(lr=0.3),
    lambda: opt.SGD(lr=opt.ExponentialDecay(0.3, 1, 0.5), momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda: opt.Adam(lr=0.05),
    lambda: opt.AdamW(lr=0.05),
    lambda: opt.RMSProp(lr=0.01),
    lambda: opt.AdaGrad(lr=0.05),
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: repr(make()).split("(")[0])
@pytest.mark.parametrize("kind", [Net, ReadLater, ReadLaterByAnother])
def test_updates_in_parts_give_the_bits_of_updates_at_the_end(kind: Any, make: Any) -> None:
    (_, expected), (net, found) = trained(kind, make(), False), trained(kind, make(), True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert num_updates(net) == 1 if kind is ReadLaterByAnother else num_updates(net) > 1


def test_a_parameter_waits_for_the_operators_that_read_it() -> None:
    net, _ = trained(ReadLater, opt.SGD(lr=0.1), False)
    autograd.training = True
    x, y = data(9)
    parts = list(backward_in_parts(autograd.mse_loss(net.forward(x), y), 1))
    numbers = {id(param): number for number, part in enumerate(parts) for param, _ in part}
    assert len(numbers) == len(net.get_params()) == sum(map(len, parts))
    # the product in between reads the weight for the gradient of its input, when that of the bias is there
    assert numbers[id(net.third.W)] < numbers[id(net.second.b)] < numbers[id(net.second.W)]


def test_gradients_of_a_replay_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deep(Net):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [layer.Linear(100) for _ in range(4)]

        def forward(self, x: Tensor) -> Tensor:
            for each in self.hidden:
                x = autograd.tanh(each(x))
            return self.third(x)

    held = []
    for part_bytes in (1 << 30, 1 << 10):
        monkeypatch.setattr(base, "PART_BYTES", part_bytes)
        net, _ = trained(Deep, opt.SGD(lr=0.1), True)
        held.append(net.graph_info()[0].num_bytes)
    assert held[0] - held[1] > 100 * 100 * 4  # three gradients of so many numbers are there at once, or fewer


def test_a_class_of_its_own_update_gets_all_pairs_at_once_unless_it_says_so() -> None:
    sizes: list[int] = []

    class Own(opt.SGD):
        is_recordable = True

        def update_all(self, pairs: Any) -> None:
            sizes.append(len(list(pairs)))
            super().update_all(pairs)

    class InParts(Own):
        is_recordable = is_per_parameter = True

        def update_all(self, pairs: Any) -> None:
            super().update_all(pairs)

    net, _ = trained(Net, Own(lr=0.1), True)
    assert sizes == [len(net.get_params())] and num_updates(net) == 1
    sizes.clear()
    net, _ = trained(Net, InParts(lr=0.1), True)
    assert len(sizes) > 1 and sum(sizes) == len(net.get_params())
    assert not Own.is_per_parameter and type("Renamed", (opt.SGD,), {}).is_per_parameter
