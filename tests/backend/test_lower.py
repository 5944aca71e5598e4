# SPDX-License-Identifier: Apache-2.0
"""Lowered steps: fewer kernels on images in the convolutions' own order compute what the recorded ones do."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt, tensor
from singa_lite._native import load
from singa_lite.backend.cpu import NumpyBackend
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.device import get_default_device
from singa_lite.errors import GraphError
from singa_lite.tensor import from_numpy, to_numpy
from tests.backend.lowering import assert_alike, assert_ranks_alike, lowered_calls
from tests.ranks import run_ranks

MODULE, _ = load("_kernels")
HAS_ONEDNN = bool(getattr(MODULE, "onednn", ""))
HAS_AVX2 = "avx2" in Path("/proc/cpuinfo").read_text() and os.environ.get("ONEDNN_MAX_CPU_ISA") != "SSE41"
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN: steps are not lowered")
NUMPY = NumpyBackend()


@pytest.fixture(autouse=True)
def evaluation_afterwards():
    yield
    autograd.training = False


class Block(layer.Layer):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut)."""

    def __init__(self, outputs, stride, is_projected):
        super().__init__()
        self.conv1 = layer.Conv2d(outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = layer.BatchNorm2d()
        self.conv2 = layer.Conv2d(outputs, 3, padding=1)
        self.bn2 = layer.BatchNorm2d()
        self.relu = layer.ReLU()
        self.is_projected = is_projected
        if is_projected:
            self.conv3 = layer.Conv2d(outputs, 1, stride=stride, bias=False)
            self.bn3 = layer.BatchNorm2d()

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (self.bn3(self.conv3(x)) if self.is_projected else x))


class Overwrites(model.Model):
    """Changes the sign of what an operator has made, where no gradient sees it, before backward."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.conv, self.norm, self.last = layer.Conv2d(8, 3, padding=1), layer.BatchNorm2d(), layer.Linear(5)

    def forward(self, x):
        made = {"conv": self.conv(x)}
        made["norm"] = self.norm(made["conv"])
        made["relu"] = autograd.relu(made["norm"])
        pool = autograd.avg_pool_2d if self.what == "conv" else autograd.max_pool_2d
        made["pool"] = pool(made["relu"], 2, 2, 0)
        if self.what == "copy_data_to_from":
            with autograd.no_grad():
                out = autograd.reshape(made["pool"], made["pool"].shape)
            tensor.copy_data_to_from(out, out.clone() * -1.0, out.size())
        elif self.what is not None:
            with autograd.no_grad():
                alias = autograd.reshape(made[self.what], made[self.what].shape)
                alias *= -1.0
        return self.last(autograd.flatten(made["pool"]))

    def train_one_batch(self, x, y):
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


@needs_onednn
@pytest.mark.parametrize("what", [None, "conv", "norm", "relu", "pool", "copy_data_to_from"])
def test_what_a_step_overwrites_before_backward_is_seen(what):
    """The gradients of batch norm and ReLU read what conv and ReLU have made, those of the others do not."""
    states = []
    for use_graph in (False, True):
        get_default_device().SetRandSeed(1)
        rng = np.random.default_rng(0)
        x, y = (from_numpy(rng.standard_normal(s).astype(np.float32)) for s in ((4, 3, 8, 8), (4, 5)))
        net = Overwrites(what)
        net.set_optimizer(opt.SGD(lr=0.01))
        net.compile([x], use_graph=use_graph)
        if what in ("conv", "relu"):
            with pytest.raises(GraphError, match="as it was in the forward pass, and it was changed since"):
                net(x, y)
            continue
        for _ in range(3):
            net(x, y)
        assert all(info.break_reason is None for info in net.graph_info())
        states.append({name: to_numpy(value) for name, value in net.get_states().items()})
    for name in states[0] if states else ():
        np.testing.assert_allclose(states[1][name], states[0][name], rtol=1e-4, atol=1e-5, err_msg=name)


class Trained(model.Model):
    def __init__(self):
        super().__init__()
        self.flatten, self.linear1, self.linear2 = layer.Flatten(), layer.Linear(24), layer.Linear(5)
        self.relu, self.loss = layer.ReLU(), layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.linear2(self.relu(self.linear1(self.flatten(self.features(x)))))

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss)
        return out, loss


class Residual(Trained):
    """Blocks of 16 channels, a projection, average pooling of a whole image."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn = layer.Conv2d(16, 3, padding=1, bias=False), layer.BatchNorm2d()
        self.blocks = [Block(16, 1, False), Block(32, 2, True), Block(32, 1, False)]

    def features(self, x):
        y = self.relu(self.bn(self.stem(x)))
        for block in self.blocks:
            y = block(y)
        return autograd.avg_pool_2d(y, y.shape[2:])


