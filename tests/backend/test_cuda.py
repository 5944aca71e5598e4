# SPDX-License-Identifier: Apache-2.0
"""What only the CUDA backend has to show: large and odd arrays, many arrays at once, few launches."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import operator
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from singa_lite.backend.base import Backend
from singa_lite.backend.cpu import NumpyBackend
from singa_lite.backend.formulas import UPDATES, Update
from singa_lite.device import allow_tf32
from singa_lite.dtypes import bfloat16
from singa_lite.errors import DeviceError
from singa_lite.sync.indices import IndexCode
from tests.devices import cuda_device, no_gpu, standin_cupy
from tests.limits import LIMIT_S
from tests.slow_cases import slow_but_first

RNG = np.random.default_rng(40)
CPU = NumpyBackend()
# of the stand-in itself
OURS = {"Any", "annotations", "ctypes", "do", "host", "is_capturing", "device_id", "offset", "add"}

pytestmark = [] if no_gpu() else [pytest.mark.gpu]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cuda_device(monkeypatch).backend


def on(backend: Backend, kernel: str, inputs: Any, out: Any, **attributes: Any) -> list[np.ndarray]:
    """The outputs of a kernel that start as ``out``, a list of arrays; inputs may be on the device already."""
    made = [backend.asarray(array) for array in out]
    given = [backend.asarray(array) if isinstance(array, np.ndarray) else array for array in inputs]
    backend.run(kernel, *given, out=tuple(made) if len(made) > 1 else made[0], **attributes)
    return [backend.to_numpy(array) for array in made]


def check(
    backend: Backend,
    kernel: str,
    inputs: Any,
    out: Any,
    rtol: float = 1e-5,
    least: float = 0.0,
    **attributes: Any,
) -> None:
    """Assert that CUDA and the numpy kernels agree to ``rtol`` of an output's largest element, or of ``least``."""
    expected = on(CPU, kernel, inputs, out, **attributes)
    for a, b in zip(on(backend, kernel, inputs, out, **attributes), expected, strict=True):
        a, b = a.astype(float), b.astype(float)
        np.testing.assert_allclose(a, b, rtol, rtol * np.abs(b).max(initial=least))


# ---- selection -----------------------------------------------------------------------------------------------


