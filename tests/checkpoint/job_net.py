# SPDX-License-Identifier: Apache-2.0
"""A small model of everything that a job checkpoint keeps, and its batches: each rank's are its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from singa_lite import autograd, gluon, kvstore, layer, model, opt
from singa_lite.comm.base import Communicator
from singa_lite.device import get_default_device
from singa_lite.tensor import Tensor, from_numpy, to_numpy

OPTIONS = [
    "fp32",
    "fp16",
    "bf16",
    "int8:ef=1",
    "sign",
    "powerSGD:2",
    "hierarchical:int8:ef=1",
    "partialUpdate",
    "sparseTopK:0.05",
    "sparseThreshold:0.01",
    "randomK:0.1",
    "dgc:0.05",
    "localSGD:4",
]


class Net(model.Model):
    """Convolution, batch norm, dropout: fused kernels, statistics that differ from rank to rank, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = layer.Conv2d(16, 3, padding=1), layer.BatchNorm2d()
        self.relu, self.pool, self.dropout = layer.ReLU(), layer.MaxPool2d(2), layer.Dropout(0.3)
        self.flatten, self.linear = layer.Flatten(), layer.Linear(4)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(self.relu(self.norm(self.conv(x))))
        return self.linear(self.dropout(self.flatten(y)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The batch of a step; it draws from numpy's and Python's streams too, as a script's augmentation may."""
    rng = np.random.default_rng([step, rank])
    x = rng.standard_normal((6, 3, 6, 6)) + 0.01 * np.random.standard_normal(1) + 0.01 * random.gauss(0, 1)
    return from_numpy(x.astype(np.float32)), from_numpy(rng.integers(0, 4, 6))


def seed(rank: int) -> None:
    """Begin this rank's streams."""
    get_default_device().SetRandSeed(3 + rank)
    np.random.seed(5 + rank)
    random.seed(7 + rank)


def compiled(communicator: Communicator, option: str, use_graph: bool, **options: Any) -> Net:
    """A new model on a new DistOpt, with streams of this rank."""
    seed(communicator.rank)
    net = Net()
    sgd = opt.SGD(lr=opt.ExponentialDecay(0.1, 5, 0.8), momentum=0.9, weight_decay=1e-4)
    net.set_optimizer(
        opt.DistOpt(sgd, communicator=communicator, dist_option=option, threshold=60, **options)
    )
    net.compile([from_numpy(np.zeros((6, 3, 6, 6), np.float32))], use_graph=use_graph)
    return net


class WithTrainer(Net):
    """The same under a Trainer, whose gradients travel as 2 bits."""

    trainer: gluon.Trainer

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        with autograd.record():
            loss = self.loss(self.forward(x), y)
        loss.backward()
        self.trainer.step(1)
        return loss


def with_trainer(store: kvstore.KVStore, optimizer: opt.Optimizer, **options: Any) -> WithTrainer:
    """A new model on a new Trainer of a store, with streams of this worker."""
    seed(store.rank)
    net = WithTrainer()
    net.compile([from_numpy(np.zeros((6, 3, 6, 6), np.float32))])
    compression = {"type": "2bit", "threshold": 0.02}
    options = {"compression_params": compression, "reduction": "mean", **options}
    net.trainer = gluon.Trainer(net.get_params(), optimizer, kvstore=store, **options)
    net.train()
    return net


def train(net: Net, steps: range) -> None:
    """Make these steps."""
    for step in steps:
        net(*batch(step, net.optimizer.global_rank))
    autograd.training = False


def bits(net: Net) -> dict[str, bytes]:
    """All states of a rank."""
    values = {name: to_numpy(value).tobytes() for name, value in net.get_states().items()}
    updater = net.trainer if isinstance(net, WithTrainer) else net.optimizer
    return values | {name: value.tobytes() for name, value in updater.get_states().items()}