class Pooled(Trained):
    """Channels that fill no block, pooling behind ReLU, overlapping windows, groups."""

    def __init__(self):
        super().__init__()
        self.conv1 = layer.Conv2d(20, 3, activation="RELU")
        self.conv2 = layer.Conv2d(10, 3, padding=1, group=2)
        self.pool1, self.pool2 = layer.MaxPool2d(2), layer.MaxPool2d(3, stride=2, padding=1)
        self.average = layer.AvgPool2d(2, padding=1)

    def features(self, x):
        y = self.pool1(self.conv1(x))
        return self.average(self.relu(self.pool2(self.relu(self.conv2(y)))))


class Branches(Trained):
    """Images that kernels without blocks read as well, and two readers of one activation."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = layer.Conv2d(16, 3, padding=1), layer.Conv2d(16, 3, padding=1)
        self.bn = layer.BatchNorm2d()

    def features(self, x):
        y = self.relu(self.conv1(x))
        z = autograd.sigmoid(y) * self.bn(self.conv2(y))
        return autograd.cat((z, y), 1)


class Rows(Trained):
    """A product with two rows behind it."""

    def __init__(self):
        super().__init__()
        self.linear3 = layer.Linear(24)

    def forward(self, x):
        x = self.flatten(x)
        other = self.relu(self.linear3(x))
        return self.linear2(self.relu(self.linear1(x) + self.linear3.b) + other)


MODELS = [Residual, Pooled, Branches, Rows]


def batch(step):
    rng = np.random.default_rng(step)
    return from_numpy(rng.standard_normal((6, 3, 12, 12)).astype(np.float32)), from_numpy(
        rng.integers(0, 5, 6)
    )


def train(make, use_graph, steps, communicator=None):
    get_default_device().SetRandSeed(3)
    net = make()
    sgd = opt.SGD(lr=0.01, momentum=0.9, weight_decay=1e-4)
    net.set_optimizer(opt.DistOpt(sgd, communicator=communicator or LocalCommunicator(World())))
    net.compile([batch(0)[0]], use_graph=use_graph)
    rank = 0 if communicator is None else communicator.rank
    results = [net(*batch(10 * step + rank)) for step in range(steps)]
    outs, losses = zip(*[(to_numpy(out), to_numpy(loss).item()) for out, loss in results], strict=True)
    return outs, losses, {name: to_numpy(value) for name, value in net.get_states().items()}, net


@needs_onednn
@pytest.mark.parametrize("make", MODELS)
def test_a_lowered_step_agrees_with_an_eager_one(make):
    eager, graph = (train(make, use_graph, 2) for use_graph in (False, True))
    assert_alike(eager, graph)


@needs_onednn
@pytest.mark.parametrize("make", MODELS)
def test_fifty_lowered_steps_end_at_the_loss_of_fifty_eager_ones(make):
    eager, graph = (train(make, use_graph, 50) for use_graph in (False, True))
    np.testing.assert_allclose(graph[1], eager[1], rtol=1e-3)


def ranks_train(communicator, make, use_graph):
    states = train(make, use_graph, 4, communicator)[2]
    return {name: value for name, value in states.items() if "running" not in name}


@needs_onednn
def test_lowered_ranks_stay_bit_equal():
    eager, graph = (run_ranks(ranks_train, 3, Residual, use_graph) for use_graph in (False, True))
    assert_ranks_alike(eager, graph)


@needs_onednn
def test_a_residual_network_is_fused_and_never_reordered_between_its_blocks(monkeypatch):
    calls = lowered_calls(monkeypatch, lambda: train(Residual, True, 1))
    norms = [call for call in calls if call.name == "batchnorm_2d_train"]
    assert sum(bool(call.attributes.get("relu")) for call in norms) == 7  # stem, and two a block
    assert sum(len(call.inputs) == 4 for call in norms) == 3  # one addition a block
    assert not any(call.name == "relu" for call in calls)
    backward = [call for call in calls if call.name == "batchnorm_2d_backward"]
    assert sum(len(call.inputs) == 6 for call in backward) == 4
    orders = {call.attributes["memory_formats"] for call in calls if call.name == "conv2d"}
    assert all(block > 1 for _, block in orders)
    images = [call for call in calls if call.name == "reorder" and call.out.shape[2:] != (1, 1)]
    assert len(images) <= (2 if HAS_AVX2 else 6)  # before AVX2 oneDNN has no blocked convolution backward


@needs_onednn
def test_graph_info_names_every_call_with_its_shape_and_order():
    [info] = train(Residual, True, 2)[3].graph_info()
    assert len(info.nodes) == info.num_kernels + info.num_collectives + info.num_host_nodes
    assert (
        "batchnorm_2d_train -> float32[6, 16, 12, 12]" in info.nodes[1] and " memory_format=" in info.nodes[1]
    )
    assert sum(node.startswith("Host.") for node in info.nodes) == info.num_host_nodes == 4


@needs_onednn
def test_the_gradient_of_a_relu_before_pooling_is_taken_on_the_smaller_side(monkeypatch):
    calls = lowered_calls(monkeypatch, lambda: train(Pooled, True, 1))
    for call in calls:
        if call.name == "relu_backward" and len(call.out.shape) == 4:
            assert call.out.shape[2:] in ((5, 5), (3, 3))
    assert sum(call.name == "conv2d" and call.attributes.get("relu", False) for call in calls) == 2


# ---- the kernels that only lowered steps have, against numpy's in float64 ----------------------------


def blocked(array, block):
    """A row-major NCHW array as the same memory in blocks."""
    n, c, h, w = array.shape
    return np.ascontiguousarray(array.reshape(n, c // block, block, h, w).transpose(0, 1, 3, 4, 2)).reshape(
        array.shape
    )


def plain(array, block):
    n, c, h, w = array.shape
    return array.reshape(n, c // block, h, w, block).transpose(0, 1, 4, 2, 3).reshape(array.shape)


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


needs_module = pytest.mark.skipif(MODULE is None, reason="nothing was compiled")
BLOCKS = [(16, 1), (16, 8), (16, 16), (32, 16), (20, 20), (3, 3), (7, 1), (24, 8)]


@needs_module
@pytest.mark.parametrize(("channels", "block"), BLOCKS)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (12, 12)])
def test_batch_norm_of_blocks_with_residual_and_relu(channels, block, has_residual, size):
    x = normal((3, channels, *size)) + 2
    residual = normal(x.shape, 1)
    scale, bias = normal(channels, 2), normal(channels, 3)
    y, mean, inverse_std = np.empty_like(x), np.empty(channels, "f4"), np.empty(channels, "f4")
    running = np.zeros(channels, "f4"), np.ones(channels, "f4")
    extra = (blocked(residual, block),) if has_residual else ()
    rates = {"momentum": 0.1, "eps": 1e-5}
    assert MODULE.batchnorm_2d_train(
        blocked(x, block),
        scale,
        bias,
        *extra,
        out=(y, mean, inverse_std, *running),
        relu=True,
        memory_format=block,
        **rates,
    )
    x64, scale64, bias64 = (array.astype(np.float64) for array in (x, scale, bias))
    wanted = np.empty_like(x64), np.empty(channels), np.empty(channels), np.zeros(channels), np.ones(channels)
    NUMPY.run("batchnorm_2d_train", x64, scale64, bias64, out=wanted, **rates)
    total = np.maximum(wanted[0] + residual * has_residual, 0)
    np.testing.assert_allclose(plain(y, block), total, rtol=1e-4, atol=1e-5)
    for got, want in zip((mean, inverse_std, *running), wanted[1:], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

    dy, dx = normal(x.shape, 4), np.empty_like(x)
    dscale, dbias = np.empty(channels, "f4"), np.empty(channels, "f4")
    has_relu = not has_residual
    assert MODULE.batchnorm_2d_backward(
        blocked(dy, block), blocked(x, block), scale, mean, inverse_std, *((bias,) if has_relu else ()),
        out=(dx, dscale, dbias), memory_format=block,
    )  # fmt: skip
    grad = np.where(plain(y, block) > 0, dy, 0).astype(np.float64) if has_relu else dy.astype(np.float64)
    wants = np.empty_like(x64), np.empty(channels), np.empty(channels)
    NUMPY.run("batchnorm_2d_backward", grad, x64, scale64, wanted[1], wanted[2], out=wants)
    np.testing.assert_allclose(plain(dx, block), wants[0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(dscale, wants[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dbias, wants[2], rtol=1e-4, atol=1e-4)


@needs_module
def test_the_mean_of_batch_norm_may_lie_far_from_zero():
    x = normal((8, 16, 6, 6)) * 0.01 + 50
    out = (np.empty_like(x), *(np.zeros(16, "f4") for _ in range(4)))
    assert MODULE.batchnorm_2d_train(
        x, np.ones(16, "f4"), np.zeros(16, "f4"), out=out, momentum=0.1, eps=1e-12
    )
    exact = x.astype(np.float64)
    np.testing.assert_allclose(out[2], 1 / exact.std((0, 2, 3)), rtol=1e-3)


@needs_module
@pytest.mark.parametrize(("channels", "block"), BLOCKS)
@pytest.mark.parametrize("index", ["u1", "i4"])
@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 1, 0), (2, 3, 0)])
def test_pooling_of_blocks(channels, block, index, window):
    kernel, stride, padding = window
    geometry = {"kernel_size": (kernel, kernel), "stride": (stride, stride), "padding": (padding, padding)}
    x = np.round(normal((2, channels, 9, 8)), 1)  # with equal elements
    size = tuple((length + 2 * padding - kernel) // stride + 1 for length in x.shape[2:])
    y, indices = np.empty((2, channels, *size), "f4"), np.empty((2, channels, *size), index)
    wanted = np.empty_like(y), np.empty_like(indices)
    assert MODULE.max_pool_2d(blocked(x, block), out=(y, indices), memory_format=block, **geometry)
    NUMPY.run("max_pool_2d", x, out=wanted, **geometry)
    np.testing.assert_array_equal(plain(y, block), wanted[0])
    np.testing.assert_array_equal(plain(indices, block), wanted[1])
    dy, dx, want = normal(y.shape, 5), np.empty_like(x), np.empty_like(x)
    assert MODULE.max_pool_2d_backward(blocked(dy, block), indices, out=dx, memory_format=block, **geometry)
    NUMPY.run("max_pool_2d_backward", dy, wanted[1], out=want, **geometry)
    np.testing.assert_allclose(plain(dx, block), want, rtol=1e-6, atol=1e-6)
    for count_include_pad in (False, True):
        geometry["count_include_pad"] = count_include_pad
        assert MODULE.avg_pool_2d(blocked(x, block), out=y, memory_format=block, **geometry)
        NUMPY.run("avg_pool_2d", x, out=wanted[0], **geometry)
        np.testing.assert_allclose(plain(y, block), wanted[0], rtol=1e-5, atol=1e-6)
        assert MODULE.avg_pool_2d_backward(blocked(dy, block), out=dx, memory_format=block, **geometry)
        NUMPY.run("avg_pool_2d_backward", dy, out=want, **geometry)
        np.testing.assert_allclose(plain(dx, block), want, rtol=1e-5, atol=1e-6)


@needs_onednn
@pytest.mark.parametrize("blocks", [(1, 16), (16, 1), (8, 16), (32, 8), (1, 32)])
def test_reorder_moves_elements_and_changes_none(blocks):
    x, y = normal((2, 32, 5, 3)), np.empty((2, 32, 5, 3), "f4")
    assert MODULE.reorder(blocked(x, blocks[0]), out=y, memory_formats=blocks)
    np.testing.assert_array_equal(plain(y, blocks[1]), x)


@needs_onednn
@pytest.mark.parametrize("x_block", [1, 16])
@pytest.mark.parametrize("y_block", [1, 8, 32])
def test_convolution_of_blocks(x_block, y_block):
    geometry = {"stride": (2, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    x, w, b = normal((3, 16, 9, 7)), normal((32, 16, 3, 3), 1), normal(32, 2)
    y = np.empty((3, 32, 5, 7), "f4")
    blocks = {"memory_formats": (x_block, y_block), **geometry}
    assert MODULE.conv2d(blocked(x, x_block), w, b, out=y, relu=True, **blocks)
    exact = [array.astype(np.float64) for array in (x, w, b)]
    wanted = np.empty(y.shape)
    NUMPY.run("conv2d", *exact, out=wanted, **geometry)
    np.testing.assert_allclose(plain(y, y_block), np.maximum(wanted, 0), rtol=1e-4, atol=1e-4)
    dy, dx, dw, db = normal(y.shape, 3), np.empty_like(x), np.empty_like(w), np.empty_like(b)
    assert MODULE.conv2d_backward_data(blocked(dy, y_block), w, out=dx, **blocks)
    assert MODULE.conv2d_backward_weight(blocked(dy, y_block), blocked(x, x_block), out=(dw, db), **blocks)
    wants = np.empty(x.shape), np.empty(w.shape), np.empty(b.shape)
    grad = dy.astype(np.float64)
    NUMPY.run("conv2d_backward_data", grad, exact[1], out=wants[0], **geometry)
    NUMPY.run("conv2d_backward_weight", grad, exact[0], out=wants[1:], **geometry)
    for got, want in zip((plain(dx, x_block), dw, db), wants, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@needs_onednn
@pytest.mark.parametrize("relu", [False, True])
def test_a_product_adds_its_bias_and_clips(relu):
    a, b, bias, y = normal((7, 5)), normal((5, 9), 1), normal(9, 2), np.empty((7, 9), "f4")
    assert MODULE.matmul(a, b, bias, out=y, relu=relu)
    wanted = a.astype(np.float64) @ b + bias
    np.testing.assert_allclose(y, np.maximum(wanted, 0) if relu else wanted, rtol=1e-5, atol=1e-6)
    assert not MODULE.matmul(a, b, normal(7), out=y)


@needs_module
def test_a_plan_stops_where_a_kernel_refuses_the_values():
    x, labels = normal((4, 3)), np.array([0, 1, 2, 0])
    loss, probabilities, y = np.empty(1, "f4"), np.empty_like(x), np.empty_like(x)
    plan = MODULE.Plan()
    assert plan.record(MODULE.relu, (x,), {"out": y})
    assert plan.record(MODULE.softmax_cross_entropy, (x, labels), {"out": (loss, probabilities)})
    assert plan.record(MODULE.relu, (y,), {"out": x})
    assert not plan.record(MODULE.relu, (x.astype("f8"),), {"out": y})
    y[:], before = -1, x.copy()
    assert len(plan) == 3 and (y == -1).all()  # recorded, not run
    assert plan.run() == 3
    np.testing.assert_array_equal(x, np.maximum(before, 0))
    labels[2] = 7
    assert plan.run() == 1 and plan.run(2) == 3
