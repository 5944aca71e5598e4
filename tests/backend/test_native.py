# SPDX-License-Identifier: Apache-2.0
"""Every compiled kernel against the float64 numpy path, and the calls it must leave to numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from singa_lite import _native
from singa_lite.backend.cpu import CpuBackend, NumpyBackend

KERNELS, REASON = _native.load("_kernels")
if KERNELS is None:
    pytest.skip(f"nothing was compiled: {REASON}", allow_module_level=True)
HAS_ONEDNN = bool(KERNELS.onednn)
REFERENCE = NumpyBackend()
BACKEND = CpuBackend()
TOLERANCE = 3e-5  # of the largest element: float32 sums of some thousand terms
quick = settings(max_examples=60, deadline=None)


def wide(values: Any) -> Any:
    """The float64 twin of a float32 array."""
    return values.astype(np.float64) if values.dtype == np.float32 else values.copy()


def check(kernel: str, *inputs: np.ndarray, out: tuple[np.ndarray, ...], **attributes: Any) -> None:
    """The compiled kernel takes the call and agrees with numpy in float64, whose in-place outputs start equal."""
    expected = tuple(wide(array) for array in out)
    before = [array.copy() for array in inputs]
    single = out[0] if len(out) == 1 else out
    assert getattr(KERNELS, kernel)(*inputs, out=single, **attributes), f"{kernel} did not take the call"
    REFERENCE.run(kernel, *map(wide, inputs), out=expected[0] if len(out) == 1 else expected, **attributes)
    for array, reference in zip(out, expected, strict=True):
        scale = max(1.0, np.abs(reference).max(initial=0))
        np.testing.assert_allclose(array, reference, rtol=TOLERANCE, atol=TOLERANCE * scale, err_msg=kernel)
    for array, original in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(array, original)


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def like(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """An output full of what must be overwritten."""
    return np.full(shape, 99, dtype)


seeds = st.integers(0, 2**32 - 1)
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
counts = st.integers(0, 3000) | st.integers(60_000, 70_000)  # the second in several threads


# ---- element by element --------------------------------------------------------------------------------


@quick
@given(seeds, counts)
def test_relu_and_its_gradient(seed, count):
    x = floats(seed, count)
    y = like(count)
    check("relu", x, out=(y,))
    check("relu_backward", floats(seed + 1, count), y, out=(like(count),))


def test_relu_passes_nan_on():
    x = np.tile(np.float32([np.nan, -1, 1, -np.inf, np.inf]), 10)
    y = like(50)
    assert KERNELS.relu(x, out=y)
    np.testing.assert_array_equal(y, np.maximum(x, 0))


@quick
@given(
    seeds, st.sampled_from(["add", "sub", "mul", "div"]), st.lists(st.integers(1, 40), min_size=1, max_size=3)
)
def test_arithmetic_of_arrays_rows_and_numbers(seed, kernel, shape):
    a = floats(seed, *shape)
    for other in ({*()}, shape, shape[-1:], [1], [1] * len(shape)):
        b = np.abs(floats(seed + 1, *other)) + 1
        check(kernel, a, np.asarray(b, np.float32), out=(like(*shape),))


def test_arithmetic_may_write_over_its_first_input():
    for kernel in ("add", "sub", "mul", "div"):
        a, b = floats(1, 50, 33), np.abs(floats(2, 33)) + 1
        expected = like(50, 33)
        assert getattr(KERNELS, kernel)(a, b, out=expected)
        assert getattr(KERNELS, kernel)(a, b, out=a)
        np.testing.assert_array_equal(a, expected)


@quick
@given(seeds, st.integers(1, 300), st.integers(1, 1500))
def test_sum_to_adds_rows(seed, rows, columns):
    check("sum_to", floats(seed, rows, columns), out=(like(columns),))


@quick
@given(seeds, counts, st.none() | st.floats(-1, 0), st.none() | st.floats(0, 1))
def test_clip(seed, count, low, high):
    check("clip", floats(seed, count), out=(like(count),), min=low, max=high)


@quick
@given(seeds, counts)
def test_half_precision_has_numpys_bits(seed, count):
    x = floats(seed, count) * np.float32(10.0) ** np.random.default_rng(seed).integers(-9, 6, count)
    x = x.astype(np.float32)
    half, back = like(count, dtype=np.float16), like(count)
    assert KERNELS.cast(x, out=half) and KERNELS.cast(half, out=back)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half.view(np.uint16), x.astype(np.float16).view(np.uint16))
    np.testing.assert_array_equal(back, half.astype(np.float32))


@quick
@given(seeds, counts)
def test_max_abs(seed, count):
    check("max_abs", floats(seed, count), out=(like(1),))


def test_max_abs_tells_of_nan():
    x = floats(1, 100)
    x[70] = np.nan
    out = like(1)
    assert KERNELS.max_abs(x, out=out) and np.isnan(out[0])


# ---- products and windows ------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN: products are numpy's")
@quick
@given(
    seeds,
    st.none() | st.integers(1, 3),
    st.tuples(*[st.integers(1, 70)] * 3),
    st.booleans(),
    st.booleans(),
)
def test_matmul(seed, batch, sizes, transpose_a, transpose_b):
    m, n, k = sizes
    stack = () if batch is None else (batch,)
    a = floats(seed, *stack, *((k, m) if transpose_a else (m, k)))
    b = floats(seed + 1, *stack, *((n, k) if transpose_b else (k, n)))
    check("matmul", a, b, out=(like(*stack, m, n),), transpose_a=transpose_a, transpose_b=transpose_b)


@st.composite
def convolutions(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Shapes of x, w, y and the attributes of a convolution that fits."""
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    n, c, o = draw(st.integers(1, 4)), groups * draw(st.integers(1, 9)), groups * draw(st.integers(1, 9))
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    size = draw(st.tuples(st.integers(1, 14), st.integers(1, 14)))
    stride, dilation = draw(pairs), draw(pairs)
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    out = tuple(
        (h + 2 * p - d * (k - 1) - 1) // s + 1
        for h, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    )
    assume(all(h + 2 * p > d * (k - 1) for h, k, p, d in zip(size, kernel, padding, dilation, strict=True)))
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return (n, c, *size), (o, c // groups, *kernel), (n, o, *out), geometry


def check_convolution(seed: int, x_shape: Any, w_shape: Any, y_shape: Any, geometry: dict[str, Any]) -> None:
    x, w, b, dy = (
        floats(seed, *x_shape),
        floats(seed + 1, *w_shape),
        floats(seed + 2, w_shape[0]),
        floats(seed + 3, *y_shape),
    )
    check("conv2d", x, w, b, out=(like(*y_shape),), **geometry)
    check("conv2d", x, w, out=(like(*y_shape),), **geometry)
    check("conv2d_backward_data", dy, w, out=(like(*x_shape),), **geometry)
    check("conv2d_backward_weight", dy, x, out=(like(*w_shape),), **geometry)
    check("conv2d_backward_weight", dy, x, out=(like(*w_shape), like(w_shape[0])), **geometry)


@pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN: convolutions are numpy's")
@settings(max_examples=40, deadline=None)
@given(seeds, convolutions())
def test_convolution_and_its_gradients(seed, convolution):
    check_convolution(seed, *convolution)


@pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN: convolutions are numpy's")
@pytest.mark.parametrize(
    ("x", "w", "y"),
    [
        ((8, 1, 28, 28), (20, 1, 5, 5), (8, 20, 24, 24)),
        ((8, 20, 12, 12), (50, 20, 5, 5), (8, 50, 8, 8)),
        ((2, 3, 32, 32), (16, 3, 3, 3), (2, 16, 30, 30)),
        ((5, 2, 9, 40), (7, 2, 3, 3), (5, 7, 7, 38)),
    ],
)
def test_convolutions_of_real_models(x, w, y):
    geometry = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    check_convolution(3, x, w, y, geometry)


@pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN: convolutions are numpy's")
@settings(max_examples=40, deadline=None)
@given(
    seeds,
    st.tuples(st.integers(1, 5), st.integers(1, 7)),
    st.tuples(st.integers(1, 7), st.sampled_from([3, 5, 7])),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.integers(1, 9), st.integers(8, 30)),
)
def test_weight_gradient_of_one_channel(seed, counts, kernel, padding, out):
    batch, outputs = counts
    size = tuple(o + k - 1 - 2 * p for o, k, p in zip(out, kernel, padding, strict=True))
    assume(min(size) >= 1)
    x, dy = floats(seed, batch, 1, *size), floats(seed + 1, batch, outputs, *out)
    geometry = {"stride": (1, 1), "padding": padding, "dilation": (1, 1), "groups": 1}
    dw = like(outputs, 1, *kernel)
    check("conv2d_backward_weight", dy, x, out=(dw,), **geometry)
    check("conv2d_backward_weight", dy, x, out=(dw.copy(), like(outputs)), **geometry)


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
    pairs_of = zip(shape[2:], kernel_size, stride, padding, strict=True)
    out = tuple((n + 2 * p - k) // s + 1 for n, k, s, p in pairs_of)
    assume(
        min(out) >= 1 and all(n + 2 * p >= k for n, k, p in zip(shape[2:], kernel_size, padding, strict=True))
    )
    check_pooling(seed, shape, (*shape[:2], *out), kernel_size, stride, padding, count_include_pad)


def check_pooling(seed, shape, out, kernel_size, stride, padding, count_include_pad=True):  # type: ignore[no-untyped-def]
    geometry = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
    x, dy = floats(seed, *shape).round(1), floats(seed + 1, *out)  # rounded: with equals among the elements
    for dtype in (np.uint8, np.int32):
        indices = like(*out, dtype=dtype)
        check("max_pool_2d", x, out=(like(*out), indices), **geometry)
        check("max_pool_2d_backward", dy, indices, out=(like(*shape),), **geometry)
    geometry["count_include_pad"] = count_include_pad
    check("avg_pool_2d", x, out=(like(*out),), **geometry)
    check("avg_pool_2d_backward", dy, out=(like(*shape),), **geometry)


@pytest.mark.parametrize("size", [(8, 12), (9, 12), (8, 13), (24, 24)])
def test_pooling_by_two(size):
    out = (4, 5, size[0] // 2, size[1] // 2)
    check_pooling(1, (4, 5, *size), out, (2, 2), (2, 2), (0, 0))


@pytest.mark.parametrize("padding", [(0, 0), (1, 1)])
def test_max_pool_passes_nan_on(padding):
    x = floats(1, 1, 2, 6, 6)
    x[0, 0, 1, 1] = x[0, 1, 4, 2] = np.nan
    geometry = {"kernel_size": (2, 2), "stride": (2, 2), "padding": padding}
    size = 3 + padding[0]
    out, expected = (like(1, 2, size, size), like(1, 2, size, size, dtype=np.uint8)), like(1, 2, size, size)
    assert KERNELS.max_pool_2d(x, out=out, **geometry)
    REFERENCE.run("max_pool_2d", x, out=(expected, out[1].copy()), **geometry)
    np.testing.assert_array_equal(out[0], expected)


# ---- normalisation, losses, updates --------------------------------------------------------------------


@quick
@given(seeds, st.integers(1, 5), st.integers(1, 6), st.sampled_from([(), (1, 1), (7, 5), (40, 41)]))
def test_batch_normalisation(seed, batch, channels, inner):
    assume(batch * int(np.prod(inner)) > 1)
    shape = (batch, channels, *inner)
    x, dy = floats(seed, *shape) + 3, floats(seed + 1, *shape)
    scale, bias = floats(seed + 2, channels), floats(seed + 3, channels)
    mean, inverse_std = like(channels), like(channels)
    running = (floats(seed + 4, channels), np.abs(floats(seed + 5, channels)))
    outputs = (like(*shape), mean, inverse_std, *running)
    check("batchnorm_2d_train", x, scale, bias, out=outputs, momentum=0.1, eps=1e-3)
    check("batchnorm_2d_infer", x, scale, bias, *running, out=(like(*shape),), eps=1e-3)
    outputs = (like(*shape), like(channels), like(channels))
    check("batchnorm_2d_backward", dy, x, scale, mean, inverse_std, out=outputs)


@quick
@given(
    seeds, st.integers(1, 70), st.integers(1, 300), st.sampled_from([0, 1, 30]), st.sampled_from(["i4", "i8"])
)
def test_softmax_and_its_cross_entropy(seed, rows, columns, spread, ids):
    x = floats(seed, rows, columns) * np.float32(spread)
    labels = np.random.default_rng(seed).integers(0, columns, rows).astype(ids)
    probabilities = like(rows, columns)
    check("softmax", x, out=(probabilities,), axis=1)
    check("softmax_cross_entropy", x, labels, out=(like(1), probabilities))
    check(
        "softmax_cross_entropy_backward", np.float32([0.7]), probabilities, labels, out=(like(rows, columns),)
    )


def test_softmax_of_infinite_logits_is_numpys():
    x = np.float32([[0, -np.inf, 1], [-200, 0, 3], [np.nan, 1, 2], [-np.inf, -np.inf, -np.inf]])
    got, expected = like(4, 3), like(4, 3)
    assert KERNELS.softmax(x, out=got, axis=1)
    REFERENCE.run("softmax", x, out=expected, axis=1)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-30)


@quick
@given(seeds, counts, st.sampled_from([0.0, 0.9]), st.sampled_from([0.0, 0.1]), st.booleans())
def test_sgd(seed, count, momentum, dampening, nesterov):
    grad, param, velocity = floats(seed, count), floats(seed + 1, count), floats(seed + 2, count)
    options = {"lr": 0.3, "weight_decay": 0.01}
    check("sgd_update", grad, out=(param.copy(),), **options)
    options.update(momentum=momentum, dampening=dampening, nesterov=nesterov)
    check("sgd_update", grad, out=(param, velocity), **options)


@quick
@given(seeds, counts, st.integers(1, 1000), st.sampled_from([0.0, 0.1]))
def test_adam(seed, count, step, weight_decay):
    grad, param, m, v = (
        floats(seed, count),
        floats(seed + 1, count),
        floats(seed + 2, count),
        floats(seed + 3, count),
    )
    options = {"lr": 0.01, "beta_1": 0.9, "beta_2": 0.999, "eps": 1e-4, "weight_decay": weight_decay}
    check("adam_update", grad, out=(param, m, np.abs(v)), step=step, **options)


# sizes whose sum is split among threads inside a tensor, empty ones included
sizes = st.lists(st.integers(0, 50) | st.integers(20_000, 40_000), min_size=1, max_size=6)


@quick
@given(seeds, sizes, st.sampled_from(["sgd_update", "adam_update", "plain"]))
def test_an_update_of_many_tensors_updates_each(seed, sizes, kernel):
    grads, params, first, second = (
        [floats(seed + 10 * kind + i, size) for i, size in enumerate(sizes)] for kind in range(4)
    )
    if kernel == "plain":
        check("sgd_update", *grads, out=tuple(params), lr=0.3, weight_decay=0.01, momentum=0.9)
    elif kernel == "sgd_update":
        check("sgd_update", *grads, out=(*params, *first), lr=0.3, momentum=0.9, nesterov=True)
    else:
        second = [np.abs(array) for array in second]
        options = {"lr": 0.01, "beta_1": 0.9, "beta_2": 0.999, "eps": 1e-4, "step": 3}
        check("adam_update", *grads, out=(*params, *first, *second), **options)


def test_updates_that_overlap_or_do_not_fit_are_left_to_numpy():
    memory, grad = floats(1, 12), floats(2, 8)
    whole, tail = memory[:8], memory[4:]
    before = memory.copy()
    assert not KERNELS.sgd_update(grad, grad, out=(whole, tail), lr=0.1)
    assert not KERNELS.sgd_update(grad, out=(whole, tail), lr=0.1, momentum=0.9)  # velocity over param
    assert not KERNELS.sgd_update(grad, grad, out=(whole, whole), lr=0.1)
    assert not KERNELS.sgd_update(grad, grad, out=(whole,), lr=0.1)
    assert not KERNELS.sgd_update(grad, out=(memory,), lr=0.1)
    assert not KERNELS.sgd_update(grad.astype(np.float64), out=(whole,), lr=0.1)
    options = {"lr": 0.1, "beta_1": 0.9, "beta_2": 0.999, "eps": 1e-4, "step": 1}
    assert not KERNELS.adam_update(grad, out=(whole, floats(3, 8)), **options)
    np.testing.assert_array_equal(memory, before)
    BACKEND.run("sgd_update", grad, grad, out=(whole, whole), lr=0.1)  # one after the other
    np.testing.assert_allclose(whole, before[:8] - 0.2 * grad, rtol=1e-5, atol=1e-6)


@quick
@given(seeds, sizes)
def test_pack_and_unpack(seed, sizes):
    parts = [floats(seed + i, size) for i, size in enumerate(sizes)]
    packed = like(sum(sizes))
    check("pack", *parts, out=(packed,))
    back = tuple(like(size) for size in sizes)
    assert KERNELS.unpack(packed, out=back)
    for part, other in zip(parts, back, strict=True):
        np.testing.assert_array_equal(part, other)


def test_pack_leaves_other_dtypes_sizes_and_strides_to_numpy():
    x = floats(1, 4, 6)
    assert not KERNELS.pack(x, out=like(23))
    assert not KERNELS.pack(x, out=like(25))
    assert not KERNELS.pack(x.T, out=like(24))
    assert not KERNELS.pack(x, out=like(24, dtype=np.float64))
    assert not KERNELS.unpack(x.ravel(), out=(like(25),))
    flat = like(24)
    BACKEND.run("pack", x.T, out=flat)
    np.testing.assert_array_equal(flat, x.T.ravel())


# ---- selection -----------------------------------------------------------------------------------------


def selected_by(
    backend: Any, kernel: str, values: np.ndarray, count: int, index: str, **attributes: Any
) -> Any:
    indices, selected = np.full(count, -1, index), np.empty(count, values.dtype)
    if backend is KERNELS:
        assert getattr(KERNELS, kernel)(values, out=(indices, selected), **attributes)
    else:
        backend.run(kernel, values, out=(indices, selected), **attributes)
    return indices, selected


def check_top_k(values: np.ndarray, k: int, index: str = "i8") -> None:
    got = selected_by(KERNELS, "top_k", values, k, index, k=k)
    expected = selected_by(REFERENCE, "top_k", values, k, index, k=k)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])


