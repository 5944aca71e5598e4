# SPDX-License-Identifier: Apache-2.0
"""Recorded transformers in mixed precision: beside eager ones, on several ranks, and which kernels they have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite import autograd
from singa_lite._native import load
from singa_lite.backend.cpu import CpuBackend
from singa_lite.backend.cpu.fuse import fuse
from singa_lite.dtypes import bfloat16
from singa_lite.graph.memory import View
from singa_lite.graph.nodes import Kernel
from tests.backend.lowering import lowered_calls
from tests.backend.test_bfloat16 import new_view
from tests.backend.test_lower_rows import train
from tests.ranks import run_ranks

KERNELS, _ = load("_kernels")
F32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def evaluation_afterwards():
    yield
    autograd.training = False


@pytest.mark.parametrize(("causal", "bias"), [(True, True), (False, True), (True, False)])
def test_fifty_recorded_steps_follow_eager_ones(causal, bias):
    options = {"causal": causal, "bias": bias, "precision": "bf16", "num_batches": 3}
    eager, graph = (train(use_graph, 50, **options) for use_graph in (False, True))
    assert np.mean(eager[1][-5:]) < 0.9 * eager[1][0]
    np.testing.assert_allclose(graph[1], eager[1], rtol=0, atol=2e-2)
    assert {out.dtype for out in graph[0]} == {bfloat16}
    assert {value.dtype for value in graph[2].values()} == {F32}


def ranks_train(communicator: Any, use_graph: bool) -> bytes:
    states = train(use_graph, 4, communicator, precision="bf16")[2]
    return b"".join(value.tobytes() for value in states.values())


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_hold_the_same_bits(size):
    eager, graph = (run_ranks(ranks_train, size, use_graph) for use_graph in (False, True))
    assert len(set(eager)) == len(set(graph)) == 1
    assert eager[0] != graph[0]  # fused kernels round less often


def lowered(monkeypatch: Any, **options: Any) -> list[Kernel]:
    return lowered_calls(monkeypatch, lambda: train(True, 1, precision="bf16", **options))


def test_a_lowered_transformer_has_the_kernels_of_float32_and_few_casts(monkeypatch):
    calls = lowered(monkeypatch)
    names = [call.name for call in calls]
    for name, count in (
        ("attention", 2), ("attention_backward", 2), ("matmul_gelu", 2), ("matmul_mul", 2),
        ("matmul_add_norm", 4), ("layer_norm", 1), ("layer_norm_backward_add", 4), ("layer_norm_backward", 1),
    ):  # fmt: skip
        assert names.count(name) == count, name
    assert not {"gelu", "gelu_backward", "mul"} & set(names)
    assert names.count("add") == 1  # of the two embeddings
    weights = 4 * 2 + 1
    residuals = 2 * 2  # gradients, for the products that made what was added
    assert names.count("cast") == weights + residuals + 2  # the logits, and their gradient
    norms = [call.outputs[1] for call in calls if call.name == "matmul_add_norm"]
    assert {view.dtype for view in norms} == {bfloat16}
    sums = [call.outputs[0] for call in calls if call.name == "matmul_add_norm"]
    assert {view.dtype for view in sums} == {F32}
    for call in calls:
        assert hasattr(KERNELS, call.name), call.name


def kernel(name: str, inputs: Any, out: Any, **attributes: Any) -> Kernel:
    return Kernel(CpuBackend(), name, tuple(inputs), out, attributes, "Forward")


def product_and_cast(of_inputs: Any, of_product: Any, of_result: Any) -> list[Kernel]:
    product = new_view(4, 6, dtype=of_product)
    first = kernel("matmul", [new_view(4, 3, dtype=of_inputs), new_view(3, 6, dtype=of_inputs)], product)
    return [first, kernel("cast", [product], new_view(4, 6, dtype=of_result))]


def norm_and_cast(of_x: Any, of_result: Any) -> list[Kernel]:
    row = [new_view(6, dtype=F32) for _ in range(2)]
    out = new_view(4, 6, dtype=of_x), new_view(4, dtype=F32), new_view(4, dtype=F32)
    first = kernel("layer_norm", [new_view(4, 6, dtype=of_x), *row], out, eps=1e-5)
    return [first, kernel("cast", out[:1], new_view(4, 6, dtype=of_result))]


def sum_norm_and_cast(of_inputs: Any) -> list[Kernel]:
    """A product in float32, a row and a residual added, and its norm, which is cast to bfloat16."""
    a, b = new_view(4, 3, dtype=of_inputs), new_view(3, 6, dtype=of_inputs)
    rows, residual = [new_view(6, dtype=F32) for _ in range(3)], new_view(4, 6, dtype=F32)
    out = *(new_view(4, 6, dtype=F32) for _ in range(2)), *(new_view(4, dtype=F32) for _ in range(2))
    first = kernel("matmul_add_norm", [a, b, rows[0], residual, *rows[1:]], out, eps=1e-5)
    return [first, kernel("cast", out[1:2], new_view(4, 6))]


def dtypes_of(nodes: Any) -> list[Any]:
    return [node.outputs[0].dtype for node in nodes]


def test_a_cast_becomes_part_of_what_can_give_its_dtype():
    assert dtypes_of(fuse(product_and_cast(bfloat16, bfloat16, F32))) == [F32]
    assert dtypes_of(fuse(norm_and_cast(F32, bfloat16))) == [bfloat16]
    (norm,) = fuse(sum_norm_and_cast(bfloat16))
    assert dtypes_of([norm]) == [F32] and norm.outputs[1].dtype == bfloat16
    for nodes in (
        product_and_cast(F32, F32, bfloat16),
        product_and_cast(F32, F32, np.dtype(np.float16)),
        product_and_cast(F32, bfloat16, F32),
        product_and_cast(bfloat16, F32, bfloat16),
        product_and_cast(bfloat16, bfloat16, np.dtype(np.float16)),
        norm_and_cast(bfloat16, F32),
        norm_and_cast(F32, np.dtype(np.float16)),
        sum_norm_and_cast(F32),  # no kernel has matrices of float32 and a norm of bfloat16
    ):
        assert fuse(nodes) == nodes


@pytest.mark.parametrize(
    "make", [lambda: product_and_cast(bfloat16, bfloat16, F32), lambda: norm_and_cast(F32, bfloat16)]
)
def test_a_cast_stays_where_something_else_reads_what_it_casts(make):
    for change in ("read", "kept", "transposed"):
        nodes = make()
        view = nodes[1].inputs[0]
        if change == "read":
            nodes.append(kernel("relu", [view], new_view(4, 6, dtype=view.dtype)))
        elif change == "kept":
            view.memory.owner = np.zeros((4, 6), view.dtype)
        else:
            size = view.dtype.itemsize
            turned = View(view.memory, 0, (6, 4), view.dtype, (size, 6 * size))
            nodes[1] = kernel("cast", [turned], new_view(6, 4, dtype=nodes[1].out.dtype))
        assert fuse(nodes) == nodes, change
