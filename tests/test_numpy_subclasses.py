# SPDX-License-Identifier: Apache-2.0
"""Arrays of a subclass of numpy.ndarray, whose operations may differ, are ndarrays in a Tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, opt, tensor
from singa_lite.tensor import Tensor, to_numpy


class Matrices(autograd.Operator):
    """Twice its input, as matrices: scipy's ``todense`` gives such ones."""

    def forward(self, context: Any, x: Any) -> Any:
        return (x * 2).view(np.matrix)

    def backward(self, context: Any, dy: Any) -> Any:
        return (dy * 2).view(np.matrix)


def test_a_numpy_matrix_is_an_ndarray_in_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = np.array([[1, 2], [3, 4]], "f4").view(np.matrix)
    w = Tensor((2, 2), stores_grad=True)
    w.data = matrix
    monkeypatch.setattr(autograd, "training", True)
    made = Matrices()(w)
    for each in (w, tensor.from_raw_tensor(matrix), made.clone() * 0.5):
        assert to_numpy(each.clone().repeat(2)).tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
        assert type(each.array) is np.ndarray
    [(_, gradient)] = autograd.backward(autograd.reduce_sum(made))
    assert type(gradient.array) is np.ndarray and to_numpy(gradient).tolist() == [[2, 2], [2, 2]]


def test_collectives_take_a_numpy_matrix_and_change_it_in_place() -> None:
    matrix = np.array([[1, 2], [3, 4]], "f4").view(np.matrix)
    opt.DistOpt().sparsification(matrix, None, 0.25, True)
    assert matrix.tolist() == [[0, 0], [0, 4]]