@quick
@given(
    seeds,
    st.integers(1, 5000),
    st.floats(0, 1),
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from(["i4", "i8"]),
)
def test_top_k_is_numpys(seed, count, share, decimals, has_nan, index):
    values = floats(seed, count).round(decimals)
    if has_nan:
        values[np.random.default_rng(seed).integers(0, count, 3)] = np.float32([np.nan, -np.nan, np.inf])
    check_top_k(values, round(share * count), index)


LARGE = 600_000  # enough to be sampled


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3, 0.99, 1])
@pytest.mark.parametrize(
    "values",
    [
        floats(1, LARGE),
        floats(2, LARGE).round(1),
        np.zeros(LARGE, np.float32),
        np.arange(LARGE, dtype=np.float32),
        np.where(np.arange(LARGE) % (LARGE // 65536) == 0, 100, floats(3, LARGE)).astype(np.float32),
        np.where(np.arange(LARGE) % 100 == 3, np.nan, floats(4, LARGE)).astype(np.float32),
    ],
    ids=["normal", "with equals", "all equal", "sorted", "where the sample deceives", "with NaN"],
)
def test_top_k_of_many_is_exact(values, share):
    check_top_k(values, int(share * values.size))


@quick
@given(seeds, counts, st.sampled_from([-1.0, 0.0, 1e-40, 0.5, 1.0, 2.5, 9.0, np.inf]))
def test_thresholds_are_numpys(seed, count, threshold):
    values = floats(seed, count).round(1)
    values[: count // 100] = np.nan
    found, expected = np.zeros(1, np.int64), np.zeros(1, np.int64)
    assert KERNELS.threshold_count(values, out=found, threshold=threshold)
    REFERENCE.run("threshold_count", values, out=expected, threshold=threshold)
    assert found[0] == expected[0]
    for index in ("i4", "i8"):
        got = selected_by(KERNELS, "threshold_select", values, int(found[0]), index, threshold=threshold)
        want = selected_by(REFERENCE, "threshold_select", values, int(found[0]), index, threshold=threshold)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])


@quick
@given(seeds, st.integers(1, 1000), st.sampled_from(["i4", "i8"]))
def test_scattering(seed, count, index):
    flat, chosen = floats(seed, count), np.random.default_rng(seed).random(count) < 0.3
    indices = np.flatnonzero(chosen).astype(index)
    check("scatter_add", indices, floats(seed + 1, indices.size), out=(flat,))
    check("scatter_fill", indices, out=(flat,), value=2.5)


@pytest.mark.parametrize("index", [-1, 5])
def test_scattering_outside_is_left_to_numpy_and_changes_nothing(index):
    flat = floats(1, 5)
    before = flat.copy()
    assert not KERNELS.scatter_add(np.array([0, index]), floats(2, 2), out=flat)
    assert not KERNELS.scatter_fill(np.array([0, index]), out=flat, value=1.0)
    np.testing.assert_array_equal(flat, before)


# ---- what is left to numpy -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.astype(np.float64),
        lambda x: x.astype(np.float16),
        lambda x: x.astype(">f4"),
        lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
        lambda x: np.asfortranarray(x),
        lambda x: np.frombuffer(b"-" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape),
        lambda x: x.tolist(),
    ],
    ids=["float64", "float16", "big-endian", "strided", "column-major", "unaligned", "list"],
)
def test_other_arrays_are_not_taken(change):
    x, y = floats(1, 2, 3, 4, 6), like(2, 3, 4, 6)
    assert not KERNELS.relu(change(x), out=y)
    assert not KERNELS.add(x, change(x), out=y)
    assert (y == 99).all()


