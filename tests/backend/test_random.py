# SPDX-License-Identifier: Apache-2.0
"""Random kernels: the right distribution, and nothing but (seed, counter) decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite.backend.base import Backend
from singa_lite.device import Device

DTYPES = ("float16", "float32", "float64")


@pytest.fixture
def backend(device: Device) -> Backend:
    return device.backend


def draw(
    backend: Backend,
    kernel: str,
    dtype: str = "float32",
    seed: int = 3,
    counter: int = 1,
    **attributes: Any,
) -> np.ndarray:
    out = backend.empty((40_000,), dtype)
    backend.run(kernel, out=out, seed=seed, counter=counter, **attributes)
    return backend.to_numpy(out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform_fills_its_range_evenly(dtype: str, backend: Backend) -> None:
    values = draw(backend, "random_uniform", dtype, low=-1.0, high=3.0).astype(float)
    assert -1 <= values.min() < -0.99 and 2.99 < values.max() <= 3
    counts, _ = np.histogram(values, 8)
    assert abs(counts / 5000 - 1).max() < 0.06


@pytest.mark.parametrize("dtype", DTYPES)
def test_normal_has_its_mean_and_deviation(dtype: str, backend: Backend) -> None:
    values = draw(backend, "random_normal", dtype, mean=2.0, std=0.5).astype(float)
    assert abs(values.mean() - 2) < 0.01 and abs(values.std() - 0.5) < 0.01
    assert abs((np.abs(values - 2) < 0.5).mean() - 0.6827) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_bernoulli_gives_ones_with_its_probability(dtype: str, backend: Backend) -> None:
    values = draw(backend, "random_bernoulli", dtype, p=0.3).astype(float)
    assert set(values) == {0.0, 1.0} and abs(values.mean() - 0.3) < 0.01


def test_seed_and_counter_decide_and_nothing_else(backend: Backend) -> None:
    first = draw(backend, "random_normal", mean=0.0, std=1.0)
    draw(backend, "random_uniform", low=0.0, high=1.0)
    np.testing.assert_array_equal(first, draw(backend, "random_normal", mean=0.0, std=1.0))
    for other in ({"seed": 4}, {"counter": 2}, {"seed": 1, "counter": 3}):
        values = draw(backend, "random_normal", mean=0.0, std=1.0, **other)
        assert abs(np.corrcoef(first, values)[0, 1]) < 0.03
        assert not np.intersect1d(first[:1000], values).size > 20  # not a shifted copy of the same stream


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_keeps_its_share_and_the_expected_value(dtype: str, backend: Backend) -> None:
    x = np.ones(40_000, dtype)
    out = backend.empty(x.shape, dtype), backend.empty(x.shape, bool)
    backend.run("dropout", backend.asarray(x), out=out, ratio=0.2, seed=0, counter=1)
    y, mask = map(backend.to_numpy, out)
    assert abs(mask.mean() - 0.8) < 0.01
    np.testing.assert_allclose(y[mask].astype(float), 1.25, rtol=1e-3)
    assert not y[~mask].any()
