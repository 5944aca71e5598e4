# SPDX-License-Identifier: Apache-2.0
"""Training steps drawn at random from what users write: six recorded ones give the bits of six eager ones."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt, tensor
from singa_lite.backend.cpu import CpuBackend
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.config import state
from singa_lite.device import get_default_device
from singa_lite.tensor import Tensor, from_numpy, to_numpy
from tests.devices import cuda_device, no_gpu
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first

STEPS = 6
OPTIONS = ["fp32", "fp16", "bf16", "partialUpdate", "sparseTopK", "sparseThreshold"]


class Written(opt.SGD):
    """An optimizer of a user, with a number of its own."""

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        self.scale = getattr(self, "scale", 1.0) * 0.9
        super().apply(param_name, param_value, param_grad * self.scale)


class Program(model.Model):
    """A step whose statements ``draws`` decides.

    Args:
        draws: gives one of several things, the same in every run of the program.
    """

    def __init__(self, draws: np.random.Generator) -> None:
        super().__init__()

        def one_of(*choices: Any) -> Any:
            return choices[draws.integers(len(choices))]

        self.first, self.second, self.third = layer.Linear(6), layer.Linear(5), layer.Linear(1)
        self.dropout = layer.Dropout(one_of(0.0, 0.0, 0.3))
        self.way = one_of("call", "call", "update", "apply", "update_all", "twice", "two losses")
        self.option = one_of(*OPTIONS)
        self.exchange = one_of("none", "all_reduce", "fused", "half", "top-k", "threshold", "broadcast")
        self.clips = one_of(True, False, False)
        self.put_aside = one_of(None, None, "total", "state", "sums", "seen", "count", "list", "in index")
        self.on_host = one_of(*[None] * 8, "item", "data", "to_numpy", "outside", "constant")
        self.result = one_of("tensor", "tuple", "dict", "none")
        self.form = one_of("plain", "tuple", "dict")
        self.between = one_of(None, None, "lr", "ratio", "freeze", "evaluate", "reset", "spars")
        self.precision = one_of("fp32", "bf16")
        self.without_grad = one_of(None, None, "before", "after")
        self.total, self.state = Tensor((1,)), (Tensor((4, 6)), None)
        self.kept = Tensor((1,))
        self.sums: dict[Tensor, Tensor] = {}
        self.losses: list[Tensor] = []
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = autograd.tanh(self.first(x))
        if self.put_aside == "state" and autograd.training:
            hidden = hidden + self.state[0] * 0.5
            self.state = (hidden.clone(), None)
        return self.third(autograd.relu(self.second(self.dropout(hidden))))

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        if self.on_host == "data":
            x.data[...] = np.clip(x.data, -1, 1)
        if self.on_host == "constant":
            x = x * Tensor(data=np.full(1, 0.5, np.float32))
        return autograd.mse_loss(self.forward(x), y)

    def train_one_batch(self, given: Any) -> Any:
        x, y = (given["x"], given["y"]) if isinstance(given, dict) else given
        if self.without_grad == "before":
            with autograd.no_grad():
                y = y + 0.1 * self.forward(x).as_type("float32")
        loss = self.loss_of(x, y)
        if self.on_host == "item" and loss.item() > 1e6:
            return loss
        if self.on_host == "outside":
            OUTSIDE.append(loss)
        if self.put_aside == "count":
            self.count = (self.count + 1) % 3
            loss = loss * (1.0 + self.count)
        if self.way == "call":
            self.optimizer(loss, self.option)
        elif self.way == "two losses":
            self.optimizer(loss, self.option)
            self.optimizer(self.loss_of(x * 0.5, y), self.option)
        else:
            self.update_by_hand(loss)
        if self.on_host == "to_numpy":
            self.total = self.total * float(to_numpy(loss)[0] > 0)
        self.put(loss)
        if self.without_grad == "after":
            with autograd.no_grad():
                loss = self.loss_of(x, y)
        return {"tensor": loss, "tuple": (loss, [loss * 2.0]), "dict": {"loss": loss}, "none": None}[
            self.result
        ]

    def put(self, loss: Tensor) -> None:
        if self.put_aside == "total":
            self.total = self.total * 0.9 + loss
        elif self.put_aside == "seen":
            self.seen = loss * 3.0
        elif self.put_aside == "list":
            self.losses = [*self.losses[-2:], loss.clone()]
        elif self.put_aside == "in index":
            self.kept += loss.clone()

    def update_by_hand(self, loss: Tensor) -> None:
        pairs = list(autograd.backward(loss))
        if self.put_aside == "sums":
            for param, grad in pairs:
                self.sums[param] = self.sums[param] * 0.5 + grad if param in self.sums else grad
            pairs = list(self.sums.items())
        grads, dist = [grad for _, grad in pairs], self.optimizer
        if self.exchange == "all_reduce":
            for grad in grads:
                dist.all_reduce(grad)
        elif self.exchange == "fused":
            dist.fused_all_reduce(grads[:2], send=False)
            dist.fused_all_reduce(grads[2:])
        elif self.exchange == "half":
            dist.fused_all_reduce_half(grads)
        elif self.exchange in ("top-k", "threshold"):
            for grad in grads:
                dist.sparsification(grad, None, 0.3, self.exchange == "top-k")
        elif self.exchange == "broadcast":
            dist.broadcast(grads)
        if self.clips:
            total = tensor.sum(grads[0] * grads[0])
            for grad in grads[1:]:
                total = total + tensor.sum(grad * grad)
            for grad in grads:
                grad *= 0.5 / (tensor.sqrt(total) + 1e-3)
        for _ in range(1 + (self.way == "twice")):
            if self.way == "update":
                for param, grad in pairs:
                    dist.update(param, grad)
            elif self.way == "apply":
                for param, grad in pairs:
                    dist.apply(param.name, param, grad)
            else:
                dist.update_all(pairs)
            dist.step()


OUTSIDE: list[Tensor] = []  # what a step puts where no record looks


def run(seed: int, use_graph: bool, communicator: Any = None) -> tuple[list[Any], int]:
    """What six steps of the program return and leave, and how many were replayed."""
    CpuBackend.lower = lambda self, nodes: nodes  # type: ignore[method-assign]
    draws = np.random.default_rng(seed)
    get_default_device().SetRandSeed(seed + 1)
    net, rank = Program(draws), 0 if communicator is None else communicator.rank
    communicator = communicator or LocalCommunicator(World())
    lr = opt.ExponentialDecay(0.1, 2, 0.7, staircase=bool(draws.integers(2)))
    make = [
        lambda: opt.SGD(lr, momentum=0.9, weight_decay=0.01),
        lambda: opt.SGD(lr, momentum=0.9, nesterov=True),
        lambda: opt.Adam(lr),
        lambda: Written(lr, momentum=0.5),
    ][draws.integers(4)]
    net.set_optimizer(opt.DistOpt(make(), communicator=communicator, threshold=20, spars=0.2))

    def batch(step: int) -> Any:
        rng = np.random.default_rng([seed, step, rank])
        x, y = (from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in ((4, 3), (4, 1)))
        return {"plain": [x, y], "tuple": (x, y), "dict": {"x": x, "y": y}}[net.form]

    example = from_numpy(np.zeros((4, 3), np.float32))
    net.compile([example], use_graph=use_graph, precision=net.precision)
    OUTSIDE.clear()
    found: list[Any] = []
    for step in range(STEPS):
        if step in (2, 4):
            between(net, step)
        given = batch(step)
        found.append(values_of(net(given)))
        found.append(values_of(given))
        found.append([net.optimizer.bytes_sent, net.optimizer.bytes_payload])
    autograd.training = False
    found += [values_of(net.get_states()), net.optimizer.step_counter]
    found += [{key: value.tobytes() for key, value in net.optimizer.get_states().items()}]
    found += [
        values_of([net.total, net.state[0], net.kept, net.losses, list(net.sums.values()), OUTSIDE]),
        net.count,
    ]
    found += [values_of(getattr(net, "seen", None)), get_default_device().get_random_state()]
    return found, sum(info.break_reason is None for info in net.graph_info())


def between(net: Program, step: int) -> None:
    """What a caller may do between two steps."""
    if net.between == "lr":
        net.optimizer.lr = 0.01 * step
    elif net.between == "ratio":
        net.dropout.ratio = 0.1 * step
    elif net.between == "freeze":
        net.second.W.requires_grad = step != 2
    elif net.between == "evaluate":
        net.eval()
        net(from_numpy(np.ones((2, 3), np.float32)))
        net.train()
    elif net.between == "reset":
        net.total, net.losses, net.state = Tensor((1,)), [], (Tensor((4, 6)), None)
        net.sums.clear()
    elif net.between == "spars":
        net.optimizer.spars = 0.1 * step


def values_of(result: Any) -> Any:
    if isinstance(result, Tensor):
        return to_numpy(result).tobytes()
    if isinstance(result, dict):
        return {key: values_of(value) for key, value in result.items()}
    return [values_of(item) for item in result] if isinstance(result, (list, tuple)) else result


@pytest.fixture
def as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bring back what ``run`` replaces: lowered kernels round differently (tests/test_graph_fuzz.py)."""
    monkeypatch.setattr(CpuBackend, "lower", CpuBackend.lower)