def test_read_only_outputs_are_not_written():
    y = like(4)
    y.flags.writeable = False
    assert not KERNELS.relu(floats(1, 4), out=y)
    assert (y == 99).all()


def test_labels_out_of_range_are_left_to_numpy():
    out = (like(1), like(2, 3))
    for label in (-1, 3):
        assert not KERNELS.softmax_cross_entropy(floats(1, 2, 3), np.array([0, label]), out=out)


def test_a_call_not_taken_is_computed_by_numpy():
    x, y = np.asfortranarray(floats(1, 5, 7)), like(5, 7)
    BACKEND.run("relu", x, out=y)
    np.testing.assert_array_equal(y, np.maximum(x, 0))


# ---- memory, threads and processes ---------------------------------------------------------------------


def test_large_arrays_are_reused_and_aligned():
    first = KERNELS.empty((100, 1000), np.float32)
    address = first.ctypes.data
    assert address % 64 == 0 and first.flags.c_contiguous and first.flags.writeable
    view = first[3:]
    del first
    assert KERNELS.empty((100, 1000), "float32").ctypes.data != address  # a view keeps it alive
    del view
    assert KERNELS.empty((100, 1000), np.float32).ctypes.data == address


def test_the_pool_holds_little_more_than_was_in_use_at_once():
    code = (
        "from singa_lite import _native; k, _ = _native.load('_kernels')\n"
        "for n in range(1, 40): k.empty((n, 1 << 20), 'uint8')\n"
        "print(k.pool_bytes() >> 20)"
    )
    assert int(run_python(code)) <= 39 * 9 // 8 + 16  # sizes are rounded by at most an eighth


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (1 << 17,)])
@pytest.mark.parametrize("dtype", ["float32", np.float16, np.dtype(np.int64), bool])
def test_empty_has_the_shape_and_dtype_asked_for(shape, dtype):
    array = BACKEND.empty(shape, dtype)
    assert array.shape == shape and array.dtype == np.dtype(dtype) and array.flags.c_contiguous


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


