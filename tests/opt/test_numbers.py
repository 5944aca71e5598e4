# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on numbers that every replay reads again: a recorded step gives what an eager one does, or an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt, tensor
from singa_lite.errors import GraphError
from singa_lite.graph.compare import _are_equal
from singa_lite.graph.nodes import Scalar

pytestmark = pytest.mark.usefixtures("device")

STEPS = 5


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = layer.Linear(2)

    def forward(self, x: tensor.Tensor) -> tensor.Tensor:
        return self.linear(x)

    def train_one_batch(self, x: tensor.Tensor) -> tensor.Tensor:
        loss = autograd.mse_loss(self.forward(x), x)
        self.optimizer(loss)
        return loss


def weights(compute: Callable[[Any], Any], use_graph: bool, is_for_tensors: bool = False) -> np.ndarray:
    """The weights after each step of an optimizer whose rate is ``compute`` of its decaying one."""

    class Own(opt.Optimizer):
        is_recordable = True

        def update_all(self, pairs: Any) -> None:
            rate = compute(self.number("lr"))
            if is_for_tensors:
                for param, grad in pairs:
                    param -= grad * rate
                    param *= 1 - 0.1 * self.number("lr")
            else:
                self.run_update("sgd_update", pairs, slots=(), lr=rate, weight_decay=0.0)

    x = tensor.from_numpy(np.random.default_rng(0).standard_normal((4, 2)).astype(np.float32))
    net = Net()
    net.set_optimizer(Own(opt.ExponentialDecay(0.2, 1, 0.5)))
    net.compile([x], use_graph=use_graph)
    net.linear.W.set_value(0.5)
    found = []
    for _ in range(STEPS):
        net(x)
        found.append(tensor.to_numpy(net.linear.W))
    if use_graph:
        assert [info.break_reason for info in net.graph_info()] == [None]
    return np.array(found)


@pytest.mark.parametrize("is_for_tensors", [False, True])
@pytest.mark.parametrize(
    "compute",
    [
        lambda lr: lr * 0.5 + 0.25 * lr,
        lambda lr: (1 + lr) / 4 - lr**2,
        lambda lr: 1 - lr / 2,
        lambda lr: 2 - -lr,
        lambda lr: 0.5**lr,
        lambda lr: 0.01 / lr,
        lambda lr: np.float64(0.5) * lr,
        lambda lr: abs(-lr) % 0.9 + lr // 1e-4 * 1e-5,
        lambda lr: 0.5 % (lr + 0.3) + 10 // lr * 1e-3,
    ],
)
def test_what_is_computed_of_a_number_is_read_again_at_every_replay(
    compute: Callable[[Any], Any], is_for_tensors: bool
) -> None:
    eager, recorded = (weights(compute, use_graph, is_for_tensors) for use_graph in (False, True))
    np.testing.assert_array_equal(eager, recorded)
    assert len({each.tobytes() for each in np.diff(eager, axis=0)}) == STEPS - 1


@pytest.mark.parametrize(
    "compute",
    [
        lambda lr: lr if lr > 0.1 else 0.0,
        lambda lr: 0.0 if lr == 0 else lr,
        lambda lr: lr or 0.1,
        math.sqrt,
        float,
        int,
        lambda lr: max(lr, 0.1),
        lambda lr: round(lr, 2),
        lambda lr: divmod(lr, 2)[1],
        lambda lr: lr * np.full(2, 0.5),
        lambda lr: np.full(2, 0.5) * lr,
    ],
)
def test_a_number_that_python_asks_for_its_value_is_an_error_with_a_cure(
    compute: Callable[[Any], Any],
) -> None:
    with pytest.raises(GraphError, match=r"in scalar\(lambda: \.\.\.\), or where it decides .* guard\(key"):
        weights(compute, use_graph=True)


def test_a_number_times_a_tensor_of_16_bits_is_an_error_with_a_cure() -> None:
    x = tensor.Tensor((2,), dtype=tensor.float16)
    with pytest.raises(GraphError, match=r"^mul: a number that every replay reads again"):
        x * Scalar(lambda: 0.1)


def test_other_arithmetic_is_found_where_records_are_checked() -> None:
    lr = Scalar(lambda: 0.1)
    assert _are_equal(lr * 0.5, lr * 0.5)
    assert not _are_equal(lr * 0.5, lr * 0.25)
    assert not _are_equal(lr * 0.5, lr + 0.5)
    assert not _are_equal(lr * 0.5, lr)
