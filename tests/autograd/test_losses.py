# SPDX-License-Identifier: Apache-2.0
"""Labels as columns (N, 1), as in the char-RNN of SINGA, and as matrices of one class; cossim of extreme rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite import autograd
from singa_lite.errors import ShapeError
from singa_lite.tensor import Tensor, to_numpy


@pytest.mark.parametrize("loss", [autograd.softmax_cross_entropy, autograd.cross_entropy])
def test_a_column_of_class_ids_is_class_ids(loss: Any) -> None:
    x = np.random.default_rng(0).uniform(0.1, 1, (4, 3)).astype(np.float32)
    ids = np.array([2, 0, 1, 1], np.int32)
    expected, found = (to_numpy(loss(Tensor(data=x), Tensor(data=t))) for t in (ids, ids[:, None]))
    assert found.tobytes() == expected.tobytes()
    with pytest.raises(ShapeError, match="labels must be class ids"):
        loss(Tensor(data=x), Tensor(data=ids[:, None].astype(np.float32)))


def test_a_matrix_of_one_class_stays_a_matrix() -> None:
    x, t = Tensor(data=np.zeros((4, 1), np.float32)), Tensor(data=np.full((4, 1), 5, np.int32))
    assert to_numpy(autograd.softmax_cross_entropy(x, t)) == 0


def test_cossim_of_a_row_of_zeros_is_0_and_of_large_and_small_rows_right() -> None:
    a = Tensor(data=[[0.0, 0.0], [300.0, 400.0], [3e-5, 4e-5]], dtype="float16")
    b = Tensor(data=[[1.0, 2.0], [400.0, 300.0], [4.0, 3.0]], dtype="float16")
    np.testing.assert_allclose(to_numpy(autograd.cossim(a, b)), [0, 0.96, 0.96], atol=4e-3)


def test_the_gradient_of_short_rows_is_that_of_the_function() -> None:
    """By differences, in float64, of rows about as long as what is added to their lengths."""
    autograd.training = True
    a, b = np.array([[3e-9, 4e-9], [0.0, 0.0], [2e-8, -1e-8]]), np.array([[4.0, 3.0], [1.0, 2.0], [1.0, 1.0]])
    x = Tensor(data=a, dtype="float64", stores_grad=True)
    y = autograd.cossim(x, Tensor(data=b, dtype="float64"))
    found = to_numpy(autograd.gradients(y, Tensor(data=np.ones(3), dtype="float64"))[x])
    autograd.training = False

    def cosines(a: np.ndarray) -> np.ndarray:
        return (a * b).sum(1) / np.sqrt((a * a).sum(1) + 1e-16) / np.sqrt((b * b).sum(1) + 1e-16)

    step = 1e-13
    for column, offset in enumerate(np.eye(2) * step):
        expected = (cosines(a + offset) - cosines(a - offset)) / (2 * step)
        np.testing.assert_allclose(found[:, column], expected, rtol=1e-5, atol=1e-2)


def test_the_gradient_of_tile_is_rounded_once() -> None:
    autograd.training = True
    x = Tensor(data=np.zeros((1, 1)), dtype="float16", stores_grad=True)
    dy = np.ones((2, 70000), np.float16)
    dy[1] *= -1  # whose sums are beyond float16
    found = autograd.gradients(autograd.tile(x, (2, 70000)), Tensor(data=dy))[x]
    autograd.training = False
    assert to_numpy(found).tolist() == [[0.0]]
