# SPDX-License-Identifier: Apache-2.0
"""Uneven SAME_* padding inside a recorded step."""

from __future__ import annotations

import numpy as np

from singa_lite import autograd, device, layer, opt
from singa_lite.model import Model
from singa_lite.tensor import Tensor


def test_uneven_padding_replays_bit_equal() -> None:
    """The frame of a padded copy is filled again at every replay, though the arena gives its memory to others."""

    class Net(Model):
        def __init__(self) -> None:
            super().__init__()
            self.conv = layer.Conv2d(4, 3, stride=2, pad_mode="SAME_UPPER")
            self.pool = layer.MaxPool2d(2, 2, pad_mode="SAME_LOWER")
            self.flat, self.linear = layer.Flatten(), layer.Linear(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.flat(self.pool(self.conv(x))))

        def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
            loss = autograd.softmax_cross_entropy(self.forward(x), y)
            self.optimizer(loss)
            return loss

    losses = []
    images = [np.random.default_rng(seed).standard_normal((3, 1, 10, 9)) for seed in range(4)]
    for use_graph in (False, True):
        device.get_default_device().SetRandSeed(1)
        net = Net()
        net.set_optimizer(opt.SGD(0.1, momentum=0.9))
        net.compile([Tensor(data=images[0])], use_graph=use_graph)
        labels = Tensor(data=np.array([0, 1, 1]))
        losses.append([net(Tensor(data=image), labels).item() for image in images])
        assert bool(net.graph_info()) == use_graph
    assert losses[0] == losses[1]