def values_to_select(kind: str, n: int, dtype: str) -> np.ndarray:
    values = RNG.standard_normal(n)
    if kind == "equal":
        values[:] = -2.5
    elif kind == "sorted":  # so that one block has most of the largest
        values = values[np.argsort(-np.abs(values))]
    elif kind == "ties":
        values = np.sign(values) * RNG.integers(0, 4, n)
    elif kind == "wide":  # all exponents
        with np.errstate(all="ignore"):
            return (values * 2.0 ** RNG.integers(-30, 14, n)).astype(dtype)
    elif kind == "special":
        values[RNG.integers(0, n, n // 5 + 1)] = np.nan
        values[RNG.integers(0, n, n // 5 + 1)] = -np.inf
        values[RNG.integers(0, n, n // 5 + 1)] = -0.0
        values = values.astype(dtype)
        bits = values.view(f"u{values.itemsize}")
        # NaNs of many kinds
        bits[np.isnan(values)] ^= RNG.integers(0, 99, np.isnan(values).sum()).astype(bits.dtype)
    return values.astype(dtype)


def view_from(backend: Backend, start: int, values: np.ndarray) -> Any:
    """Return ``values`` on the device, where they begin at element ``start`` of an array."""
    return backend.asarray(np.concatenate([np.full(start, np.inf, values.dtype), values]))[start:]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (9, 9), (9001, 90), (100_000, 5000), (2_000_000, 70)])
def test_indices_come_back_from_words(backend: Backend, n: int, k: int, dtype: str) -> None:
    indices = np.sort(np.random.default_rng(n).choice(n, k, replace=False)).astype(dtype)
    indices[1:3] = indices[0]  # equal neighbours are allowed
    code = IndexCode(n, k)
    out, bits = [np.full(code.num_words, -1, np.int32)], {"low_bits": code.low_bits}
    (words,) = on(backend, "pack_indices", [indices], out, **bits)
    np.testing.assert_array_equal(words, on(CPU, "pack_indices", [indices], out, **bits)[0])
    (back,) = on(backend, "unpack_indices", [words], [np.full(k, -1, dtype)], **bits)
    np.testing.assert_array_equal(back, indices)
    aborted = np.full(code.num_words, 0x10000, np.int32)  # too few bits
    given = [aborted], [np.full(k, -1, dtype)]
    np.testing.assert_array_equal(
        on(backend, "unpack_indices", *given, **bits)[0], on(CPU, "unpack_indices", *given, **bits)[0]
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["normal", "ties", "wide", "special"])
@pytest.mark.parametrize("n", [1, 255, 2049, 9001])
def test_top_k_is_exact(backend: Backend, n: int, kind: str, dtype: str) -> None:
    check_top_k(backend, values_to_select(kind, n, dtype), {1, n // 100 + 1, n // 2 + 1, n})


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["normal", "ties", "wide", "special", "equal", "sorted"])
@slow_but_first("start", [1, 0, 3])
def test_top_k_of_long_parts_is_exact(backend: Backend, start: int, kind: str, dtype: str) -> None:
    n = 40_003  # parts of several tiles on the stand-in
    check_top_k(backend, values_to_select(kind, n, dtype), {1, n // 100, n // 20, n}, start)


def check_top_k(backend: Backend, values: np.ndarray, ks: set[int], start: int = 0) -> None:
    """Assert that top_k takes the first of a stable sort; ``start`` as for view_from."""
    order = np.argsort(-np.where(np.isnan(values), np.inf, np.abs(values.astype(float))), kind="stable")
    order = np.concatenate([np.flatnonzero(np.isnan(values)), order[~np.isnan(values[order])]])
    given = view_from(backend, start, values)
    for k in ks:
        out = [np.zeros(k, "int32" if k % 2 else "int64"), np.zeros(k, values.dtype)]
        indices, selected = on(backend, "top_k", [given], out, k=k)
        np.testing.assert_array_equal(indices, np.sort(order[:k]))
        np.testing.assert_array_equal(selected, values[indices])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 2.0, 6e4])
@pytest.mark.parametrize(("n", "start"), [(9001, 0), (40_003, 1), (5, 3)])
def test_threshold_keeps_what_reaches_it_in_order(
    backend: Backend, n: int, start: int, threshold: float, dtype: str
) -> None:
    values = values_to_select("special", n, dtype)
    given = view_from(backend, start, values)
    kept = np.flatnonzero(~(np.abs(values) < np.dtype(dtype).type(threshold)))
    (count,) = on(backend, "threshold_count", [given], [np.zeros(1, np.int64)], threshold=threshold)
    assert count[0] == kept.size
    out = [np.zeros(kept.size, np.int32), np.zeros(kept.size, dtype)]
    indices, selected = on(backend, "threshold_select", [given], out, threshold=threshold)
    np.testing.assert_array_equal(indices, kept)
    np.testing.assert_array_equal(selected, values[kept])


def test_nothing_is_selected_from_nothing(backend: Backend) -> None:
    empty = np.zeros(0, np.float32)
    for given in (backend.asarray(empty), backend.asarray(np.ones(3, np.float32))[1:][:0]):
        (count,) = on(backend, "threshold_count", [given], [np.full(1, 9, np.int64)], threshold=0.0)
        assert count[0] == 0
    (largest,) = on(backend, "max_abs", [empty], [np.full(1, 9, np.float32)])
    assert largest[0] == 0
    on(backend, "top_k", [np.ones(3, "f")], [np.zeros(0, np.int32), empty], k=0)


def test_scale_is_the_largest_power_of_two_that_fits(backend: Backend) -> None:
    for largest in (
        1.2e-38,
        3.4e38,
        1.0,
        65504.0,
        np.nextafter(np.float32(2), np.float32(3)),
        0.0,
        np.inf,
    ):
        for limit in (65504.0, 65504.0 / 3, 1.0):
            check(backend, "power_of_two_scale", [np.array([largest], "f")], [np.zeros(1, "f")], limit=limit)


def test_a_subnormal_number_is_scaled_or_counts_as_0(backend: Backend) -> None:
    (scale,) = on(backend, "power_of_two_scale", [np.array([1e-45], "f")], [np.zeros(1, "f")], limit=65504.0)
    assert scale[0] in (1, 2.0**126)  # a GPU's arithmetic takes it for 0, see common.cuh


@pytest.mark.parametrize("length", [5, 700, 2048, 2049, 4100])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_to_memory_of_any_length(backend: Backend, length: int, causal: bool) -> None:
    queries, dy = RNG.standard_normal((2, 2, 3, 16)).astype("f")
    memory, options = RNG.standard_normal((2, length, 32)).astype("f"), {"num_heads": 2, "causal": causal}
    check(backend, "attention", [queries, memory], [dy], **options)
    check(backend, "attention_backward", [dy, queries, memory], [dy, memory], **options)


@pytest.mark.parametrize("length", [127, 128, 129, 300])
@pytest.mark.parametrize("num_keys", [None, 5, 200, 400])
def test_causal_attention_in_parts(backend: Backend, length: int, num_keys: int | None) -> None:
    """Of more queries than a part has, beside keys of their own, fewer and more."""
    options, dy = {"num_heads": 2, "causal": True}, RNG.standard_normal((2, length, 8)).astype("f")
    shapes = [(2, length, 24)] if num_keys is None else [(2, length, 8), (2, num_keys, 16)]
    inputs = [RNG.standard_normal(shape).astype("f") for shape in shapes]
    check(backend, "attention", inputs, [dy], **options)
    check(backend, "attention_backward", [dy, *inputs], inputs, **options)


def test_products_of_parts_of_matrices_are_added(backend: Backend) -> None:
    a, b, c = (RNG.standard_normal((2, 3, 6, 6)).astype("f") for _ in range(3))
    left, right, out = map(backend.asarray, (a, b, c))
    given = left[:, :, 1:5, :3], right[:, :, 2:5, 1:]
    backend.execute("matmul", given, out[:, :, 2:, :5], {"beta": 1})
    expected = c.copy()
    expected[:, :, 2:, :5] += a[:, :, 1:5, :3] @ b[:, :, 2:5, 1:]
    np.testing.assert_allclose(backend.to_numpy(out), expected, 1e-5, 1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("start", [0, 1, 8])
@pytest.mark.parametrize("size", [1, 7, 8, 9, 4097])
def test_elements_are_computed_by_packs_and_one_by_one_alike(
    backend: Backend, dtype: str, start: int, size: int
) -> None:
    """Beside arrays that begin within 16 bytes, that end within a pack, and that are repeated along an axis."""
    kind = bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    a, b, row, column = (RNG.standard_normal(n).astype(kind) for n in (start + 3 * size, 3 * size, size, 3))
    whole, second = backend.asarray(a)[start:].reshape(3, size), backend.asarray(b).reshape(3, size)
    out, kept = (backend.asarray(np.zeros((3, size), kind)) for _ in range(2))
    wide = a[start:].reshape(3, size).astype("f" if kind != np.float64 else "d")
    for other, given in (
        (b.reshape(3, size), second),
        (row, backend.asarray(row)),
        (column[:, None], backend.asarray(column).reshape(3, 1)),
        (row[:1], backend.asarray(row[:1])),
    ):
        for first, right in ((whole, wide + other), (given, None)):
            if right is None and other.shape != (3, size):
                continue
            backend.run("add", first, given if right is not None else whole, out=out)
            np.testing.assert_array_equal(
                backend.to_numpy(out), (wide + other.astype(wide.dtype)).astype(kind)
            )
        backend.run("add_gelu", whole, given, out=(out, kept))
        np.testing.assert_array_equal(backend.to_numpy(kept), (wide + other.astype(wide.dtype)).astype(kind))
        backend.run("gelu", kept, out=kept)
        np.testing.assert_array_equal(backend.to_numpy(kept), backend.to_numpy(out))
    backend.run("negative", whole, out=out)
    np.testing.assert_array_equal(backend.to_numpy(out), -a[start:].reshape(3, size))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bool"])
@pytest.mark.parametrize("start", [0, 1, 8])
@pytest.mark.parametrize("last", [16, 24, 20, 3])
def test_transpositions_of_runs(backend: Backend, dtype: str, start: int, last: int) -> None:
    """Runs of 16 bytes move at once, where addresses and strides permit."""
    x = np.arange(start + 5 * 3 * 4 * last).astype(dtype)
    given = backend.asarray(x)[start:].reshape(5, 3, 4, last)
    out = backend.asarray(np.zeros((4, 5, 3, last), dtype))
    backend.run("transpose", given, out=out, axes=(2, 0, 1, 3))
    expected = x[start:].reshape(5, 3, 4, last).transpose(2, 0, 1, 3)
    np.testing.assert_array_equal(backend.to_numpy(out), expected)


@pytest.mark.parametrize("shape", [(2, 8, 0, 4), (2, 64, 0, 40), (0, 8, 3, 3)])
def test_nothing_is_reordered(backend: Backend, shape: tuple[int, ...]) -> None:
    for formats in ((1, shape[1]), (shape[1], 1)):
        x, out = (backend.zeros(shape, "float32") for _ in range(2))
        backend.run("reorder", x, out=out, memory_formats=formats)


@pytest.mark.parametrize("count", [1, 255, 256, 257, 3000])
def test_gradients_of_many_indices_come_to_their_places(backend: Backend, count: int) -> None:
    indices = RNG.integers(0, 7, count).astype("i")
    dy = RNG.standard_normal((2, count, 300)).astype("f")
    check(backend, "gather_backward", [dy, indices], [np.zeros((2, 7, 300), "f")], axis=1)


# ---- many elements and many arrays ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((40_000,), (0,)),
        ((3, 9000), (1,)),
        ((5000, 3), (0,)),
        ((40, 33, 7, 5), (0, 2, 3)),
        ((2, 700, 3), (1,)),
        ((6, 5, 4, 3, 2), (0, 2, 4)),
        ((4, 0), (1,)),
        ((0, 4), (1,)),
        ((), ()),
        ((3, 4), ()),
    ],
)
def test_reductions_of_any_axes(backend: Backend, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = RNG.standard_normal(shape).astype("f")
    out = [np.zeros(x.sum(axes).shape, "f")]
    for kernel in ("sum", "mean", "max")[: 3 if x.size else 2]:
        check(backend, kernel, [x], out, axes=axes, keepdims=False)
    if x.size:
        half = x.astype("float16")
        check(backend, "sum", [half], [out[0].astype("float16")], 2e-3, axes=axes, keepdims=False)
        whole = RNG.integers(-9, 9, shape).astype("int32")
        check(backend, "sum", [whole], [out[0].astype("int32")], axes=axes, keepdims=False)


def test_more_arrays_than_one_launch_holds_are_packed_and_unpacked(backend: Backend) -> None:
    arrays = [RNG.standard_normal(n % 7 * 700).astype("f") for n in range(260)]
    flat = np.concatenate(arrays)
    for dtype in ("float32", "float16"):  # a cast on the way, as messages of halves want
        (packed,) = on(backend, "pack", arrays, [np.zeros(flat.size, dtype)])
        np.testing.assert_array_equal(packed, flat.astype(dtype))
    parts = on(backend, "unpack", [flat], [np.zeros_like(array) for array in arrays])
    for part, array in zip(parts, arrays, strict=True):
        np.testing.assert_array_equal(part, array)


def test_concat_and_slice_of_inner_axes(backend: Backend) -> None:
    xs = [RNG.standard_normal((30, n, 50)).astype("f") for n in (3, 0, 4)]
    check(backend, "concat", xs, [np.zeros((30, 7, 50), "f")], axis=1)
    check(backend, "slice", [xs[2]], [np.zeros((30, 2, 50), "f")], axis=1, start=2)
    check(backend, "slice", [xs[2]], [np.zeros((9, 4, 50), "f")], axis=0, start=20)


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@slow_but_first("dtype", ["float32", "float16", "float64"], count=2)
def test_updates_of_more_tensors_than_one_launch_holds(backend: Backend, update: Update, dtype: str) -> None:
    sizes = [n % 5 * 900 + 1 for n in range(170)]
    numbers = {"lr": 0.1, "rate": 0.1, "correction": 1.5, "epsilon": 1e-3}
    options = {name: numbers.get(name, 0.9) for name in update.numbers}
    grads = [RNG.standard_normal(n).astype(dtype) for n in sizes]
    out = [RNG.uniform(0.5, 1, n).astype(dtype) for _ in range(1 + len(update.states)) for n in sizes]
    tolerance = 4e-3 if dtype == "float16" else 1e-5
    check(backend, update.name, grads, out, tolerance, 1.0, weight_decay=0.01, **options)


def test_rows_longer_than_a_warp(backend: Backend) -> None:
    x, rows = RNG.standard_normal((5, 700)).astype("f"), RNG.integers(0, 4, (5, 700))
    for labels in (np.arange(5) * 150, rows):
        check(backend, "softmax_cross_entropy", [x, labels], [np.zeros(1, "f"), np.zeros_like(x)])
        check(backend, "cross_entropy_backward", [np.ones(1, "f"), np.abs(x), labels], [np.zeros_like(x)])
    check(backend, "softmax", [x], [np.zeros_like(x)], axis=1)
    check(backend, "softmax", [x.reshape(5, 350, 2)], [np.zeros((5, 350, 2), "f")], axis=1)
    check(backend, "softmax_backward", [x, np.abs(x)], [np.zeros_like(x)], 1e-4, axis=1)


def test_a_tensor_given_twice_is_updated_twice(backend: Backend) -> None:
    param, grad = backend.asarray(np.ones(3)), backend.asarray(np.full(3, 2.0))
    backend.run("sgd_update", grad, grad, grad, out=(param, backend.zeros((3,), "d"), param), lr=0.1)
    np.testing.assert_allclose(backend.to_numpy(param), 0.6)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, 1, 5, 1), (4, 1, 6)),
        ((1,), (2, 3)),
        ((), (4, 5)),
        ((2, 1, 2, 1, 2, 1, 2), (1, 3, 1, 3, 1, 3, 1)),
        ((300, 70), (70,)),
        ((0, 3), (1, 3)),
    ],
)
def test_two_arrays_of_any_shapes_broadcast(backend: Backend, a: Any, b: Any) -> None:
    x, y = RNG.standard_normal(a).astype("f"), RNG.standard_normal(b).astype("f")
    check(backend, "sub", [x, y], [np.zeros(np.broadcast_shapes(a, b), "f")])
    check(backend, "broadcast_to", [y], [np.zeros((*(2,), *np.broadcast_shapes(a, b)), "f")])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "batches", [((), ()), ((4,), (4,)), ((4,), ()), ((), (3,)), ((2, 1), (1, 3)), ((1,), (1,))]
)
def test_products_of_batches_and_transposes(
    backend: Backend, batches: Any, transposed: Any, dtype: str
) -> None:
    shapes = [(5, 3), (3, 7)]
    arrays = [
        RNG.standard_normal((*batch, *(shape[::-1] if flag else shape))).astype(dtype)
        for batch, shape, flag in zip(batches, shapes, transposed, strict=True)
    ]
    out = [np.zeros((*np.broadcast_shapes(*batches), 5, 7), dtype)]
    rtol = 2e-3 if dtype == "float16" else 1e-5
    check(backend, "matmul", arrays, out, rtol, transpose_a=transposed[0], transpose_b=transposed[1])


