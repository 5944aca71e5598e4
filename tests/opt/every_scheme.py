# SPDX-License-Identifier: Apache-2.0
"""Train a small model by every dist_option there is, with options of DistOpt, eagerly or recorded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from singa_lite import autograd, layer, model, opt
from singa_lite.sync import find_schemes
from singa_lite.tensor import Tensor, to_numpy

# by scheme: a text with which something happens at this size, and one with which its result is the mean, if there is
TEXTS: dict[str, tuple[str, str | None]] = {
    "fp32": ("fp32", "fp32"),
    "fp16": ("fp16", None),
    "bf16": ("bf16", None),
    "int8": ("int8", None),
    "hierarchical": ("hierarchical:sparseTopK:0.3", "hierarchical:fp32"),
    "partialUpdate": ("partialUpdate", None),
    "sparseTopK": ("sparseTopK:0.2", "sparseTopK:1.0"),
    "sparseThreshold": ("sparseThreshold:0.05", "sparseThreshold:0"),
    "dgc": ("dgc:0.2:warmup=2", "dgc:1:mask=0"),
    "powerSGD": ("powerSGD:1", None),
    "sign": ("sign", None),
    "randomK": ("randomK:0.3", "randomK:1"),
    "localSGD": ("localSGD:2:start=1", None),
}
ACTIVE = {name: active for name, (active, _) in TEXTS.items()}
EXACT = {name: exact for name, (_, exact) in TEXTS.items() if exact is not None}
FEATURES, OUTPUTS = 5, 3


def check_that_none_is_missing() -> None:
    assert {scheme.names[0] for scheme in find_schemes().values()} == set(TEXTS)


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.loss = layer.Linear(6), layer.Linear(OUTPUTS), layer.MeanSquareError()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(autograd.tanh(self.first(x)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


class MeanOfTwo(Net):
    """One update by the mean of two batches' losses."""

    def train_one_batch(self, x: Tensor, y: Tensor, x2: Tensor, y2: Tensor) -> Tensor:
        first = self.loss(self.forward(x), y)
        loss = (first + self.loss(self.forward(x2), y2)) * 0.5
        self.optimizer(loss)
        return loss


def made(communicator: Any, use_graph: bool, kind: type[Net] = Net, sgd: Any = None, **given: Any) -> Any:
    """Return a compiled model whose DistOpt was ``given`` these options, with the same parameters on all ranks."""
    net = kind()
    sgd = sgd or opt.SGD(opt.ExponentialDecay(0.1, 4, 0.5), momentum=0.9, weight_decay=0.01)
    net.set_optimizer(opt.DistOpt(sgd, communicator=communicator, threshold=20, **given))
    net.compile([Tensor((4, FEATURES))], use_graph=use_graph)
    rng = np.random.default_rng(2)
    net.set_params(
        {name: rng.standard_normal(p.shape).astype(np.float32) / 2 for name, p in net.get_params().items()}
    )
    return net


def batch(rank: int, number: int, size: int = 4) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([rank, number])
    return Tensor(data=rng.standard_normal((size, FEATURES))), Tensor(
        data=rng.standard_normal((size, OUTPUTS))
    )


def trained(net: Any, rank: int, first: int, last: int) -> None:
    """Train on batches ``first`` to ``last`` - 1."""
    for number in range(first, last):
        net(*batch(rank, number))
    autograd.training = False


def values(net: Any) -> dict[str, np.ndarray]:
    return {name: to_numpy(param) for name, param in net.get_params().items()}


def everything(net: Any) -> dict[str, bytes]:
    """Return the bits of all there is: parameters and states."""
    states = {**values(net), **net.optimizer.get_states()}
    return {name: value.tobytes() for name, value in states.items()}


def no_breaks(net: Any) -> int:
    """Return the number of records; none of them may run eagerly."""
    breaks = [info.break_reason for info in net.graph_info()]
    assert breaks == [None] * len(breaks), breaks
    return len(breaks)


@contextmanager
def two_ranks_a_host(communicator: Any) -> Iterator[None]:
    os.environ["SINGA_LITE_HOST"] = str(communicator.rank // 2)
    try:
        yield
    finally:
        del os.environ["SINGA_LITE_HOST"]
