# SPDX-License-Identifier: Apache-2.0
"""Initializers: variance, bounds and structure."""

from __future__ import annotations

import numpy as np
import pytest

from singa_lite import initializer
from singa_lite.errors import OptionError, ShapeError
from singa_lite.tensor import Tensor, to_numpy

pytestmark = pytest.mark.usefixtures("device")  # all of it on each kind of device

VARIANCE = {
    "glorot_normal": lambda fan_in, fan_out: 2 / (fan_in + fan_out),
    "glorot_uniform": lambda fan_in, fan_out: 2 / (fan_in + fan_out),
    "he_normal": lambda fan_in, fan_out: 2 / fan_in,
    "he_uniform": lambda fan_in, fan_out: 2 / fan_in,
    "lecun_normal": lambda fan_in, fan_out: 1 / fan_in,
    "lecun_uniform": lambda fan_in, fan_out: 1 / fan_in,
}
SHAPES = {(150, 300): (150, 300), (40, 60, 3, 5): (900, 600)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", VARIANCE)
def test_variance_follows_the_fans(name: str, shape: tuple[int, ...]) -> None:
    t = Tensor(shape)
    getattr(initializer, name)(t)
    values, expected = to_numpy(t), VARIANCE[name](*SHAPES[shape])
    assert abs(values.mean()) < 4 * np.sqrt(expected / values.size)
    assert values.var() == pytest.approx(expected, rel=0.03)
    is_bounded = abs(values).max() <= np.sqrt(3 * expected) * 1.0001
    assert is_bounded == name.endswith("uniform")


@pytest.mark.parametrize(("fans", "variance"), [((30, 10), 0.05), ((0, 20), 0.05), ((20, 0), 0.05)])
def test_gaussian_takes_the_fans_it_is_given(fans: tuple[int, int], variance: float) -> None:
    t = Tensor((100, 300))
    initializer.gaussian(t, *fans)
    assert to_numpy(t).var() == pytest.approx(variance, rel=0.03)


@pytest.mark.parametrize("shape", [(5, 5), (7, 4), (4, 7)])
def test_orthogonal_rows_or_columns_are_orthonormal(shape: tuple[int, int]) -> None:
    t = Tensor(shape, dtype="float64")
    initializer.orthogonal(t, gain=2.0)
    q = to_numpy(t) if shape[0] >= shape[1] else to_numpy(t).T
    np.testing.assert_allclose(q.T @ q, 4 * np.eye(min(shape)), atol=1e-12)


def test_orthogonal_prefers_no_sign() -> None:
    t = Tensor((3, 3), dtype="float64")
    signs = set()
    for _ in range(30):
        initializer.orthogonal(t)
        signs.add(to_numpy(t)[0, 0] > 0)
    assert signs == {True, False}


def test_eye_is_the_identity() -> None:
    t = Tensor((2, 3)).set_value(5.0)
    initializer.eye(t)
    np.testing.assert_array_equal(to_numpy(t), np.eye(2, 3))


def test_equal_seeds_give_equal_values_and_the_stream_moves_on() -> None:
    first, second, third = (Tensor((4, 4)) for _ in range(3))
    first.device.SetRandSeed(9)
    initializer.he_normal(first)
    initializer.he_normal(second)
    first.device.SetRandSeed(9)
    initializer.he_normal(third)
    np.testing.assert_array_equal(to_numpy(first), to_numpy(third))
    assert (to_numpy(first) != to_numpy(second)).all()


def test_shapes_without_fans_are_shape_errors() -> None:
    for function in (initializer.he_normal, initializer.eye, initializer.orthogonal):
        with pytest.raises(ShapeError):
            function(Tensor((3,)))
    with pytest.raises(OptionError):
        initializer.gaussian(Tensor((3,)))
