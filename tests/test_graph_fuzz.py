# SPDX-License-Identifier: Apache-2.0
"""Networks drawn at random: what a lowered, replayed step makes of them is what eager steps make of them."""

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.rendezvous import World
from singa_lite.device import get_default_device
from singa_lite.tensor import from_numpy, to_numpy
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first

OPTIONS = ["fp32", "fp16", "partialUpdate", "sparseTopK", "sparseThreshold"]
CHANNELS = [3, 8, 16, 20]


def conv_of(rng, shape):
    """A random convolution and the shape it makes."""
    c, h, w = shape
    size, stride, dilation, out = (int(rng.choice(of)) for of in ([1, 3], [1, 1, 2], [1, 1, 2], CHANNELS))
    groups = [1, 1, 1] + [2] * (c % 2 == out % 2 == 0) + [c] * (out % c == 0)
    made = layer.Conv2d(
        out, size, stride=stride, padding=size // 2 * dilation, dilation=dilation, group=int(rng.choice(groups)),
        bias=bool(rng.integers(2)), activation=str(rng.choice(["NOTSET", "RELU"])),
    )  # fmt: skip
    return made, (out, (h - 1) // stride + 1, (w - 1) // stride + 1)


def pool_of(rng, shape):
    """A random pooling, its windows overlapping or not, and the shape it makes."""
    size, stride, padding = [(2, 2, 0), (3, 2, 1), (3, 1, 1)][rng.integers(3)]
    if min(shape[1:]) < 2:
        return layer.ReLU(), shape
    made = [layer.MaxPool2d, layer.AvgPool2d][rng.integers(2)](size, stride=stride, padding=padding)
    return made, (shape[0], *((length + 2 * padding - size) // stride + 1 for length in shape[1:]))


def without_gradient(conv, x):
    with autograd.no_grad():
        more = conv(x)
        more += autograd.relu(more)
    return x + more


def stage_of(rng, shape):
    """A random function of images (C, H, W), its layers, and the shape it makes."""
    c, h, w = shape
    wide = layer.Conv2d(c, 3, padding=1)
    conv, norm, other = layer.Conv2d(c, 1), layer.BatchNorm2d(), layer.BatchNorm2d()
    relu, other_shape = autograd.relu, (c * h, 1, w) if h % 2 else (2 * c, h // 2, w)
    made, made_shape = [conv_of, conv_of, pool_of][rng.integers(3)](rng, shape)
    stages = [
        (lambda x: relu(norm(wide(x)) + x), shape),
        (lambda x: relu(norm(wide(x)) + other(conv(x))), shape),
        (lambda x: wide(relu(wide(x))), shape),
        (lambda x: autograd.cat((conv(x), relu(x)), 1), (2 * c, h, w)),
        (lambda x: autograd.sigmoid(conv(x)) * x, shape),
        (lambda x: relu(norm(x)), shape),
        (norm, shape),
        (lambda x: autograd.reshape(x, (x.shape[0], *other_shape)), other_shape),
        (lambda x: without_gradient(wide, x), shape),
        *[(made, made_shape)] * 5,
    ]
    return [wide, conv, norm, other, made], *stages[rng.integers(len(stages))]


class Drawn(model.Model):
    def __init__(self, seed):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.layers, self.stages, shape = [], [], self.shape_of(seed)
        for _ in range(rng.integers(2, 7)):
            layers, stage, shape = stage_of(rng, shape)
            self.layers += layers
            self.stages.append(stage)
        self.linears = [layer.Linear(7), layer.Linear(7), layer.Linear(5)]
        self.has_two_losses, self.ratio = rng.random() < 0.2, 0.3 * (rng.random() < 0.2)
        self.loss = layer.SoftMaxCrossEntropy()

    @staticmethod
    def shape_of(seed):
        rng = np.random.default_rng(seed + 10**6)
        return int(rng.choice([1, *CHANNELS])), int(rng.integers(6, 10)), int(rng.integers(6, 10))

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        x = autograd.relu(self.linears[0](autograd.flatten(x)))
        x = autograd.dropout(x, self.ratio) if self.ratio else x
        return self.linears[2](autograd.tanh(self.linears[1](x)) + x)

    def train_one_batch(self, x, y, option):
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss, dist_option=option)
        if self.has_two_losses:
            other = self.loss(self.forward(x * x), y)
            self.optimizer(other, dist_option=option)
        return out, loss


def trained(seed, use_graph, option="fp32", communicator=None, sizes=(5, 5, 3, 5), dtype=np.float32):
    """Outputs and losses of a step each, states, and the records; the rate changes before the last step."""
    get_default_device().SetRandSeed(seed)
    net, rank = Drawn(seed), 0 if communicator is None else communicator.rank
    sgd = opt.SGD(lr=0.005, momentum=0.9, weight_decay=1e-4)
    net.set_optimizer(
        opt.DistOpt(sgd, communicator=communicator or LocalCommunicator(World()), threshold=300)
    )

    def batch(step, size):
        rng = np.random.default_rng([seed, step, rank])
        x = from_numpy(rng.standard_normal((size, *net.shape_of(seed))).astype(np.float32)).as_type(dtype)
        return x, from_numpy(rng.integers(0, 5, size))

    net.compile([batch(0, 5)[0]], use_graph=use_graph)
    results = []
    for step, size in enumerate(sizes):
        if step == len(sizes) - 1:
            net.optimizer.lr = 0.002
            net.eval()
            net(batch(9, 2)[0])
            net.train()
        results.append([to_numpy(made) for made in net(*batch(step, size), option)])
    autograd.training = False
    return results, {name: to_numpy(value) for name, value in net.get_states().items()}, net.graph_info()


def assert_alike(eager, graph, seed):
    assert all(info.break_reason is None for info in graph[2])
    for step, (ones, others) in enumerate(zip(eager[0], graph[0], strict=True)):
        for one, other in zip(ones, others, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-3, atol=2e-4, err_msg=f"seed {seed}, step {step}")
    for name, value in eager[1].items():
        np.testing.assert_allclose(
            graph[1][name], value, rtol=1e-3, atol=2e-4, err_msg=f"seed {seed}, {name}"
        )


@slow_but_first("seed", range(40), count=8)
def test_a_random_network_trains_alike_in_both_modes(seed):
    assert_alike(*(trained(seed, use_graph) for use_graph in (False, True)), seed)


def ranks_train(communicator, seed, use_graph, option):
    return trained(seed, use_graph, option, communicator, sizes=(4, 4, 4))[:2]


@pytest.mark.parametrize("option", OPTIONS)
def test_ranks_train_a_random_network_alike_in_both_modes(option):
    seed = 100 + OPTIONS.index(option)
    for eager, graph in zip(
        *(run_ranks(ranks_train, 2, seed, use, option) for use in (False, True)), strict=True
    ):
        assert_alike((*eager, []), (*graph, []), seed)
