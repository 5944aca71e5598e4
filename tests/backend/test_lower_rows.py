# SPDX-License-Identifier: Apache-2.0
"""Lowered transformers: products finished row by row, and their kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from singa_lite import autograd, layer, model, opt
from singa_lite._native import load
from singa_lite.backend.cpu import NumpyBackend
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.device import get_default_device
from singa_lite.tensor import from_numpy, to_numpy
from tests.backend.lowering import assert_alike, assert_ranks_alike, lowered_calls
from tests.ranks import run_ranks

MODULE, _ = load("_kernels")
if not getattr(MODULE, "onednn", ""):
    pytest.skip("built without oneDNN: steps are not lowered", allow_module_level=True)
NUMPY = NumpyBackend()
TOLERANCE = 3e-5  # of the largest element
quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def evaluation_afterwards():
    yield
    autograd.training = False


class Block(layer.Layer):
    def __init__(self, width, causal, bias):
        super().__init__()
        self.attention_norm, self.norm = layer.LayerNorm(width), layer.LayerNorm(width)
        self.attention = layer.MultiHeadAttention(2, causal=causal, bias=bias)
        self.grow = layer.Linear(width, 4 * width, bias=bias)
        self.shrink = layer.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.shrink(autograd.gelu(self.grow(self.norm(x))))


class Transformer(model.Model):
    """Ids (batch, length) -> logits, as in examples/model/transformer.py."""

    def __init__(self, width=24, num_layers=2, causal=True, bias=True):
        super().__init__()
        self.characters, self.positions = layer.Embedding(11, width), layer.Embedding(70, width)
        self.blocks = [Block(width, causal, bias) for _ in range(num_layers)]
        self.norm, self.head = layer.LayerNorm(width), layer.Linear(width, 11)

    def initialize(self, x):
        self.numbers = from_numpy(np.arange(x.shape[1], dtype=np.int32))

    def forward(self, x):
        x = self.characters(x) + self.positions(self.numbers)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(
            autograd.reshape(out, (-1, out.shape[2])), autograd.reshape(y, (-1,))
        )
        self.optimizer(loss)
        return out, loss


def train(use_graph, steps, communicator=None, precision="fp32", num_batches=99, **options):
    """Outputs, losses and states of so many steps; of ``num_batches`` batches, each rank's its own."""
    get_default_device().SetRandSeed(3)
    net = Transformer(**options)
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.05), communicator=communicator or LocalCommunicator(World())))
    rank = 0 if communicator is None else communicator.rank

    def batch(step):
        ids = (
            np.random.default_rng(10 * (step % num_batches) + rank).integers(0, 11, (3, 41)).astype(np.int32)
        )
        return from_numpy(ids[:, :-1].copy()), from_numpy(ids[:, 1:].copy())

    net.compile([batch(0)[0]], use_graph=use_graph, precision=precision)
    results = [net(*batch(step)) for step in range(steps)]
    if use_graph:
        assert net.graph_info()[0].break_reason is None
    outs, losses = zip(*[(to_numpy(out), to_numpy(loss).item()) for out, loss in results], strict=True)
    return outs, losses, {name: to_numpy(value) for name, value in net.get_states().items()}


@pytest.mark.parametrize(("causal", "bias"), [(True, True), (False, True), (True, False)])
def test_a_lowered_step_agrees_with_an_eager_one(causal, bias):
    eager, graph = (train(use_graph, 3, causal=causal, bias=bias) for use_graph in (False, True))
    assert_alike(eager, graph)


def ranks_train(communicator, use_graph):
    return train(use_graph, 3, communicator)[2]


def test_lowered_ranks_stay_bit_equal():
    eager, graph = (run_ranks(ranks_train, 3, use_graph) for use_graph in (False, True))
    assert_ranks_alike(eager, graph)


def test_a_lowered_transformer_keeps_no_probabilities(monkeypatch):
    calls = lowered_calls(monkeypatch, lambda: train(True, 1))
    names = [call.name for call in calls]
    assert names.count("attention") == names.count("attention_backward") == 2
    square = 3 * 2 * 40 * 40 * 4
    assert not any(
        view.memory.num_bytes == square for call in calls for view in (*call.inputs, *call.outputs)
    )


# ---- the kernels that only lowered steps have, against numpy's in float64 ----------------------------


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def like(*shape: int) -> np.ndarray:
    """An output full of what must be overwritten."""
    return np.full(shape, 99, np.float32)


def reference(kernel: str, *inputs: np.ndarray, out: Any, **attributes: Any) -> tuple[np.ndarray, ...]:
    """What numpy's kernel gives in float64, for outputs of the shapes in ``out``."""
    made = tuple(np.empty(shape) for shape in out)
    exact = [array.astype(np.float64) for array in inputs]
    NUMPY.run(kernel, *exact, out=made if len(made) > 1 else made[0], **attributes)
    return made


def assert_close(found: np.ndarray, expected: np.ndarray, name: str) -> None:
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE * scale, err_msg=name)


