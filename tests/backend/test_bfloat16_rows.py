# SPDX-License-Identifier: Apache-2.0
"""Kernels of transformers on bfloat16 arrays, against float64: at most 2^-8 of the sum of magnitudes.

Those that recorded steps alone have are among them; the steps are in test_bfloat16_transformer.py.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.test_bfloat16 import BOTH, KERNELS, UNIT, bfloat16, floats, like, numbers, run_for, wide
from tests.backend.test_lower_rows import NUMPY
from tests.slow_cases import slow_but_first

F32 = np.dtype(np.float32)
quick = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def assert_within(found: np.ndarray, wanted: np.ndarray, limit: np.ndarray, name: str) -> None:
    error = np.abs(wide(found) - wanted) - UNIT * limit
    assert (error <= 1e-30).all(), (name, error.max(initial=0))


# ---- attention -----------------------------------------------------------------------------------------


def heads(x: np.ndarray, num_heads: int, parts: int) -> list[np.ndarray]:
    """``parts`` projections side by side -> each as (batch, heads, length, d), float64."""
    batch, length, _ = x.shape
    return list(wide(x).reshape(batch, length, parts, num_heads, -1).transpose(2, 0, 3, 1, 4))


def joined(*parts: np.ndarray) -> np.ndarray:
    """The inverse of ``heads``."""
    batch, num_heads, length, d = parts[0].shape
    return np.stack(parts).transpose(1, 3, 0, 2, 4).reshape(batch, length, len(parts) * num_heads * d)


attention_cases = given(
    seeds, st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 40)), st.tuples(*[st.integers(1, 140)] * 2),
    st.sampled_from("scm"),
)  # fmt: skip


@quick
@attention_cases
def test_attention_and_its_gradient(seed, sizes, lengths, kind):
    batch, num_heads, d = sizes
    width, (queries, keys) = num_heads * d, lengths if kind == "m" else lengths[:1] * 2
    if kind == "m":
        inputs = numbers(seed, batch, queries, width), numbers(seed + 1, batch, keys, 2 * width)
        q, k, v = *heads(inputs[0], num_heads, 1), *heads(inputs[1], num_heads, 2)
    else:
        inputs = (numbers(seed, batch, queries, 3 * width),)
        q, k, v = heads(inputs[0], num_heads, 3)
    scores = q @ k.swapaxes(2, 3) / np.sqrt(d)
    scores = np.where(np.tri(queries, keys) > 0, scores, -np.inf) if kind == "c" else scores
    powers = np.exp(scores - scores.max(3, keepdims=True))
    weights = powers / powers.sum(3, keepdims=True)
    options = {"num_heads": num_heads, "causal": kind == "c"}
    y = like(batch, queries, width)
    assert KERNELS.attention(*inputs, out=y, **options)
    assert_within(y, joined(weights @ v), joined(weights @ np.abs(v)), "y")
    dy, out = numbers(seed + 2, *y.shape), tuple(like(*x.shape) for x in inputs)
    single = out if len(out) > 1 else out[0]
    assert KERNELS.attention_backward(dy, *inputs, out=single, **options)
    (dys,) = heads(dy, num_heads, 1)
    dweights, largest = dys @ v.swapaxes(2, 3), np.abs(dys) @ np.abs(v).swapaxes(2, 3)
    dscores = weights * (dweights - (dweights * weights).sum(3, keepdims=True)) / np.sqrt(d)
    sizes_of = weights * (largest + (largest * weights).sum(3, keepdims=True)) / np.sqrt(d)
    wanted = dscores @ k, dscores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ dys
    limits = sizes_of @ np.abs(k), sizes_of.swapaxes(2, 3) @ np.abs(q), weights.swapaxes(2, 3) @ np.abs(dys)
    parts = [slice(0, 1), slice(1, 3)] if kind == "m" else [slice(0, 3)]
    for array, part in zip(out, parts, strict=True):
        assert_within(array, joined(*wanted[part]), joined(*limits[part]), "gradient")


def test_attention_takes_no_arrays_of_two_dtypes():
    x, memory, y = numbers(1, 2, 5, 12), numbers(2, 2, 5, 8), like(2, 5, 4)
    options = {"num_heads": 2, "causal": False}
    assert not KERNELS.attention(x, out=y.astype("f"), **options)
    assert not KERNELS.attention(x.astype("f"), out=y, **options)
    assert not KERNELS.attention(y, memory.astype("f"), out=y.copy(), **options)
    assert not KERNELS.attention_backward(y.astype("f"), x, out=like(*x.shape), **options)
    assert not KERNELS.attention_backward(y, x, out=like(*x.shape, dtype=F32), **options)


# ---- products that are finished row by row -------------------------------------------------------------

shapes = st.tuples(st.integers(1, 300), st.integers(1, 70), st.integers(1, 40))
dtypes = st.sampled_from(BOTH)


def operands(seed: int, shape: tuple[int, int, int], transpose_b: bool = False) -> Any:
    """(a, b), their product in float64, the sums of its magnitudes."""
    m, n, k = shape
    a, b = numbers(seed, m, k), numbers(seed + 1, k, n)
    found = wide(a) @ wide(b), np.abs(wide(a)) @ np.abs(wide(b))
    return (a, b.T.copy() if transpose_b else b), *found


@pytest.mark.parametrize("k", [511, 512, 513, 1300])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_product_over_many_rows(k, transpose_b):
    (a, b), product, sizes = operands(k, (70, 30, k), transpose_b)
    for dtype in BOTH:
        for transpose_a in (False, True):
            y = like(70, 30, dtype=dtype)
            given_a = a.T.copy() if transpose_a else a
            assert KERNELS.matmul(given_a, b, out=y, transpose_a=transpose_a, transpose_b=transpose_b)
            assert_within(y, product, sizes, "product")


@quick
@given(seeds, shapes, dtypes, dtypes)
def test_product_with_gelu_and_its_derivative(seed, shape, of_y, of_derivative):
    (a, b), product, sizes = operands(seed, shape)
    bias, outs = (
        floats(seed + 2, shape[1]),
        (like(*shape[:2], dtype=of_y), like(*shape[:2], dtype=of_derivative)),
    )
    assert KERNELS.matmul_gelu(a, b, bias, out=outs)
    u, wanted, derivative = product + bias, np.empty(shape[:2]), np.empty(shape[:2])
    NUMPY.run("gelu", u, out=wanted)
    NUMPY.run("gelu_backward", np.ones_like(u), u, out=derivative)
    rest = 1e-3 * (sizes + np.abs(bias) + 1)  # of sums in float32
    assert_within(outs[0], wanted, np.abs(wanted) + rest, "gelu")
    assert_within(outs[1], derivative, np.abs(derivative) + rest, "derivative")


@quick
@given(seeds, shapes, st.booleans(), dtypes, dtypes)
def test_product_times_a_factor(seed, shape, transpose_b, of_factor, of_y):
    inputs, product, sizes = operands(seed, shape, transpose_b)
    factor, y = numbers(seed + 2, *shape[:2]).astype(of_factor), like(*shape[:2], dtype=of_y)
    assert KERNELS.matmul_mul(*inputs, factor, out=y, transpose_b=transpose_b)
    assert_within(y, product * wide(factor), sizes * np.abs(wide(factor)), "product")


@quick
@given(seeds, shapes, dtypes, dtypes, dtypes)
def test_product_with_a_residual_and_the_norm_of_the_sum(seed, shape, of_residual, of_sum, of_norm):
    m, n, _ = shape
    inputs, product, sizes = operands(seed, shape)
    bias, residual = floats(seed + 2, n), numbers(seed + 3, m, n).astype(of_residual)
    exact, y = product + bias + wide(residual), like(m, n, dtype=of_sum)
    assert KERNELS.matmul_add(*inputs, bias, residual, out=y)
    assert_within(y, exact, sizes + np.abs(bias) + np.abs(wide(residual)), "sum")
    scale, shift = floats(seed + 4, n), floats(seed + 5, n)
    total, normal = like(m, n, dtype=of_sum), like(m, n, dtype=of_norm)
    outs = total, normal, like(m, dtype=F32), like(m, dtype=F32)
    assert KERNELS.matmul_add_norm(*inputs, bias, residual, scale, shift, out=outs, eps=0.1)
    np.testing.assert_array_equal(total, y)
    wanted = np.empty((m, n)), np.empty(m), np.empty(m)
    # of what backward reads
    NUMPY.run("layer_norm", wide(total), wide(scale), wide(shift), out=wanted, eps=0.1)
    limit = np.abs(wanted[0] - shift) + np.abs(shift) + 1e-2
    assert_within(normal, wanted[0], limit, "norm")
    for found, statistic in zip(outs[2:], wanted[1:], strict=True):
        np.testing.assert_allclose(found, statistic, rtol=1e-4, atol=1e-4)


def test_products_take_no_other_dtypes():
    a, b, bias, y = numbers(1, 6, 4), numbers(2, 4, 5), floats(3, 5), like(6, 5)
    wide_y = y.astype("f")
    assert KERNELS.matmul_gelu(a, b, bias, out=(y, y.copy()))
    assert not KERNELS.matmul_gelu(a, b, bias.astype(bfloat16), out=(y, y.copy()))
    assert not KERNELS.matmul_gelu(a, b.astype("f"), bias, out=(y, y.copy()))
    assert not KERNELS.matmul_gelu(a.astype("f"), b.astype("f"), bias, out=(y, wide_y))
    assert not KERNELS.matmul_mul(a.astype("f"), b.astype("f"), y, out=wide_y, transpose_b=False)
    assert not KERNELS.matmul_add(a, b, bias, y.astype("f8"), out=y)
    outs = (y, y.copy(), like(6), like(6, dtype=F32))
    assert not KERNELS.matmul_add_norm(a, b, bias, y, bias, bias, out=outs, eps=1e-5)


@pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="it runs these tests again")
@slow_but_first("isa", ["AVX2", "AVX512_CORE_BF16"])
def test_products_are_right_with_and_without_the_instructions(isa):
    run_for(isa, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", "product_")


# ---- norms ---------------------------------------------------------------------------------------------


@quick
@given(seeds, st.integers(1, 200), st.integers(1, 300))
def test_a_norm_of_float32_is_rounded_once(seed, rows, columns):
    x, scale, shift = floats(seed, rows, columns), floats(seed + 1, columns), floats(seed + 2, columns)
    exact = like(rows, columns, dtype=F32), like(rows, dtype=F32), like(rows, dtype=F32)
    narrow = like(rows, columns), like(rows, dtype=F32), like(rows, dtype=F32)
    assert KERNELS.layer_norm(x, scale, shift, out=exact, eps=1e-3)
    assert KERNELS.layer_norm(x, scale, shift, out=narrow, eps=1e-3)
    np.testing.assert_array_equal(narrow[0].view("u2"), exact[0].astype(bfloat16).view("u2"))
    for found, wanted in zip(narrow[1:], exact[1:], strict=True):
        np.testing.assert_array_equal(found, wanted)


@quick
@given(seeds, st.integers(1, 200), st.integers(1, 300))
def test_gradient_of_a_norm_plus_another(seed, rows, columns):
    dy, x, addend = (numbers(seed + i, rows, columns) for i in range(3))
    statistics = floats(seed + 3, columns), floats(seed + 4, rows), np.abs(floats(seed + 5, rows))
    inputs = (dy, x, *statistics)
    outs = like(rows, columns), like(columns, dtype=F32), like(columns, dtype=F32)
    assert KERNELS.layer_norm_backward_add(*inputs, addend, out=outs)
    wanted = np.empty((rows, columns)), np.empty(columns), np.empty(columns)
    NUMPY.run("layer_norm_backward", *map(wide, inputs), out=wanted)
    scale, mean, factor = (wide(array) for array in statistics)
    normal = (wide(x) - mean[:, None]) * factor[:, None]
    g = np.abs(wide(dy) * scale)
    sums = g + g.mean(1, keepdims=True) + np.abs(normal) * (g * np.abs(normal)).mean(1, keepdims=True)
    assert_within(outs[0], wanted[0] + wide(addend), factor[:, None] * sums + np.abs(wide(addend)), "dx")
    for found, exact, limit in zip(
        outs[1:], wanted[1:], (np.abs(wide(dy) * normal), np.abs(wide(dy))), strict=True
    ):
        assert_within(found, exact, limit.sum(0), "gradient of scale or shift")
    assert not KERNELS.layer_norm_backward_add(*inputs, addend.astype("f"), out=outs)