STEP = """
import os, sys
import numpy as np
from singa_lite import _native
from singa_lite.backend.cpu import CpuBackend
kernels, _ = _native.load("_kernels")
backend = CpuBackend()
x, w = np.ones((16, 8, 20, 20), np.float32), np.ones((8, 8, 3, 3), np.float32)
def step():
    y, z = np.empty((16, 8, 18, 18), np.float32), np.empty((200, 200), np.float32)
    geometry = dict(stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1)
    backend.run("conv2d", x, w, out=y, **geometry)
    backend.run("conv2d_backward_weight", y, x, out=(np.empty_like(w), np.empty(8, np.float32)), **geometry)
    backend.run("matmul", np.ones((200, 200), np.float32), z * 0, out=z)
    backend.run("relu", y, out=np.empty_like(y))
    assert (y == 72).all()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.timeout(120)
def test_a_child_forked_after_threads_ran_computes_on_one():
    code = STEP + (
        "step()\n"
        "assert kernels.num_threads() == 4\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    step(); print(kernels.num_threads(), flush=True); os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "step(); print(kernels.num_threads())"
    )
    assert run_python(code, OMP_NUM_THREADS="4").split() == ["1", "4"]


@pytest.mark.skipif(not HAS_ONEDNN, reason="built without oneDNN: products are numpy's")
def test_a_child_forked_after_a_product_alone_computes_on_one():
    code = STEP + (
        "a = np.ones((500, 500), np.float32)\n"
        "backend.run('matmul', a, a, out=np.empty_like(a))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    backend.run('matmul', a, a, out=np.empty_like(a)); print(kernels.num_threads(), flush=True); os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    assert run_python(code, OMP_NUM_THREADS="4").split() == ["1"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_child_forked_before_any_threads_ran_may_use_them():
    code = STEP + (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    step(); print(kernels.num_threads(), flush=True); os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    assert run_python(code, OMP_NUM_THREADS="3").split() == ["3"]


def test_threads_follow_the_environment_and_threadpoolctl():
    code = STEP + (
        "import threadpoolctl\n"
        "print(kernels.num_threads())\n"
        "with threadpoolctl.threadpool_limits(2): step(); print(kernels.num_threads())\n"
        "step(); print(kernels.num_threads())"
    )
    assert run_python(code, OMP_NUM_THREADS="3").split() == ["3", "2", "3"]


def test_the_number_of_threads_changes_no_selection_and_no_elementwise_bit():
    code = (
        "import numpy as np, hashlib\n"
        "from singa_lite.backend.cpu import CpuBackend\n"
        "b = CpuBackend(); v = np.random.default_rng(0).standard_normal(700_000).astype('f4')\n"
        "i, s = np.empty(7000, 'i8'), np.empty(7000, 'f4'); b.run('top_k', v, out=(i, s), k=7000)\n"
        "p, m = v.copy(), v.copy(); b.run('sgd_update', v, out=(p, m), lr=.1, momentum=.9)\n"
        "c = np.empty(700, 'f4'); b.run('sum_to', v.reshape(1000, 700), out=c)\n"
        "print(hashlib.sha256(b''.join(a.tobytes() for a in (i, s, p, m, c))).hexdigest())"
    )
    assert len({run_python(code, OMP_NUM_THREADS=str(threads)) for threads in (1, 2, 5)}) == 1
