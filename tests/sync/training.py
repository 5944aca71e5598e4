# SPDX-License-Identifier: Apache-2.0
"""Train a small model by a dist_option, eagerly or recorded, on batches that differ from rank to rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from singa_lite import autograd, layer, model, opt
from singa_lite.tensor import Tensor, to_numpy


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.loss = layer.Linear(6), layer.Linear(3), layer.MeanSquareError()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(autograd.tanh(self.first(x)))

    def train_one_batch(self, x: Tensor, y: Tensor, *options: Any) -> Tensor:
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss, *options)
        return loss


def made(
    communicator: Any,
    use_graph: bool,
    dist_option: str = "fp32",
    kind: type[Net] = Net,
    accumulate: int = 1,
    **sgd: Any,
) -> Net:
    """Return a compiled model, with the same parameters on all ranks; ``sgd``: arguments of SGD."""
    net = kind()
    schedule = opt.ExponentialDecay(0.1, 10, 0.5)
    net.set_optimizer(
        opt.DistOpt(
            opt.SGD(schedule, **sgd),
            communicator=communicator,
            dist_option=dist_option,
            threshold=20,
            accumulate=accumulate,
        )
    )
    net.compile([Tensor((4, 5))], use_graph=use_graph)
    rng = np.random.default_rng(2)
    net.set_params(
        {name: rng.standard_normal(p.shape).astype(np.float32) / 2 for name, p in net.get_params().items()}
    )
    return net


def steps(net: Net, rank: int, first: int, last: int, *options: Any) -> None:
    for step in range(first, last):
        rng = np.random.default_rng([rank, step])
        net(Tensor(data=rng.standard_normal((4, 5))), Tensor(data=rng.standard_normal((4, 3))), *options)
    autograd.training = False


def values(net: Net) -> dict[str, np.ndarray]:
    return {name: to_numpy(param) for name, param in net.get_params().items()}