def test_a_product_over_nothing_is_zero(backend: Backend) -> None:
    (y,) = on(backend, "matmul", [np.zeros((2, 0), "f"), np.zeros((0, 3), "f")], [np.ones((2, 3), "f")])
    assert not y.any()


def test_casts_round_as_numpy_does(backend: Backend) -> None:
    x = np.concatenate(
        [
            RNG.standard_normal(3000) * 2.0 ** RNG.integers(-30, 20, 3000),
            [np.nan, np.inf, 65519.9, 65520, -0.0],
        ]
    )
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)  # every one
    with np.errstate(all="ignore"):
        for source in (x, x.astype("f"), half):
            for dtype in ("float16", "float32", "float64"):
                (y,) = on(backend, "cast", [source], [np.zeros(source.size, dtype)])
                np.testing.assert_array_equal(y, source.astype(dtype))


# ---- random numbers, and numbers that change ---------------------------------------------------------------------


def test_the_stream_is_philox(backend: Backend) -> None:
    """The first known answer of Random123: key and counter 0."""
    words = np.array([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8])
    (y,) = on(backend, "random_uniform", [], [np.zeros(4, "f")], low=0.0, high=1.0, seed=0, counter=0)
    np.testing.assert_array_equal(y, ((words >> 8) / 2.0**24).astype("f"))


