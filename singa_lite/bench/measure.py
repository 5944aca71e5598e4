# SPDX-License-Identifier: Apache-2.0
"""Measure a calibration: steps of the MNIST CNN on one rank, with the dist_options that this package has."""

from __future__ import annotations

import math
import platform
import time
from pathlib import Path

import numpy as np

from .. import layer, model, opt, tensor
from ..comm.base import World
from ..comm.local import LocalCommunicator
from ..device import get_num_threads
from .calibration import BucketShapes, Calibration, OptionTimes, write_calibration

MEASURED = (
    "fp32",
    "fp16",
    "bf16",
    "int8",
    "sign",
    "powerSGD:4",
    "sparseTopK:0.01",
    "dgc:0.001",
    "randomK:0.1",
    "localSGD:8",
)
BATCH, ROUNDS, WARM_UP = 64, 40, 4
LIMIT_S = 30.0  # on a busy machine fewer rounds have to do


class _Network(model.Model):
    """The CNN of examples/model/cnn.py."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.relu1, self.pool1 = layer.Conv2d(20, 5), layer.ReLU(), layer.MaxPool2d(2, 2)
        self.conv2, self.relu2, self.pool2 = layer.Conv2d(50, 5), layer.ReLU(), layer.MaxPool2d(2, 2)
        self.flatten, self.linear1, self.relu3 = layer.Flatten(), layer.Linear(500), layer.ReLU()
        self.linear2, self.loss = layer.Linear(10), layer.SoftMaxCrossEntropy()

    def forward(self, x: tensor.Tensor) -> tensor.Tensor:
        y = self.pool1(self.relu1(self.conv1(x)))
        y = self.pool2(self.relu2(self.conv2(y)))
        out: tensor.Tensor = self.linear2(self.relu3(self.linear1(self.flatten(y))))
        return out

    def train_one_batch(self, x: tensor.Tensor, y: tensor.Tensor) -> tensor.Tensor:
        loss: tensor.Tensor = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def measure(rounds: int = ROUNDS, limit_s: float = LIMIT_S) -> Calibration:
    """Measure steps of the CNN with 64 images on one rank, in this process, on the CPU; takes some seconds.

    What an option compresses and merges is its step minus that of fp32, of each the shortest, as other programs only
    make steps longer. The CNN is one bucket, ready at the end of the step: the update is in ``compute_s``.

    Args:
        rounds: of a step of each option, >= 1.
        limit_s: seconds after which no more rounds begin.
    """
    rng = np.random.default_rng(0)
    x = tensor.from_numpy(rng.standard_normal((BATCH, 1, 28, 28)).astype(np.float32))
    y = tensor.from_numpy(rng.integers(0, 10, BATCH).astype(np.int32))
    networks = {option: _network(option, x) for option in MEASURED}
    for network in networks.values():
        for _ in range(WARM_UP):
            network(x, y)
    shortest = dict.fromkeys(networks, math.inf)
    end = time.perf_counter() + limit_s
    for _ in range(rounds):
        for option, network in networks.items():
            start = time.perf_counter()
            network(x, y)
            shortest[option] = min(shortest[option], time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    compute_s = shortest["fp32"]
    options = {option: OptionTimes(max(0.0, seconds - compute_s)) for option, seconds in shortest.items()}
    shapes = tuple(tuple(value.shape) for value in networks["fp32"].get_params().values())
    about = f"MNIST CNN, {BATCH} images, {platform.machine()}, {get_num_threads()} threads"
    return Calibration(compute_s, 0.0, (BucketShapes(compute_s, shapes),), options, about)


def main(path: str) -> None:
    """Measure, and write the calibration to ``path``."""
    write_calibration(Path(path), measure())


def _network(option: str, x: tensor.Tensor) -> _Network:
    sgd = opt.SGD(lr=0.005, momentum=0.9, weight_decay=1e-5)
    alone = LocalCommunicator(World())
    network = _Network()
    network.set_optimizer(opt.DistOpt(sgd, dist_option=option, communicator=alone))
    network.compile([x], is_train=True, use_graph=True)
    return network