def test_products_of_a_lowered_transformer_are_finished_with_what_follows(monkeypatch):
    names = [call.name for call in lowered_calls(monkeypatch, lambda: train(True, 1))]
    assert names.count("matmul_gelu") == names.count("matmul_mul") == 2
    assert names.count("matmul_add_norm") == 4  # behind attention and the Linears of both blocks
    assert not {"gelu", "gelu_backward", "mul"} & set(names)
    assert names.count("layer_norm") == 1  # the first one, behind no product
    assert names.count("layer_norm_backward_add") == 4 and names.count("layer_norm_backward") == 1
    assert names.count("add") == 1  # of the two embeddings


shapes = st.tuples(st.integers(1, 300), st.integers(1, 70), st.integers(1, 40))


@quick
@given(seeds, shapes)
def test_product_with_gelu_and_its_derivative(seed, shape):
    m, n, k = shape
    a, b, bias = floats(seed, m, k), floats(seed + 1, k, n), floats(seed + 2, n)
    y, derivative = like(m, n), like(m, n)
    assert MODULE.matmul_gelu(a, b, bias, out=(y, derivative))
    (product,) = reference("matmul", a, b, out=((m, n),))
    u = product + bias
    assert_close(y, reference("gelu", u, out=((m, n),))[0], "gelu")
    assert_close(derivative, reference("gelu_backward", np.ones_like(u), u, out=((m, n),))[0], "derivative")


@quick
@given(seeds, shapes, st.booleans())
def test_product_times_a_factor(seed, shape, transpose_b):
    m, n, k = shape
    a, b, factor = (
        floats(seed, m, k),
        floats(seed + 1, *((n, k) if transpose_b else (k, n))),
        floats(seed + 2, m, n),
    )
    y = like(m, n)
    assert MODULE.matmul_mul(a, b, factor, out=y, transpose_b=transpose_b)
    (product,) = reference("matmul", a, b, out=((m, n),), transpose_b=transpose_b)
    assert_close(y, product * factor, "product")


@quick
@given(seeds, shapes)
def test_product_with_a_residual_and_the_norm_of_the_sum(seed, shape):
    m, n, k = shape
    a, b, bias, residual = (
        floats(seed, m, k),
        floats(seed + 1, k, n),
        floats(seed + 2, n),
        floats(seed + 3, m, n),
    )
    (product,) = reference("matmul", a, b, out=((m, n),))
    exact = product + bias + residual
    y, total, normal, mean, inverse_std = like(m, n), like(m, n), like(m, n), like(m), like(m)
    assert MODULE.matmul_add(a, b, bias, residual, out=y)
    assert_close(y, exact, "sum")
    scale, shift = floats(seed + 4, n), floats(seed + 5, n)
    assert MODULE.matmul_add_norm(
        a, b, bias, residual, scale, shift, out=(total, normal, mean, inverse_std), eps=0.1
    )
    np.testing.assert_array_equal(total, y)
    shapes = ((m, n), (m,), (m,))
    expected = reference("layer_norm", exact, scale, shift, out=shapes, eps=0.1)
    for found, wanted in zip((normal, mean, inverse_std), expected, strict=True):
        assert_close(found, wanted, "norm")


def test_finished_products_take_no_arrays_that_do_not_fit():
    a, b, bias, y = floats(1, 6, 4), floats(2, 4, 5), floats(3, 5), like(6, 5)
    assert not MODULE.matmul_gelu(a, b, bias[:4].copy(), out=(y, y.copy()))
    assert not MODULE.matmul_gelu(a, b, bias, out=(y, like(6, 4)))
    assert not MODULE.matmul_gelu(a, b[:3].copy(), bias, out=(y, y.copy()))
    assert not MODULE.matmul_mul(a, b, like(5, 5), out=y, transpose_b=False)
    assert not MODULE.matmul_add(a, b, bias, like(6, 4), out=y)
    assert not MODULE.matmul_add(a, b, bias, y.astype("f8"), out=y)
    outs = (y, y.copy(), like(6), like(5))
    assert not MODULE.matmul_add_norm(a, b, bias, y.copy(), bias, bias, out=outs, eps=1e-5)


@quick
@given(seeds, st.integers(1, 200), st.integers(1, 300))
def test_gradient_of_layer_norm_plus_another(seed, rows, columns):
    dy, x, addend = (floats(seed + i, rows, columns) for i in range(3))
    scale, mean, inverse_std = (
        floats(seed + 3, columns),
        floats(seed + 4, rows),
        np.abs(floats(seed + 5, rows)),
    )
    dx, dscale, dbias = like(rows, columns), like(columns), like(columns)
    inputs = (dy, x, scale, mean, inverse_std)
    assert MODULE.layer_norm_backward_add(*inputs, addend, out=(dx, dscale, dbias))
    expected = reference("layer_norm_backward", *inputs, out=(dx.shape, (columns,), (columns,)))
    assert_close(dx, expected[0] + addend, "dx")
    assert_close(dscale, expected[1], "dscale")
    assert_close(dbias, expected[2], "dbias")
    wrong = floats(seed, rows, columns + 1)
    assert not MODULE.layer_norm_backward_add(*inputs, wrong, out=(dx, dscale, dbias))
