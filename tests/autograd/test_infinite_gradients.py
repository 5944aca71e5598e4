# SPDX-License-Identifier: Apache-2.0
"""Elements that an operator leaves out have gradient 0, also where the incoming gradient is infinite or NaN."""

from __future__ import annotations

import numpy as np
import pytest

from singa_lite import autograd
from singa_lite.device import Device
from singa_lite.tensor import Tensor, to_numpy

DTYPES = ["float16", "bfloat16", "float32", "float64"]
CASES = {
    "clip": (lambda x: autograd.clip(x, 0.0, 2.0), [-1.0, 0.0, 3.0], [0, 1, 0]),
    "clip from below": (lambda x: autograd.clip(x, 0.0), [-1.0, 0.0, 3.0], [0, 1, 1]),
    "relu": (autograd.relu, [-1.0, 0.5, 0.0], [0, 1, 0]),
    "max": (lambda x: autograd.max(x, 0.0), [-1.0, 0.5, -2.0], [0, 1, 0]),
    "where": (lambda x: autograd.where(x, 1.0, autograd.greater(x, 0.0)), [-1.0, 0.5, -2.0], [0, 1, 0]),
}


@pytest.mark.parametrize("dy", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_what_an_operator_leaves_out_has_none(
    name: str, dtype: str, dy: float, device: Device, training: None
) -> None:
    function, values, passes = CASES[name]
    x = Tensor(data=np.array(values), dtype=dtype, device=device, stores_grad=True)
    y = function(x)
    found = autograd.gradients(y, Tensor(data=np.full(3, dy), dtype=dtype, device=device))[x]
    np.testing.assert_array_equal(to_numpy(found).astype(float), np.where(np.array(passes, bool), dy, 0.0))


@pytest.mark.parametrize("dy", [np.inf, np.nan])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_max_pooling_gives_it_to_the_largest_pixel_alone(
    dtype: str, stride: int, dy: float, device: Device, training: None
) -> None:
    x = Tensor(data=np.array([[[[-1.0, 0.0], [-2.0, -3.0]]]]), dtype=dtype, device=device, stores_grad=True)
    y = autograd.max_pool_2d(x, 2, stride)
    found = autograd.gradients(y, Tensor(data=np.full((1, 1, 1, 1), dy), dtype=dtype, device=device))[x]
    np.testing.assert_array_equal(to_numpy(found).astype(float).ravel(), [0, dy, 0, 0])
