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
    assert -1 <= values.min() < -0.99 and 2.98 < values.max() < 3
    counts, _ = np.histogram(values, 8)
    assert abs(counts / 5000 - 1).max() < 0.06


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (16.0, 17.0), (-1.0, 0.0), (2.0, 2.0)])
def test_uniform_is_below_high(dtype: str, low: float, high: float, backend: Backend) -> None:
    for counter in range(20):
        values = draw(backend, "random_uniform", dtype, low=low, high=high, counter=counter).astype(float)
        assert low <= values.min() and (values.max() < high or low == high == values.max())


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


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.35, 0.99999])
def test_dropout_of_float16_rounds_once(ratio: float, backend: Backend) -> None:
    x = np.random.default_rng(0).standard_normal(40_000).astype(np.float16)
    out = backend.empty(x.shape, "float16"), backend.empty(x.shape, bool)
    backend.run("dropout", backend.asarray(x), out=out, ratio=ratio, seed=0, counter=1)
    y, mask = map(backend.to_numpy, out)
    with np.errstate(over="ignore"):
        wanted = (x * np.float32(1 / (1 - ratio))).astype(np.float16)
    np.testing.assert_array_equal(y, np.where(mask, wanted, np.float16(0)))


def places(
    backend: Backend, k: int, n: int, dtype: str = "int32", seed: int = 3, counter: int = 1
) -> np.ndarray:
    out = backend.empty((k,), dtype)
    backend.run("random_indices", out=out, n=n, seed=seed, counter=counter)
    return backend.to_numpy(out)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 1000, 65537])
def test_random_indices_are_a_permutation(n: int, dtype: str, backend: Backend) -> None:
    found = places(backend, n, n, dtype)
    np.testing.assert_array_equal(np.sort(found), np.arange(n))
    np.testing.assert_array_equal(places(backend, n // 2, n, dtype), found[: n // 2])
    assert n < 1000 or np.count_nonzero(found == np.arange(n)) < 10


def permutation(n: int, seed: int, counter: int) -> list[int]:
    """What ``random_indices`` of n must be, in Python's integers."""
    words, half = 2**64, 1
    while 4**half < n:
        half += 1

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % words
        z = (z ^ z >> 27) * 0x94D049BB133111EB % words
        return z ^ z >> 31

    keys = [
        mix(((seed ^ counter * 0x9E3779B97F4A7C15) + k * 0x9E3779B97F4A7C15) % words) for k in (1, 2, 3, 4)
    ]
    found = []
    for place in range(n):
        while True:
            left, right = place >> half, place % 2**half
            for key in keys:
                left, right = right, left ^ mix(right ^ key) % 2**half
            place = left << half | right
            if place < n:
                break
        found.append(place)
    return found


@pytest.mark.parametrize(("seed", "counter"), [(0, 0), (2**32 - 1, 7), (2**63 + 5, 2**40)])
@pytest.mark.parametrize("n", [5, 300])
def test_random_indices_are_those_of_every_device(n: int, seed: int, counter: int, backend: Backend) -> None:
    assert places(backend, n, n, "int64", seed, counter).tolist() == permutation(n, seed, counter)


def test_random_indices_hit_every_place_alike(backend: Backend) -> None:
    counts = np.zeros(50)
    for counter in range(2000):
        counts[places(backend, 5, 50, counter=counter)] += 1
    assert abs(counts / 200 - 1).max() < 0.3  # a standard deviation is 0.07