def assert_same(eager: list[Any], graph: list[Any], seed: int) -> None:
    for index, (one, other) in enumerate(zip(eager, graph, strict=True)):
        assert one == other, f"program {seed}: entry {index} of what was seen"


@pytest.mark.usefixtures("as_recorded")
@slow_but_first("seeds", [range(40), range(40, 120)], ids=["first", "others"])
def test_recorded_programs_do_what_eager_ones_do(seeds: range) -> None:
    replayed = 0
    for seed in seeds:
        (eager, _), (graph, records) = run(seed, False), run(seed, True)
        assert_same(eager, graph, seed)
        replayed += records > 0
    assert replayed > len(seeds) // 2  # and most of them were recorded


@pytest.mark.usefixtures("as_recorded")
@slow_but_first(
    ("cuda", "seeds"),
    [("standin", range(8, 16)), ("standin", range(16))]
    if no_gpu()
    else [pytest.param("gpu", range(100), marks=pytest.mark.gpu)],
    ids=str,
)
def test_recorded_programs_do_what_eager_ones_do_on_cuda(
    cuda: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "default_device", cuda_device(monkeypatch))
    replayed = 0
    for seed in seeds:
        if cuda == "standin" and Program(np.random.default_rng(seed)).on_host == "data":
            continue  # calls a function of numpy, which the stand-in of cupy has not
        (eager, _), (graph, records) = run(seed, False), run(seed, True)
        assert_same(eager, graph, seed)
        replayed += records > 0
    assert replayed > len(seeds) // 4


def run_several(communicator: Any, seeds: list[int], use_graph: bool) -> list[list[Any]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DistOpt: an update by hand")  # of programs that send no gradients
        return [run(seed, use_graph, communicator)[0] for seed in seeds]


@pytest.mark.parametrize("size", [2, 3])
@slow_but_first("numbers", [range(10), range(10, 24)], ids=["first", "others"])
def test_recorded_programs_on_ranks_do_what_eager_ones_do(size: int, numbers: range) -> None:
    seeds = [1000 * size + number for number in numbers]
    eager, graph = (run_ranks(run_several, size, seeds, use_graph) for use_graph in (False, True))
    for mine, theirs in zip(eager, graph, strict=True):
        for seed, one, other in zip(seeds, mine, theirs, strict=True):
            assert_same(one, other, seed)
