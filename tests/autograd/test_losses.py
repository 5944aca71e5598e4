# SPDX-License-Identifier: Apache-2.0
"""Class ids of shape (N, 1), as SINGA's char-RNN gives them, are class ids; a matrix of one class stays a matrix."""

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