def test_all_bits_of_seed_and_counter_count(backend: Backend) -> None:
    seen = [
        on(backend, "random_uniform", [], [np.zeros(8)], low=0.0, high=1.0, seed=seed, counter=counter)[0]
        for seed, counter in ((0, 0), (1, 0), (2**32, 0), (2**63, 0), (0, 1), (0, 2**32), (2**64 - 1, 2**63))
    ]
    assert len({y.tobytes() for y in seen}) == len(seen)


def test_a_mask_is_the_same_for_every_dtype(backend: Backend) -> None:
    masks = [
        on(
            backend,
            "dropout",
            [np.ones(999, t)],
            [np.ones(999, t), np.ones(999, bool)],
            ratio=0.4,
            seed=7,
            counter=3,
        )[1]
        for t in ("float16", "float32", "float64")
    ]
    assert (masks[0] == masks[1]).all() and (masks[0] == masks[2]).all()


def test_numbers_that_change_may_stand_on_the_device(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured step needs: the kernel reads them when it runs."""
    param, grad, y = (backend.asarray(np.ones(3)) for _ in range(3))
    cells = backend.zeros((8,), "int64")
    numbers = iter(range(8))
    monkeypatch.setattr(
        backend,
        "scalar",
        lambda value, kind=float: np.array([(cells.data.ptr + 8 * next(numbers), 0)], "q,q").view("V16"),
    )
    stored = np.array([0, 0.25, 0, 0, 0, 0, 0, 0]).view(np.int64)  # weight_decay, lr
    stored[2:4] = 11, 12  # seed, counter
    backend.run("copy", backend.asarray(stored), out=cells)
    backend.run("sgd_update", grad, out=param, lr=99.0)
    np.testing.assert_array_equal(backend.to_numpy(param), 0.75)
    backend.run("random_uniform", out=y, low=0.0, high=1.0, seed=99, counter=99)
    monkeypatch.undo()
    (expected,) = on(backend, "random_uniform", [], [np.zeros(3)], low=0.0, high=1.0, seed=11, counter=12)
    np.testing.assert_array_equal(backend.to_numpy(y), expected)


# ---- launches and sources -----------------------------------------------------------------------------------


@pytest.mark.skipif(not no_gpu(), reason="the stand-in counts launches, a GPU does not")
def test_a_kernel_is_one_launch(backend: Any) -> None:
    kernel_class = type(next(iter(backend._functions.values())))
    x = np.ones((64, 10), "f")
    ids = np.zeros(64, np.int32)
    calls: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("add", [x, x[0]], [x], {}),
        ("sum", [x], [x[0]], {"axes": (0,), "keepdims": False}),
        ("softmax_cross_entropy", [x, ids], [x[0, :1], x], {}),
        ("softmax_cross_entropy_backward", [x[0, :1], x, ids], [x], {}),
        ("mse_loss", [x, x], [x[0, :1]], {}),
        ("pack", [x] * 100, [np.zeros(64_000, "f")], {}),
        ("sgd_update", [x] * 70, [x] * 70, {"lr": 0.1}),
        ("dropout", [x], [x, x > 0], {"ratio": 0.5, "seed": 1, "counter": 1}),
    ]
    # a tensor given twice waits for a launch of its own
    param, before = backend.asarray(x), kernel_class.calls
    backend.run("sgd_update", param, param, out=(param, param), lr=0.1)
    assert kernel_class.calls == before + 2
    for kernel, inputs, out, attributes in calls:
        before = kernel_class.calls
        on(backend, kernel, inputs, out, **attributes)
        assert kernel_class.calls == before + 1, kernel


@pytest.mark.skipif(not no_gpu(), reason="asks the stand-in of cuBLAS")
def test_tf32_is_off_until_it_is_allowed(backend: Any) -> None:
    x = np.ones((2, 2), "f")
    on(backend, "matmul", [x, x], [x])
    allow_tf32()
    try:
        on(backend, "matmul", [x, x], [x])
        on(backend, "matmul", [x.astype("d"), x.astype("d")], [x.astype("d")])
    finally:
        allow_tf32(False)
    computes = backend.matmul.__globals__["cupy"].cuda._cublas.computes
    assert computes[-3:] == [68, 77, 70]  # CUBLAS_COMPUTE_32F, _32F_FAST_TF32, _64F


@pytest.mark.skipif(not no_gpu(), reason="asks the stand-in of cuBLAS")
def test_cublas_works_on_the_stream_and_in_a_workspace_of_the_device(backend: Any) -> None:
    on(backend, "matmul", [np.ones((2, 2), "f")] * 2, [np.ones((2, 2), "f")])
    settings = backend.matmul.__globals__["cupy"].cuda._cublas.settings
    assert settings["stream"] == backend.stream.ptr
    assert settings["workspace"] > 0, "setting the stream takes the workspace away"


@pytest.mark.skipif(not no_gpu(), reason="asks the stand-in of cuBLAS")
def test_a_product_that_cublas_refuses_is_an_error(backend: Any, monkeypatch: Any) -> None:
    on(backend, "matmul", [np.ones((2, 2), "f")] * 2, [np.ones((2, 2), "f")])
    monkeypatch.setattr(backend.streams.current.cublas._library, "cublasGemmEx", lambda *_: 7)
    with pytest.raises(DeviceError, match="cublasGemmEx: cuBLAS answers with status 7"):
        on(backend, "matmul", [np.ones((2, 2), "f")] * 2, [np.ones((2, 2), "f")])


def test_another_thread_computes_on_the_stream_of_the_device(backend: Backend) -> None:
    found: list[np.ndarray] = []
    thread = threading.Thread(
        target=lambda: found.extend(on(backend, "square", [np.full(3, 3.0)], [np.zeros(3)]))
    )
    thread.start()
    thread.join(LIMIT_S)
    np.testing.assert_array_equal(found[0], 9)


def test_streams_do_not_share_what_kernels_hand_to_one_another(backend: Any) -> None:
    def mine() -> set[int]:
        arrays = (backend.scratch(100), backend.block_counter, *backend._counters[backend.streams.number])
        return {array.data.ptr for array in arrays} | {id(backend.streams.current.cublas)}

    seen, streams = [mine()], [backend.stream.ptr]
    with backend.packing() as packed:
        seen, streams = [*seen, mine()], [*streams, backend.stream.ptr]
    with backend.unpacking(packed):
        seen, streams = [*seen, mine()], [*streams, backend.stream.ptr]
    assert len(set.union(*seen)) == 15 and len(set(streams)) == 3
    assert mine() == seen[0] and backend.stream.ptr == streams[0]


def test_reading_inside_of_packing_hides_nothing_from_what_comes_after(backend: Any) -> None:
    x = backend.asarray(np.ones(1000, "f"))

    def double_often() -> None:
        backend.run("fill", out=x, value=1.0)
        for _ in range(20):
            backend.run("add", x, x, out=x)

    with backend.packing():
        double_often()
        np.testing.assert_array_equal(backend.to_numpy(x), 2**20)
        double_often()
    backend.join()
    backend.run("add", x, x, out=x)
    np.testing.assert_array_equal(backend.to_numpy(x), 2**21)


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_indices_of_an_aborted_collective_are_not_written_to(backend: Any, index: str) -> None:
    indices = np.array([3, -1, 5, np.iinfo(index).max, np.iinfo(index).min, 0], index)
    added = on(backend, "scatter_add", [indices, np.ones(6, "f")], [np.zeros(5, "f")])
    filled = on(backend, "scatter_fill", [indices], [np.zeros(5, "f")], value=7.0)
    assert added[0].tolist() == [1, 0, 0, 1, 0] and filled[0].tolist() == [7, 0, 0, 7, 0]


def test_page_locked_memory_may_be_filled_again_at_once(backend: Any) -> None:
    batch = backend.host_array((1000, 1000), "f")
    for values in (batch, batch[::2], batch[500:]):
        batch.fill(1)
        for _ in range(20):  # keeps the stream busy meanwhile
            found = backend.asarray(values)
        batch.fill(2)
        np.testing.assert_array_equal(backend.to_numpy(found), 1)


@pytest.mark.skipif(not no_gpu(), reason="there is a GPU, so no stand-in")
@pytest.mark.parametrize("pool_is_collected", [False, True])
def test_memory_of_the_stand_in_that_python_collects_stays_until_the_host_waits(
    backend: Any, pool_is_collected: bool
) -> None:
    cupy = sys.modules["singa_lite.backend.cuda"].cupy  # type: ignore[attr-defined]
    graves = sys.modules["singa_lite.backend.cuda"].cupy._array.GRAVES  # type: ignore[attr-defined]
    pool = cupy.cuda.MemoryPool()
    backend.activate()
    with cupy.cuda.using_allocator(pool.malloc):
        circle = [cupy.empty(1000, np.uint8)]
    block = circle[0].data.mem.block
    circle.append(circle)
    if pool_is_collected:
        del pool
    del circle
    gc.collect()
    if not pool_is_collected:
        assert not any(found is block for found in graves)
        pool.free_all_blocks()
    assert sum(found is block for found in graves) == 1
    backend.synchronize()
    assert not any(found is block for found in graves)


def test_the_stand_in_has_nothing_that_cupy_lacks() -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    with standin_cupy():
        import cupy

        names = [f"cupy.{name}" for name in cupy.__all__] + [
            f"cupy.cuda.{name}" for name in cupy.cuda.__all__ if name not in OURS
        ]
        names += [
            f"cupy.cuda.runtime.{name}"
            for name in vars(cupy.cuda.runtime)
            if not name.startswith("_") and name not in OURS | {"os"}
        ]
        for kind in ("ndarray", "cuda.MemoryPointer", "cuda.Stream", "cuda.Device"):
            found = operator.attrgetter(kind)(cupy)
            own = {*vars(found), *(vars(found(0)) if kind == "cuda.Device" else ())} - OURS
            names += [f"cupy.{kind}.{name}" for name in own if not name.startswith("_")]
        parameters = {name: parameters_of(name, cupy) for name in names}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE_WITH_CUPY, json.dumps(parameters)],
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert len(names) > 30 and not done.returncode, done.stderr.decode()


def parameters_of(name: str, cupy: Any) -> list[str]:
    """Return the names of the parameters that the stand-in takes, [] of what cannot be called."""
    try:
        return list(inspect.signature(operator.attrgetter(name.removeprefix("cupy."))(cupy)).parameters)
    except (AttributeError, TypeError, ValueError):  # the first of what only an instance has
        return []


COMPARE_WITH_CUPY = """
import inspect, json, operator, sys
import cupy, cupy.cuda.runtime

for name, taken in json.loads(sys.argv[1]).items():
    found = operator.attrgetter(name.removeprefix("cupy."))(cupy)
    try:
        known = inspect.signature(found).parameters
    except (TypeError, ValueError):  # much of what is compiled has no signature
        continue
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in known.values())
    assert takes_any or set(taken) <= set(known), f"{name}{tuple(known)} is called with {taken}"
"""
