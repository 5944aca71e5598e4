# SPDX-License-Identifier: Apache-2.0
"""Recorded steps whose inputs, attributes or weights are arrays that the step itself writes or makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.device import get_default_device
from singa_lite.errors import GraphError
from singa_lite.tensor import Tensor, from_numpy, to_numpy


def made(net: model.Model, use_graph: bool, inputs: list[Tensor], **options: Any) -> Any:
    get_default_device().SetRandSeed(1)
    net.set_optimizer(opt.SGD(0.05))
    net.compile(inputs, use_graph=use_graph, **options)
    return net


def arrays(step: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    rng = np.random.default_rng(step)
    return [from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]


class Holds(model.Model):
    """Adds up in an attribute of its own, in the way that it is told."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.h, self.k, self.way = layer.Linear(5), Tensor((4, 5)), Tensor((4, 5)), way

    def forward(self, x: Tensor) -> Tensor:
        return autograd.tanh(self.a(x))

    def train_one_batch(self, x: Tensor, y: Tensor, h: Tensor | None = None) -> Tensor:
        if self.way == "swap":
            self.h, self.k = self.k, self.h
            self.h += y
        elif self.way == "rename":
            self.k, self.h = self.h, y * 1.0
            self.k *= 0.5
        elif self.way == "add":
            self.h *= 0.5
            self.h += y
        loss = autograd.mse_loss(self.forward(x) + (self.h if h is None else h) - self.k, y)
        self.optimizer(loss)
        return loss


@pytest.mark.parametrize("way", ["swap", "rename"])
def test_an_attribute_that_is_changed_in_place_and_set_is_as_in_an_eager_step(way: str) -> None:
    found = []
    for use_graph in (False, True):
        net = made(Holds(way), use_graph, arrays(0, (4, 6)))
        losses = [to_numpy(net(*arrays(step, (4, 6), (4, 5)))).item() for step in range(6)]
        found.append([*losses, *to_numpy(net.h).ravel(), *to_numpy(net.k).ravel()])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [[0, 1, 2, 3], [0, 2], [1, 3], [3]])
@pytest.mark.parametrize("way", ["add", "none"])
def test_an_input_that_is_a_tensor_of_the_model_is_as_in_an_eager_step(way: str, own: list[int]) -> None:
    found, other = [], Tensor((4, 5))
    for use_graph in (False, True):
        net = made(Holds(way), use_graph, arrays(0, (4, 6)))
        losses = []
        for step in range(8):
            h = net.h if step % 4 in own else other
            losses.append(to_numpy(net(*arrays(step, (4, 6), (4, 5)), h)).item())
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    reasons = [info.break_reason for info in net.graph_info()]
    assert (
        reasons == [None]
        if way == "none"
        else any("that the step writes" in reason for reason in reasons if reason)
    )
    assert None in reasons or own == [0, 1, 2, 3]


class Dynamic(model.Model):
    """The weights of one convolution are what another one computes."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.head = layer.Conv2d(16, 3, padding=1), layer.Linear(5)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.head(autograd.flatten(autograd.relu(autograd.conv2d(x, self.make(z)))))

    def train_one_batch(self, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x, z), y)
        self.optimizer(loss)
        return loss


def test_weights_that_a_convolution_has_made_are_read_in_the_order_they_are_in() -> None:
    shapes, found = [(2, 16, 8, 8), (16, 16, 3, 3), (2, 5)], []
    for use_graph in (False, True):
        net = made(Dynamic(), use_graph, arrays(0, *shapes[:2]))
        found.append([to_numpy(net(*arrays(step, *shapes))).item() for step in range(6)])
        params = np.concatenate([to_numpy(value).ravel() for value in net.get_params().values()])
        found[-1] += params.tolist()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3, atol=1e-5)


def test_a_graph_by_hand_that_writes_parameters_has_their_bfloat16_copies_made_again() -> None:
    found, device = [], get_default_device()
    for by_hand in (False, True):
        net = made(Holds("none"), True, arrays(0, (4, 6)), precision="bf16")
        params = list(net.get_params().values())
        if by_hand:
            device.EnableGraph(True)
            for param in params:
                param *= 0.5
            device.EnableGraph(False)
            for param in params:
                param *= 2.0
        losses = []
        for step in range(6):
            losses.append(to_numpy(net(*arrays(step, (4, 6), (4, 5)))).item())
            if step == 3 and by_hand:
                device.RunGraph()
            elif step == 3:
                for param in params:
                    param *= 0.5
        device.ResetGraph()
        found.append(losses)
    assert found[0] == found[1]


def test_a_graph_by_hand_in_which_a_layer_makes_its_parameters_is_not_replayed() -> None:
    device, linear, [x] = get_default_device(), layer.Linear(2), arrays(0, (4, 3))
    device.EnableGraph(True)
    linear(x)
    device.EnableGraph(False)
    with pytest.raises(GraphError, match="it makes the parameters of a Linear"):
        device.RunGraph()
    device.ResetGraph()
