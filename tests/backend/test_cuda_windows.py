# SPDX-License-Identifier: Apache-2.0
"""Pooling and batch normalisation on CUDA against numpy in float64, for any window and shape."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from singa_lite.backend.base import Backend
from singa_lite.backend.cpu import NumpyBackend
from tests.devices import cuda_device, no_gpu

REFERENCE = NumpyBackend()
TOLERANCE = {"float16": 2e-3, "float32": 3e-6, "float64": 1e-12}
DTYPES = st.sampled_from(list(TOLERANCE))


pytestmark = [] if no_gpu() else [pytest.mark.gpu]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    return cuda_device(monkeypatch).backend


def run(
    backend: Backend, kernel: str, inputs: Any, outs: Any, dtype: str, **attributes: Any
) -> list[np.ndarray]:
    """Run a kernel on ``inputs`` rounded to ``dtype``, check it against numpy, and return numpy's outputs.

    ``outs`` are read by kernels that work in place; integer arrays keep their dtype, and what batch normalisation
    has one of for each channel stays float32 beside float16.
    """

    def round_array(a: np.ndarray) -> np.ndarray:
        is_channel = kernel.startswith("batchnorm") and a.ndim == 1 and dtype == "float16"
        return a.astype("float32" if is_channel else dtype) if a.dtype.kind == "f" else a

    rounded = [round_array(a) for a in (*inputs, *outs)]
    wide = [a.astype("float64") if a.dtype.kind == "f" else a.copy() for a in rounded]
    given = [backend.asarray(a) for a in rounded]
    n = len(inputs)
    for runner, arrays in ((REFERENCE, wide), (backend, given)):
        out = arrays[n] if len(outs) == 1 else tuple(arrays[n:])
        runner.run(kernel, *arrays[:n], out=out, **attributes)
    for mine, right in zip(map(backend.to_numpy, given[n:]), wide[n:], strict=True):
        if right.dtype.kind != "f":
            np.testing.assert_array_equal(mine, right)
            continue
        scale = np.abs(right[np.isfinite(right)]).max(initial=1)
        tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * scale}
        np.testing.assert_allclose(mine.astype("float64"), right, **tolerance)  # NaN and infinities exactly
    return wide[n:]


@st.composite
def pools(draw: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Shapes of x and y, and attributes."""

    def pair(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    kernel, stride, extra = pair(1, 4), pair(1, 5), pair(0, 6)
    padding = tuple(draw(st.integers(0, k - 1)) for k in kernel)
    size = [max(1, k - 2 * p) + e for k, p, e in zip(kernel, padding, extra, strict=True)]
    out = [(s + 2 * p - k) // t + 1 for s, p, k, t in zip(size, padding, kernel, stride, strict=True)]
    n, c = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    return (n, c, *size), (n, c, *out), {"kernel_size": kernel, "stride": stride, "padding": padding}


ODD = (1, 2, 5, 4), (1, 2, 3, 2), {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=pools(), dtype=DTYPES, index_dtype=st.sampled_from(["uint8", "int32"]), seed=st.integers(0, 99))
@example(case=ODD, dtype="float32", index_dtype="uint8", seed=0)
def test_max_pooling_equals_numpy_for_any_window(
    backend: Backend, case: Any, dtype: str, index_dtype: str, seed: int
) -> None:
    (x_shape, y_shape, attributes), rng = case, np.random.default_rng(seed)
    x, dy = rng.standard_normal(x_shape), rng.standard_normal(y_shape)
    outs = (np.zeros(y_shape), np.zeros(y_shape, index_dtype))
    _, indices = run(backend, "max_pool_2d", (x,), outs, dtype, **attributes)
    run(backend, "max_pool_2d_backward", (dy, indices), (np.ones(x_shape),), dtype, **attributes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=pools(), dtype=DTYPES, seed=st.integers(0, 99))
@example(case=ODD, dtype="float32", seed=0)
def test_max_pooling_keeps_the_first_of_equals_and_passes_nan(
    backend: Backend, case: Any, dtype: str, seed: int
) -> None:
    x_shape, y_shape, attributes = case
    x = np.random.default_rng(seed).choice([0.0, 1.0, np.nan, -np.inf, np.inf], x_shape)
    run(backend, "max_pool_2d", (x,), (np.zeros(y_shape), np.zeros(y_shape, np.uint8)), dtype, **attributes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=pools(), dtype=DTYPES, count_include_pad=st.booleans(), seed=st.integers(0, 99))
@example(case=ODD, dtype="float64", count_include_pad=False, seed=0)
def test_average_pooling_equals_numpy_for_any_window(
    backend: Backend, case: Any, dtype: str, count_include_pad: bool, seed: int
) -> None:
    (x_shape, y_shape, attributes), rng = case, np.random.default_rng(seed)
    attributes = {**attributes, "count_include_pad": count_include_pad}
    run(backend, "avg_pool_2d", (rng.standard_normal(x_shape),), (np.ones(y_shape),), dtype, **attributes)
    run(
        backend,
        "avg_pool_2d_backward",
        (rng.standard_normal(y_shape),),
        (np.ones(x_shape),),
        dtype,
        **attributes,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", ["max_pool_2d", "avg_pool_2d"])
def test_pooling_keeps_channels_last(backend: Backend, kernel: str, dtype: str) -> None:
    """With ``block`` equal to the channels the arrays' memory is (N, H, W, C), and the results are the same."""
    (x_shape, y_shape, attributes), rng = ODD, np.random.default_rng(3)
    attributes = dict(attributes) if kernel == "max_pool_2d" else {**attributes, "count_include_pad": False}

    def in_memory(array: np.ndarray) -> Any:
        return backend.asarray(np.ascontiguousarray(array.transpose(0, 2, 3, 1)).reshape(array.shape))

    x, dy = rng.standard_normal(x_shape).astype(dtype), rng.standard_normal(y_shape).astype(dtype)
    indices = [np.zeros(y_shape, np.uint8)] if kernel == "max_pool_2d" else []
    y, dx = np.zeros(y_shape), np.zeros(x_shape)
    REFERENCE.run(kernel, x.astype("float64"), out=(y, *indices) if indices else y, **attributes)
    REFERENCE.run(f"{kernel}_backward", dy.astype("float64"), *indices, out=dx, **attributes)
    mine = [in_memory(np.ones_like(array)) for array in (y.astype(dtype), *indices, dx.astype(dtype))]
    attributes["memory_format"] = x_shape[1]
    backend.run(kernel, in_memory(x), out=tuple(mine[:-1]) if indices else mine[0], **attributes)
    backend.run(f"{kernel}_backward", in_memory(dy), *mine[1:-1], out=mine[-1], **attributes)
    for found, right in zip(mine, (y, *indices, dx), strict=True):
        n, c, h, w = right.shape
        actual = backend.to_numpy(found).reshape(n, h, w, c).transpose(0, 3, 1, 2).astype("float64")
        np.testing.assert_allclose(actual, right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def check_batchnorm(backend: Backend, shape: tuple[int, ...], dtype: str, mean: float = 0.0) -> None:
    """All three kernels on one batch."""
    rng, c = np.random.default_rng(len(shape) + sum(shape)), shape[1]
    x, dy = rng.standard_normal(shape) + mean, rng.standard_normal(shape)
    scale, bias, running_mean, running_var = rng.uniform(0.5, 2, (4, c))
    y, dx, zeros = np.zeros(shape), np.zeros(shape), np.zeros(c)
    outs = (y, zeros, zeros, running_mean, running_var)
    _, found, inverse_std, *_ = run(
        backend, "batchnorm_2d_train", (x, scale, bias), outs, dtype, momentum=0.3, eps=1e-3
    )
    run(backend, "batchnorm_2d_infer", (x, scale, bias, running_mean, running_var), (y,), dtype, eps=1e-3)
    run(backend, "batchnorm_2d_backward", (dy, x, scale, found, inverse_std), (dx, zeros, zeros), dtype)


SHAPES = [
    (5, 3),
    (70, 4),
    (1, 2, 1, 2),
    (2, 3, 5, 7),
    (9, 1, 7, 7),
    (3, 2, 9, 31),
    (4, 3, 5),
    (2, 3, 2, 3, 2),
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 1), (1, 3), (1, 2, 1, 1)], ids=str)
def test_batchnorm_equals_numpy_for_any_shape(backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
    check_batchnorm(backend, shape, dtype)


@pytest.mark.parametrize("shape", [(8, 2, 16, 16), (6, 2, 60, 60)], ids=str)
def test_batchnorm_of_float32_adds_up_in_no_less(backend: Backend, shape: tuple[int, ...]) -> None:
    check_batchnorm(backend, shape, "float32", mean=3.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_batchnorm_of_one_element_that_is_not_finite_is_nan(backend: Backend, value: float) -> None:
    x, ones = np.array([[value, 2.0]]), np.ones(2)
    outs = (np.zeros((1, 2)), *(np.full(2, 0.5) for _ in range(4)))
    with np.errstate(invalid="ignore"):
        _, _, inverse_std, _, var = run(
            backend, "batchnorm_2d_train", (x, ones, ones), outs, "float32", momentum=0.25, eps=1e-3
        )
    assert np.isnan([inverse_std[0], var[0]]).all() and var[1] == 0.375


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4, 4)], ids=str)
def test_batchnorm_of_nothing_equals_numpy(backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of the mean of nothing
        check_batchnorm(backend, shape, dtype)


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_momentum_chooses_between_running_and_batch_statistics(backend: Backend, momentum: float) -> None:
    x = np.arange(24.0).reshape(4, 2, 3) ** 2
    outs = (np.zeros(x.shape), *(np.full(2, 7.0) for _ in range(4)))
    *_, running_mean, running_var = run(
        backend,
        "batchnorm_2d_train",
        (x, np.ones(2), np.zeros(2)),
        outs,
        "float64",
        momentum=momentum,
        eps=1e-3,
    )
    expected = (x.mean((0, 2)), x.var((0, 2), ddof=1)) if momentum else (np.full(2, 7.0),) * 2
    np.testing.assert_allclose([running_mean, running_var], expected, rtol=1e-12)


@pytest.mark.parametrize("shape", [(8, 2, 16, 16), (8, 2, 60, 60)], ids=str)
def test_variance_keeps_its_digits_beside_a_large_mean(backend: Backend, shape: tuple[int, ...]) -> None:
    count = shape[0] * shape[2] * shape[3]
    x = (np.random.default_rng(5).standard_normal(shape) + 1000).astype("float32")
    arrays = [backend.asarray(np.zeros(n, "float32")) for n in (2, 2, 2, 2)]
    ones, zeros = backend.asarray(np.ones(2, "float32")), backend.asarray(np.zeros(2, "float32"))
    outs = (backend.empty(shape, "float32"), *arrays)
    backend.run("batchnorm_2d_train", backend.asarray(x), ones, zeros, out=outs, momentum=1.0, eps=1e-5)
    expected = x.astype("float64").var((0, 2, 3)) * count / (count - 1)
    np.testing.assert_allclose(backend.to_numpy(arrays[3]), expected, rtol=1e-5)
