# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on bfloat16 arrays, against float64 on the same numbers: at most 2^-8 of the sum of magnitudes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from singa_lite import _native
from singa_lite.backend.cpu import CpuBackend, NumpyBackend
from singa_lite.backend.cpu.fuse import fuse
from singa_lite.backend.formulas import FORMULAS
from singa_lite.dtypes import bfloat16
from singa_lite.graph.arena import share_memory
from singa_lite.graph.memory import Memory, View
from singa_lite.graph.nodes import Kernel
from tests.limits import LIMIT_S
from tests.slow_cases import slow_but_first

KERNELS, REASON = _native.load("_kernels")
if KERNELS is None:
    pytest.skip(f"nothing was compiled: {REASON}", allow_module_level=True)
needs_onednn = pytest.mark.skipif(not KERNELS.onednn, reason="built without oneDNN: products are numpy's")
REFERENCE = NumpyBackend()
BACKEND = CpuBackend()
UNIT = 2.0**-8
quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)
counts = st.integers(0, 3000) | st.integers(60_000, 70_000)  # the second in several threads
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
BOTH = (bfloat16, np.dtype(np.float32))


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Normal numbers rounded to bfloat16."""
    return floats(seed, *shape).astype(bfloat16)


def like(*shape: int, dtype: Any = bfloat16) -> np.ndarray:
    """An output full of what must be overwritten."""
    return np.full(shape, 99, dtype)


def wide(array: np.ndarray) -> np.ndarray:
    """The float64 twin of a float array, a copy of any other."""
    return array.astype(np.float64) if array.dtype in BOTH else array.copy()


def reference(kernel: str, *inputs: np.ndarray, out: tuple[np.ndarray, ...], **attributes: Any) -> Any:
    """What numpy computes in float64 for outputs of these shapes."""
    expected = tuple(map(wide, out))
    REFERENCE.run(kernel, *map(wide, inputs), out=expected[0] if len(out) == 1 else expected, **attributes)
    return expected


def check(
    kernel: str,
    *inputs: np.ndarray,
    out: tuple[np.ndarray, ...],
    limits: Any = None,
    **attributes: Any,
) -> None:
    """The compiled kernel takes the call and is within ``limits``, those of a linear kernel if None are given."""
    expected = reference(kernel, *inputs, out=out, **attributes)
    if limits is None:
        limits = reference(kernel, *(np.abs(wide(array)) for array in inputs), out=out, **attributes)
    single = out[0] if len(out) == 1 else out
    assert getattr(KERNELS, kernel)(*inputs, out=single, **attributes), f"{kernel} did not take the call"
    for array, wanted, limit in zip(out, expected, limits, strict=True):
        error = np.abs(wide(array) - wanted)
        assert (error <= UNIT * np.abs(limit) + 1e-30).all(), (kernel, error.max(initial=0))


# ---- moving and rounding -------------------------------------------------------------------------------

SPECIAL = [0, -0.0, 1e-40, -1e-45, 3.4e38, -3.4e38, np.inf, -np.inf, 1.00390625, 1.01171875, np.nan, -np.nan]


@quick
@given(seeds, counts)
def test_casts_round_to_nearest_even(seed, count):
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), np.float32(SPECIAL)])
    y, back = like(x.size), like(x.size, dtype=np.float32)
    assert KERNELS.cast(x, out=y) and KERNELS.cast(y, out=back)
    is_nan = np.isnan(x)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(y[~is_nan].view("u2"), x[~is_nan].astype(bfloat16).view("u2"))
    np.testing.assert_array_equal(back.view("u4"), y.view("u2").astype("u4") << 16)
    assert np.isnan(back[is_nan]).all() and (np.signbit(back) == np.signbit(x)).all()


def test_copies_transposes_and_fills():
    x, y = numbers(1, 40, 30), like(30, 40)
    assert KERNELS.transpose(x, out=y, axes=(1, 0))
    np.testing.assert_array_equal(y, x.T)
    assert KERNELS.copy(x[::2, ::-3], out=y[:20, :10])
    np.testing.assert_array_equal(y[:20, :10], x[::2, ::-3])
    assert KERNELS.fill(out=x, value=1.003) and (x == bfloat16.type(1.003)).all()


@quick
@given(seeds, st.tuples(*[st.integers(1, 40)] * 3), st.integers(1, 30))
def test_taking_by_index_and_putting_back(seed, shape, count):
    x, ids = numbers(seed, *shape), np.random.default_rng(seed).integers(0, shape[1], count)
    y = like(shape[0], count, shape[2])
    assert KERNELS.gather(x, ids, out=y, axis=1, where="embedding")
    np.testing.assert_array_equal(y, x[:, ids])
    check("gather_backward", numbers(seed + 1, *y.shape), ids, out=(like(*shape),), axis=1)
    assert not KERNELS.gather(x, ids, out=y.astype("f"), axis=1)
    assert not KERNELS.gather_backward(y.astype("f"), ids, out=like(*shape), axis=1)


def test_other_dtypes_of_two_bytes_are_not_taken():
    x, y = numbers(1, 8), like(8)
    for other in (x.view(np.float16), x.view(np.uint16), x.view(np.int16)):
        assert not KERNELS.copy(x, out=other) and not KERNELS.relu(other, out=y)
        assert not KERNELS.cast(other, out=y)
    locked = like(8)
    locked.flags.writeable = False
    assert not KERNELS.fill(out=locked, value=1.0) and not KERNELS.relu(x, out=locked)
    assert not KERNELS.add(x[::2], x[::2], out=like(4)) and (y == 99).all()


# ---- element by element and sums -----------------------------------------------------------------------

STEEP = {"floor_div", "sign", "ceil"}  # a float32 may be on the other side of a step


@quick
@given(seeds, st.sampled_from([f for f in FORMULAS.values() if f.name not in STEEP]), counts, st.data())
def test_formulas_on_arrays_of_both_dtypes(seed, formula, count, data):
    dtypes = data.draw(st.tuples(*[st.sampled_from(BOTH)] * 4))
    assume(bfloat16 in dtypes[: len(formula.inputs) + 1])
    inputs = [
        (np.abs(floats(seed + k, count)) + 0.25).astype(bfloat16).astype(dtypes[k])
        for k in range(len(formula.inputs))
    ]
    if formula.name.startswith("binary_cross"):
        inputs = [(x / x.dtype.type(8)).clip(0.01, 0.9).astype(x.dtype) for x in inputs]
    attributes = dict.fromkeys(formula.numbers, 0.5)
    out = like(count, dtype=dtypes[3])
    (wanted,) = reference(formula.name, *inputs, out=(out,), **attributes)
    check(formula.name, *inputs, out=(out,), limits=(np.abs(wanted) + 1e-2,), **attributes)


@quick
@given(seeds, st.lists(st.integers(1, 40), min_size=1, max_size=3), st.sampled_from(["add", "mul"]))
def test_arithmetic_of_images_rows_and_numbers(seed, shape, kernel):
    a = np.abs(numbers(seed, *shape))
    for other in (shape, shape[-1:], [1], [1] * len(shape)):
        for dtype in BOTH:
            check(kernel, a, np.abs(numbers(seed + 1, *other)).astype(dtype), out=(like(*shape),))


def test_formulas_may_write_over_their_first_input():
    a, b = numbers(1, 50, 700), numbers(2, 700)
    expected = like(50, 700)
    assert KERNELS.add(a, b, out=expected) and KERNELS.add(a, b, out=a)
    np.testing.assert_array_equal(a, expected)


@quick
@given(seeds, st.lists(st.integers(1, 9) | st.integers(60, 300), max_size=3), st.data())
def test_sums_and_means_over_any_axes(seed, shape, data):
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True).map(tuple)) if shape else ()
    x = numbers(seed, *shape)
    kept = tuple(1 if axis in axes else n for axis, n in enumerate(shape))
    for dtype in BOTH:
        for kernel in ("sum", "mean"):
            check(kernel, x, out=(like(*kept, dtype=dtype),), axes=axes, keepdims=True)
        check("sum_to", x, out=(like(*kept, dtype=dtype),))


# ---- products and windows ------------------------------------------------------------------------------


@needs_onednn
@quick
@given(
    seeds,
    st.lists(st.integers(1, 3), max_size=2),
    st.tuples(*[st.integers(1, 150)] * 3),
    st.booleans(),
    st.booleans(),
)
def test_products(seed, stack, sizes, transpose_a, transpose_b):
    m, n, k = sizes
    a = numbers(seed, *stack, *((k, m) if transpose_a else (m, k)))
    b = numbers(seed + 1, *stack, *((n, k) if transpose_b else (k, n)))
    for dtype in BOTH:
        out = like(*stack, m, n, dtype=dtype)
        check("matmul", a, b, out=(out,), transpose_a=transpose_a, transpose_b=transpose_b)


@needs_onednn
@pytest.mark.parametrize("transpose_a", [False, True])
def test_products_of_many_rows(transpose_a):
    a, b = numbers(1, *((40, 1300) if transpose_a else (1300, 40))), numbers(2, 40, 30)
    for dtype in BOTH:
        check("matmul", a, b, out=(like(1300, 30, dtype=dtype),), transpose_a=transpose_a, transpose_b=False)


@needs_onednn
@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_products_with_bias_and_relu(dtype):
    a, b, bias, y = numbers(1, 33, 70), numbers(2, 70, 20), floats(3, 20), like(33, 20, dtype=dtype)
    assert KERNELS.matmul(a, b, bias, out=y, relu=True)
    wanted = np.maximum(wide(a) @ wide(b) + bias, 0)
    limit = np.abs(wide(a)) @ np.abs(wide(b)) + np.abs(bias)
    assert (np.abs(wide(y) - wanted) <= UNIT * limit).all() and (y == 0).any()
    assert not KERNELS.matmul(a, b, bias.astype(bfloat16), out=y)  # a bias is of float32
    assert not KERNELS.matmul(a, b.astype(np.float32), out=y)


@st.composite
def convolutions(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Shapes of x, w, y and the attributes of a convolution that fits."""
    groups = draw(st.sampled_from([1, 1, 1, 1, 2, 3]))
    each = st.integers(1, 9) | st.sampled_from([16, 32])
    n, c, o = draw(st.integers(1, 4)), groups * draw(each), groups * draw(each)
    kernel, size = draw(st.tuples(*[st.integers(1, 5)] * 2)), draw(st.tuples(*[st.integers(1, 14)] * 2))
    stride, dilation = draw(pairs), draw(pairs)
    padding = draw(st.tuples(*[st.integers(0, 2)] * 2))
    axes = list(zip(size, kernel, stride, padding, dilation, strict=True))
    assume(all(h + 2 * p > d * (k - 1) for h, k, _, p, d in axes))
    out = tuple((h + 2 * p - d * (k - 1) - 1) // s + 1 for h, k, s, p, d in axes)
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return (n, c, *size), (o, c // groups, *kernel), (n, o, *out), geometry


def check_convolution(seed: int, x_shape: Any, w_shape: Any, y_shape: Any, geometry: dict[str, Any]) -> None:
    x, w, dy = numbers(seed, *x_shape), numbers(seed + 1, *w_shape), numbers(seed + 3, *y_shape)
    b, dw = floats(seed + 2, w_shape[0]), like(*w_shape, dtype=np.float32)
    check("conv2d", x, w, b, out=(like(*y_shape),), **geometry)
    check("conv2d", x, w, out=(like(*y_shape),), **geometry)
    check("conv2d_backward_data", dy, w, out=(like(*x_shape),), **geometry)
    check_float_weights("conv2d", x, floats(seed + 1, *w_shape), b, y_shape, geometry)
    check_float_weights("conv2d_backward_data", dy, floats(seed + 1, *w_shape), None, x_shape, geometry)
    check("conv2d_backward_weight", dy, x, out=(dw,), **geometry)
    check("conv2d_backward_weight", dy, x, out=(dw, like(w_shape[0], dtype=np.float32)), **geometry)


def check_float_weights(
    kernel: str, x: Any, w: Any, b: Any, out_shape: Any, geometry: dict[str, Any]
) -> None:
    """Weights of float32 give the bits of the same ones rounded before."""
    bias = () if b is None else (b,)
    got, expected, of_numpy = (like(*out_shape) for _ in range(3))
    for weights, out in ((w, got), (w.astype(bfloat16), expected)):
        assert getattr(KERNELS, kernel)(x, weights, *bias, out=out, **geometry)
    np.testing.assert_array_equal(got, expected)
    REFERENCE.run(kernel, x, w, *bias, out=of_numpy, **geometry)
    limit = like(*out_shape, dtype=np.float32)
    REFERENCE.run(kernel, *(abs(wide(array)) for array in (x, w, *bias)), out=limit, **geometry)
    assert (abs(wide(of_numpy) - wide(expected)) <= UNIT * limit).all()


@needs_onednn
@quick
@given(seeds, convolutions())
def test_convolution_and_its_gradients(seed, convolution):
    check_convolution(seed, *convolution)


@needs_onednn
@pytest.mark.parametrize(
    ("x", "w", "stride"),
    [
        ((4, 1, 28, 28), (20, 1, 5, 5), 1),
        ((4, 20, 12, 12), (50, 20, 5, 5), 1),
        ((2, 3, 32, 32), (16, 3, 3, 3), 1),
        ((2, 3, 64, 64), (64, 3, 7, 7), 2),
        ((2, 64, 14, 14), (128, 64, 3, 3), 2),
        ((2, 64, 14, 14), (128, 64, 1, 1), 2),
    ],
)
def test_convolutions_of_real_models(x, w, stride):
    padding = w[2] // 2 if x[1] != 1 and x[1] != 20 else 0
    out = tuple((n + 2 * padding - k) // stride + 1 for n, k in zip(x[2:], w[2:], strict=True))
    geometry = {"stride": (stride,) * 2, "padding": (padding,) * 2, "dilation": (1, 1), "groups": 1}
    check_convolution(3, x, w, (x[0], w[0], *out), geometry)


@needs_onednn
@pytest.mark.parametrize(
    ("size", "kernel", "stride"),
    [((1, 1), 3, 2), ((8, 1), 3, 2), ((2, 2), 3, 3), ((1, 1), 5, 2), ((1, 9), 7, 2)],
)
def test_weights_that_meet_no_pixel_have_a_gradient_of_0(size, kernel, stride):
    padding = kernel // 2
    geometry = {"stride": (stride,) * 2, "padding": (padding,) * 2, "dilation": (1, 1), "groups": 1}
    area = tuple((n + 2 * padding - kernel) // stride + 1 for n in size)
    for seed in range(3):
        large = (numbers(seed, 2, 64, 16, 16).astype(np.float32) * 1e15).astype(bfloat16)
        given = geometry | {"stride": (1, 1)}  # its results stay in memory that the next call may get
        assert KERNELS.conv2d_backward_weight(
            large, large, out=like(64, 64, kernel, kernel, dtype=np.float32), **given
        )
        check_convolution(seed, (2, 64, *size), (64, 64, kernel, kernel), (2, 64, *area), geometry)


@needs_onednn
@pytest.mark.parametrize(
    ("x", "w", "y", "stride"),
    [
        ((1, 1, 1, 3), (20, 1, 1, 3), (1, 20, 1, 1), (1, 4)),
        ((2, 1, 11, 1), (2, 1, 4, 1), (2, 2, 3, 1), (3, 2)),
        ((5, 1, 5, 2), (33, 1, 2, 2), (5, 33, 2, 1), (3, 3)),
        ((1, 8, 13, 3), (16, 8, 5, 3), (1, 16, 3, 1), (3, 4)),
    ],
)
def test_a_gradient_of_weights_does_not_depend_on_what_is_behind_the_image(x, w, y, stride):
    memory, dw = np.full(4096, np.nan, bfloat16), like(*w, dtype=np.float32)
    image = memory[: math.prod(x)].reshape(x)
    image[...] = 1
    geometry = {"stride": stride, "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    assert KERNELS.conv2d_backward_weight(np.ones(y, bfloat16), image, out=dw, **geometry)
    np.testing.assert_array_equal(dw, np.full(w, y[0] * y[2] * y[3]))


@needs_onednn
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize("channels", [(1, 20), (16, 16), (20, 50), (64, 64), (3, 5)])
def test_a_relu_behind_a_convolution_lets_nan_pass(dtype, channels):
    x, w = numbers(1, 2, channels[0], 12, 12).astype(dtype), numbers(2, *channels[::-1], 3, 3).astype(dtype)
    plain, rectified = (like(2, channels[1], 12, 12, dtype=dtype) for _ in range(2))
    geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    x[0, 0, 4, 4] = np.nan
    assert KERNELS.conv2d(x, w, out=plain, **geometry)
    assert KERNELS.conv2d(x, w, out=rectified, **geometry, relu=True)
    assert np.isnan(plain.astype("f")).any()
    np.testing.assert_array_equal(rectified.astype("f"), np.maximum(plain.astype("f"), 0))


@needs_onednn
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_relu_behind_a_product_lets_nan_pass(dtype, has_bias):
    a, b = numbers(1, 7, 30).astype(dtype), numbers(2, 30, 9).astype(dtype)
    bias = [np.ones(9, np.float32)] if has_bias else []
    plain, rectified = (like(7, 9, dtype=dtype) for _ in range(2))
    a[2, 3] = np.nan
    assert KERNELS.matmul(a, b, *bias, out=plain)
    assert KERNELS.matmul(a, b, *bias, out=rectified, relu=True)
    assert np.isnan(plain.astype("f")[2]).all()
    np.testing.assert_array_equal(rectified.astype("f"), np.maximum(plain.astype("f"), 0))


def in_blocks(x: np.ndarray, block: int) -> np.ndarray:
    """The image in blocks of so many channels, in an array of its own shape."""
    n, c, *area = x.shape
    return np.ascontiguousarray(np.moveaxis(x.reshape(n, c // block, block, *area), 2, -1)).reshape(x.shape)


@needs_onednn
def test_convolutions_on_images_in_the_formats_they_want():
    geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    x, w, dy = numbers(1, 2, 32, 9, 9), numbers(2, 48, 32, 3, 3), numbers(3, 2, 48, 9, 9)
    shapes = x.shape, w.shape, dy.shape
    plain, blocked = like(*dy.shape), like(*dy.shape)
    formats = KERNELS.conv_formats("conv2d", *shapes, False, **geometry, dtype=bfloat16)
    assert KERNELS.conv2d(x, w, out=plain, **geometry, relu=True)
    assert KERNELS.conv2d(
        in_blocks(x, formats[0]), w, out=blocked, **geometry, memory_formats=formats, relu=True
    )
    np.testing.assert_array_equal(blocked, in_blocks(plain, formats[1]))
    assert (plain == 0).any() and (plain > 0).any()
    back = like(*dy.shape)
    assert KERNELS.reorder(blocked, out=back, memory_formats=(formats[1], 1))
    np.testing.assert_array_equal(back, plain)
    plain, blocked = like(*w.shape, dtype=np.float32), like(*w.shape, dtype=np.float32)
    formats = KERNELS.conv_formats("conv2d_backward_weight", *shapes, False, **geometry, dtype=bfloat16)
    assert KERNELS.conv2d_backward_weight(dy, x, out=plain, **geometry)
    given_x, given_dy = in_blocks(x, formats[0]), in_blocks(dy, formats[1])
    assert KERNELS.conv2d_backward_weight(given_dy, given_x, out=blocked, **geometry, memory_formats=formats)
    np.testing.assert_array_equal(blocked, plain)


@quick
@given(
    seeds,
    st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 11)] * 2),
    pairs,
    pairs,
    st.booleans(),
    st.data(),
)
def test_pooling_and_its_gradients(seed, shape, kernel_size, stride, count_include_pad, data):
    padding = tuple(data.draw(st.integers(0, k - 1)) for k in kernel_size)
    axes = list(zip(shape[2:], kernel_size, stride, padding, strict=True))
    assume(all(n + 2 * p >= k for n, k, _, p in axes))
    out = (*shape[:2], *((n + 2 * p - k) // s + 1 for n, k, s, p in axes))
    geometry = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
    x, dy = floats(seed, *shape).round(1).astype(bfloat16), numbers(seed + 1, *out)
    for dtype in (np.uint8, np.int32):
        y, indices = like(*out), like(*out, dtype=dtype)
        exact = np.zeros(out)
        check("max_pool_2d", x, out=(y, indices), limits=(exact, exact), **geometry)
        check("max_pool_2d_backward", dy, indices, out=(like(*shape),), **geometry)
    geometry["count_include_pad"] = count_include_pad
    check("avg_pool_2d", x, out=(like(*out),), **geometry)
    check("avg_pool_2d_backward", dy, out=(like(*shape),), **geometry)


@pytest.mark.parametrize("block", [3, 8, 16, 48])
def test_pooling_of_images_in_blocks(block):
    geometry = {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1)}
    x, dy = numbers(1, 2, 48, 11, 10), numbers(2, 2, 48, 6, 5)
    for kernel, given_, shapes, attributes in (
        ("max_pool_2d", x, (dy.shape, dy.shape), {}),
        ("avg_pool_2d", x, (dy.shape,), {"count_include_pad": True}),
        ("avg_pool_2d_backward", dy, (x.shape,), {"count_include_pad": True}),
    ):
        plain = [
            like(*shape, dtype=dtype) for shape, dtype in zip(shapes, (bfloat16, np.uint8), strict=False)
        ]
        blocked = [array.copy() for array in plain]
        for image, out, memory_format in ((given_, plain, 1), (in_blocks(given_, block), blocked, block)):
            target = tuple(out) if len(out) > 1 else out[0]
            done = getattr(KERNELS, kernel)(
                image, out=target, **geometry, **attributes, memory_format=memory_format
            )
            assert done, kernel
        for one, other in zip(plain, blocked, strict=True):
            np.testing.assert_allclose(wide(in_blocks(one, block)), wide(other), rtol=2 * UNIT, atol=1e-6)


# ---- normalisation -------------------------------------------------------------------------------------


@quick
@given(
    seeds,
    st.integers(1, 5),
    st.sampled_from([1, 3, 16, 24, 40]),
    st.sampled_from([(), (1, 1), (7, 5), (20, 21)]),
)
def test_batch_normalisation(seed, batch, channels, inner):
    assume(batch * int(np.prod(inner)) > 3)
    shape = (batch, channels, *inner)
    axes, rows = (0, *range(2, len(shape))), (1, channels, *[1] * len(inner))
    x, dy = (floats(seed, *shape) + 3).astype(bfloat16), numbers(seed + 1, *shape)
    scale, bias = floats(seed + 2, channels), floats(seed + 3, channels)
    mean, inverse_std = like(channels, dtype=np.float32), like(channels, dtype=np.float32)
    running = (floats(seed + 4, channels), np.abs(floats(seed + 5, channels)))
    y, ones = like(*shape), np.ones(channels)
    assert KERNELS.batchnorm_2d_train(
        x, scale, bias, out=(y, mean, inverse_std, *running), momentum=0.1, eps=1e-3
    )
    of_mean, of_std = wide(x).mean(axes), 1 / np.sqrt(wide(x).var(axes) + 1e-3)
    np.testing.assert_allclose(mean, of_mean, rtol=1e-5)
    np.testing.assert_allclose(inverse_std, of_std, rtol=1e-4)
    factor = (of_std * scale).reshape(rows)
    normal = wide(x) - of_mean.reshape(rows)
    sizes = np.abs(normal * factor) + np.abs(bias).reshape(rows)
    error = np.abs(wide(y) - (normal * factor + bias.reshape(rows)))
    assert (error <= UNIT * sizes + 1e-5).all()
    infer = np.abs(wide(x)) + np.abs(running[0]).reshape(rows)
    infer = infer * (np.abs(scale) / np.sqrt(running[1] + 1e-3)).reshape(rows) + np.abs(bias).reshape(rows)
    check("batchnorm_2d_infer", x, scale, bias, *running, out=(like(*shape),), limits=(infer,), eps=1e-3)
    out = like(*shape), like(channels, dtype=np.float32), like(channels, dtype=np.float32)
    scaled = normal * of_std.reshape(rows)
    sums = np.abs(dy.astype("f8") * scaled).sum(axes), np.abs(wide(dy)).sum(axes)
    count = x.size / channels
    spread = (
        np.abs(wide(dy)) + (sums[1] / count).reshape(rows) + np.abs(scaled) * (sums[0] / count).reshape(rows)
    )
    limits = np.abs(factor) * spread, sums[0] + ones * 1e-3, sums[1] + ones * 1e-3
    check("batchnorm_2d_backward", dy, x, scale, mean, inverse_std, out=out, limits=limits)


@pytest.mark.parametrize("block", [8, 16, 24, 48])
def test_batch_normalisation_in_blocks_with_residual_and_relu(block):
    x, residual, dy = (numbers(seed, 3, 48, 5, 7) for seed in (1, 2, 3))
    scale, bias = floats(4, 48), floats(5, 48)
    results = []
    for memory_format in (1, block):
        given_x, given_residual, given_dy = (in_blocks(array, memory_format) for array in (x, residual, dy))
        statistics = [like(48, dtype=np.float32) for _ in range(4)]
        y, z, dx = like(*x.shape), like(*x.shape), like(*x.shape)
        options = {"momentum": 0.1, "eps": 1e-5, "memory_format": memory_format, "relu": True}
        assert KERNELS.batchnorm_2d_train(
            given_x, scale, bias, given_residual, out=(y, *statistics), **options
        )
        assert KERNELS.batchnorm_2d_train(given_x, scale, bias, out=(z, *statistics), **options)
        grads = dx, like(48, dtype=np.float32), like(48, dtype=np.float32)
        assert KERNELS.batchnorm_2d_backward(
            given_dy, given_x, scale, *statistics[:2], bias, out=grads, memory_format=memory_format
        )
        results.append((y, z, dx, statistics))
    for plain, blocked in zip(results[0][:3], results[1][:3], strict=True):
        np.testing.assert_allclose(wide(in_blocks(plain, block)), wide(blocked), rtol=UNIT, atol=1e-3)
    y, z, dx, (mean, inverse_std, *_) = results[0]
    rows = (1, 48, 1, 1)
    normal = (wide(x) - mean.reshape(rows)) * inverse_std.reshape(rows)
    wanted = normal * scale.reshape(rows) + bias.reshape(rows)
    np.testing.assert_allclose(wide(y), np.maximum(wanted + wide(residual), 0), rtol=UNIT, atol=1e-4)
    np.testing.assert_allclose(wide(z), np.maximum(wanted, 0), rtol=UNIT, atol=1e-4)
    masked = np.where(wide(z) > 0, wide(dy), 0)
    out = like(*x.shape, dtype=np.float64), np.zeros(48), np.zeros(48)
    wides = masked, wide(x), wide(scale), wide(mean), wide(inverse_std)
    REFERENCE.run("batchnorm_2d_backward", *wides, out=out)
    np.testing.assert_allclose(wide(dx), out[0], rtol=2 * UNIT, atol=2 * UNIT)


@quick
@given(seeds, st.integers(1, 200), st.integers(1, 700))
def test_layer_norm_and_its_gradient(seed, rows, columns):
    x, dy = (floats(seed, rows, columns) + 3).astype(bfloat16), numbers(seed + 1, rows, columns)
    scale, bias = floats(seed + 2, columns), floats(seed + 3, columns)
    mean, inverse_std = like(rows, dtype=np.float32), like(rows, dtype=np.float32)
    of_mean = wide(x).mean(1, keepdims=True)
    of_std = 1 / np.sqrt(wide(x).var(1, keepdims=True) + 1e-3)
    normal = (wide(x) - of_mean) * of_std
    limits = np.abs(normal * scale) + np.abs(bias) + 1e-3, 1e-2 * of_mean[:, 0], 1e-2 * of_std[:, 0]
    out = like(rows, columns), mean, inverse_std
    check("layer_norm", x, scale, bias, out=out, limits=limits, eps=1e-3)
    g = wide(dy) * scale
    sums = np.abs(g).mean(1, keepdims=True) + np.abs(normal) * np.abs(g * normal).mean(1, keepdims=True)
    limits = of_std * (np.abs(g) + sums), np.abs(wide(dy) * normal).sum(0) + 1e-3, np.abs(wide(dy)).sum(0)
    out = like(rows, columns), like(columns, dtype=np.float32), like(columns, dtype=np.float32)
    check("layer_norm_backward", dy, x, scale, mean, inverse_std, out=out, limits=limits)


@quick
@given(seeds, st.integers(1, 300), st.integers(1, 300), st.sampled_from([0, 1, -1]))
def test_softmax_and_its_gradient(seed, rows, columns, axis):
    x, dy, y = numbers(seed, rows, columns), numbers(seed + 1, rows, columns), like(rows, columns)
    (wanted,) = reference("softmax", x, out=(y,), axis=axis)
    check("softmax", x, out=(y,), limits=(wanted,), axis=axis)
    inner = np.abs(wide(dy) * wide(y)).sum(axis, keepdims=True)
    limit = wide(y) * (np.abs(wide(dy)) + inner)
    check("softmax_backward", dy, y, out=(like(rows, columns),), limits=(limit,), axis=axis)


# ---- recorded steps ------------------------------------------------------------------------------------

ROW = (16,)
CONV = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
POOL = {"kernel_size": (2, 2), "stride": (2, 2), "padding": (0, 0)}
NORM = {"momentum": 0.1, "eps": 1e-5}


def given_view(values: np.ndarray) -> View:
    """An array that outlives the step."""
    memory = Memory(values.nbytes)
    memory.owner = values
    return View(memory, 0, values.shape, values.dtype, values.strides)


def new_view(*shape: int, dtype: Any = bfloat16) -> View:
    made = np.empty(shape, dtype)
    return View(Memory(made.nbytes), 0, made.shape, made.dtype, made.strides)


def step_of_a_block() -> tuple[list[Kernel], list[np.ndarray]]:
    """A residual block behind a cast, pooling, a product with bias, and gradients of some; what it leaves."""
    nodes: list[Kernel] = []

    def call(kernel: str, inputs: list[View], out: Any, **attributes: Any) -> Any:
        nodes.append(Kernel(BACKEND, kernel, tuple(inputs), out, attributes, "Forward"))
        return out

    def norm(x: View, number: int) -> tuple[View, ...]:
        scale, bias = given_view(floats(number, *ROW)), given_view(floats(number + 1, *ROW))
        running = [given_view(np.zeros(ROW, np.float32)) for _ in range(2)]
        out = new_view(*x.shape), *(new_view(*ROW, dtype=np.float32) for _ in range(2)), *running
        return x, scale, bias, *call("batchnorm_2d_train", [x, scale, bias], out, **NORM)

    left = [
        np.zeros(shape, dtype)
        for shape, dtype in (((3, 8), bfloat16), ((16, 16, 3, 3), np.float32), (ROW, np.float32))
    ]
    image = call("cast", [given_view(floats(1, 3, 16, 6, 6))], new_view(3, 16, 6, 6))
    w1, w2 = (call("cast", [given_view(floats(n, 16, 16, 3, 3))], new_view(16, 16, 3, 3)) for n in (2, 3))
    x, scale, _, y, mean, inverse_std, *_ = norm(
        call("conv2d", [image, w1], new_view(*image.shape), **CONV), 10
    )
    z = call("relu", [y], new_view(*image.shape))
    second = norm(call("conv2d", [z, w2], new_view(*image.shape), **CONV), 20)[3]
    total = call("add", [second, image], new_view(*image.shape))
    block = call("relu", [total], new_view(*image.shape))
    pooled, indices = call(
        "max_pool_2d", [block], (new_view(3, 16, 3, 3), new_view(3, 16, 3, 3, dtype=np.uint8)), **POOL
    )
    flat = View(pooled.memory, 0, (3, 144), pooled.dtype, (288, 2))
    product = call("matmul", [flat, given_view(numbers(5, 144, 8))], new_view(3, 8))
    row = call("add", [product, given_view(floats(6, 8))], new_view(3, 8))
    call("relu", [row], given_view(left[0]))
    grad = call("max_pool_2d_backward", [pooled, indices], new_view(*image.shape), **POOL)
    grad = call("relu_backward", [grad, block], new_view(*image.shape))
    call("conv2d_backward_weight", [grad, z], given_view(left[1]), **CONV)
    dz = call("conv2d_backward_data", [grad, w2], new_view(*image.shape), **CONV)
    masked = call("relu_backward", [dz, z], new_view(*image.shape))
    grads = new_view(*image.shape), given_view(left[2]), new_view(*ROW, dtype=np.float32)
    call("batchnorm_2d_backward", [masked, x, scale, mean, inverse_std], grads)
    return nodes, left


@needs_onednn
def test_a_lowered_step_keeps_blocks_and_fuses_as_in_float32():
    results = []
    for is_lowered in (False, True):
        nodes, left = step_of_a_block()
        if is_lowered:
            nodes = BACKEND.lower(nodes)
        array_of, _ = share_memory(nodes, [], lambda count: np.zeros(count, np.uint8))
        for node in nodes:
            inputs = tuple(map(array_of, node.inputs))
            out = tuple(map(array_of, node.outputs)) if isinstance(node.out, tuple) else array_of(node.out)
            assert getattr(KERNELS, node.name)(*inputs, out=out, **node.attributes), node.name
        results.append(left)
    names = [node.name for node in nodes]
    assert names.count("relu") == 0 and names.count("add") == 0
    assert [len(node.inputs) for node in nodes if node.name.startswith("batchnorm")] == [3, 4, 6]
    convolutions = [node.attributes["memory_formats"] for node in nodes if node.name == "conv2d"]
    assert all(block > 1 for _, block in convolutions) and names.count("reorder") <= 3
    for one, other in zip(*results, strict=True):
        # where two are all but equal, another wins the pooling
        distance = np.linalg.norm(wide(other) - wide(one))
        assert np.linalg.norm(wide(one)) > 0 and distance < 0.1 * np.linalg.norm(wide(one))


def test_a_lowered_step_does_not_fuse_arrays_of_two_dtypes():
    x, y = new_view(3, 16, 6, 6), new_view(3, 16, 6, 6)
    statistics = tuple(new_view(*ROW, dtype=np.float32) for _ in range(6))
    norm = Kernel(BACKEND, "batchnorm_2d_train", (x, *statistics[:2]), (y, *statistics[2:]), NORM, "Forward")
    total = new_view(3, 16, 6, 6, dtype=np.float32)
    add = Kernel(BACKEND, "add", (y, new_view(3, 16, 6, 6, dtype=np.float32)), total, {}, "Forward")
    assert fuse([norm, add]) == [norm, add]
    product = Kernel(BACKEND, "matmul", (new_view(3, 4), new_view(4, 8)), new_view(3, 8), {}, "Forward")
    row = Kernel(BACKEND, "add", (product.out, new_view(8)), new_view(3, 8), {}, "Forward")
    assert fuse([product, row]) == [product, row]  # the bias of a product is float32
    wider = Kernel(
        BACKEND,
        "add",
        (product.out, new_view(8, dtype=np.float32)),
        new_view(3, 8, dtype="f4"),
        {},
        "Forward",
    )
    assert fuse([product, wider]) == [product, wider]


# ---- processors ----------------------------------------------------------------------------------------


def run_for(isa: str, *arguments: str) -> str:
    """Run Python on arguments as on a processor that has no more than ``isa``, one of oneDNN's names."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_onednn
@pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="it runs these tests again")
@slow_but_first("isa", ["AVX2", "AVX512_CORE_BF16"])
def test_products_are_right_with_and_without_the_instructions(isa):
    run_for(isa, "-m", "pytest", "-q", "-x", __file__, "-k", "product or convolution")


@needs_onednn
def test_it_says_whether_products_are_of_bfloat16():
    code = "from singa_lite import _native; print(_native.load('_kernels')[0].multiplies_bfloat16())"
    has_instructions = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    for isa, wanted in (("AVX2", False), ("AVX512_CORE", False), ("AVX512_CORE_BF16", has_instructions)):
        assert run_for(isa, "-c", code).strip() == str(wanted)
