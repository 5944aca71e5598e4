# SPDX-License-Identifier: Apache-2.0
"""Tensors of bfloat16: how they are made, shown and converted, and what does not take them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from singa_lite import autograd, layer, opt, tensor
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import CheckpointError, CommError, DTypeError
from singa_lite.model import Model
from singa_lite.tensor import Tensor, bfloat16, to_numpy

VALUES = np.array([[1.0, -2.5, 1 + 2.0**-9], [0.0, 3.0, 1e30]])


def test_a_tensor_is_made_in_bfloat16_by_dtype_and_of_an_array_of_it() -> None:
    rounded = VALUES.astype(ml_dtypes.bfloat16)
    for t in (Tensor(data=VALUES, dtype="bfloat16"), Tensor(data=rounded), tensor.from_numpy(rounded)):
        assert (t.dtype, t.memsize()) == (bfloat16, 12)
        np.testing.assert_array_equal(to_numpy(t), rounded)
    assert tensor.sizeof(bfloat16) == 2
    zeros = Tensor((2, 3), dtype=bfloat16)
    assert zeros.dtype == bfloat16 and not to_numpy(zeros).any()


def test_it_prints_its_rounded_values_and_its_dtype() -> None:
    t = Tensor(data=[1.0, 2.5], dtype=bfloat16)
    assert "dtype=bfloat16" in str(t) and "2.5" in str(t)
    assert repr(t) == "<Tensor bfloat16[2] on Device(cpu)>"


def test_as_type_rounds_to_nearest_even_and_back_exactly() -> None:
    t = Tensor(data=np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8]), dtype="float32")
    narrow = t.as_type(bfloat16)
    assert narrow.dtype == bfloat16
    np.testing.assert_array_equal(to_numpy(narrow.as_type("float32")), [1, 1 + 2.0**-6])
    np.testing.assert_array_equal(to_numpy(narrow.clone().to_type("int32")), [1, 1])


def test_numbers_come_back_as_python_numbers() -> None:
    t = Tensor((1,), dtype=bfloat16).set_value(2.5)
    assert type(t.item()) is float and t.item() == 2.5 and float(t) == 2.5 and bool(t)
    assert Tensor(data=[3.0, -5.0], dtype=bfloat16).l1() == 4


def test_arithmetic_keeps_the_dtype() -> None:
    t = Tensor(data=[1.0, 2.0], dtype=bfloat16)
    t += 1
    t /= 2.0
    for result in (t + 1.5, 2 * t, t / t, t**2.0, -t, autograd.relu(t), t[0], tensor.sum(t, axis=0)):
        assert result.dtype == bfloat16
    np.testing.assert_array_equal(to_numpy(t * t).astype(float), [1, 2.25])
    assert (t > 1.2).dtype == "float32"


def test_random_fillers_round_the_numbers_of_float32() -> None:
    device = Tensor((1,)).device
    made = []
    for dtype in ("float32", bfloat16):
        device.SetRandSeed(3)
        made.append(to_numpy(Tensor((9,), dtype=dtype).gaussian(0, 1).as_type(bfloat16)))
    np.testing.assert_array_equal(*made)


def test_mixed_dtypes_without_autocast_are_refused() -> None:
    a, b = Tensor((2, 2), dtype=bfloat16), Tensor((2, 2))
    for call in (lambda: a + b, lambda: autograd.matmul(a, b), lambda: a.copy_data(b)):
        with pytest.raises((DTypeError, ValueError), match="bfloat16"):
            call()


def test_values_bfloat16_does_not_hold_are_refused_where_nothing_may_round() -> None:
    t = Tensor((1,), dtype=bfloat16)
    with pytest.raises(DTypeError, match="bfloat16 cannot hold"):
        t.copy_from_numpy(np.array([1 + 2.0**-9]))
    t.copy_from_numpy(np.array([1.5]))
    assert t.item() == 1.5


def test_parameters_stay_float32_and_others_are_refused_by_an_optimizer() -> None:
    x = Tensor((2, 3), dtype=bfloat16)
    norm, linear = layer.BatchNorm2d(), layer.LayerNorm()
    norm(x), linear(x)
    for tensors in (norm.get_states(), linear.get_states()):
        assert {str(t.dtype) for t in tensors.values()} == {"float32"}
    param = Tensor((2,), dtype=bfloat16, stores_grad=True)
    with pytest.raises(DTypeError, match=r"bfloat16; .*float32.*precision\.md"):
        opt.SGD(0.1).update(param, Tensor((2,), dtype=bfloat16))


class Net(Model):
    def forward(self, x: Tensor) -> Tensor:
        return autograd.relu(x)


def test_what_does_not_take_bfloat16_says_so(tmp_path) -> None:  # type: ignore[no-untyped-def]
    values = np.ones(2, ml_dtypes.bfloat16)
    net = Net()
    net.compile([Tensor((1, 1))])
    with pytest.raises(CheckpointError, match="bfloat16"):
        net.save_states(tmp_path / "file", {"extra": values})
    with pytest.raises((DTypeError, CommError), match="bfloat16"):
        LocalCommunicator(World()).all_reduce(values, "sum")


class Dynamic(Model):
    """A convolution whose weights, and with them a bias, the step computes in bfloat16."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        draw = np.random.default_rng(6)
        self.w = Tensor(data=draw.standard_normal((8, 16)), dtype="float32", stores_grad=True)
        self.mix = Tensor(data=draw.standard_normal((16, 16)), dtype="float32", stores_grad=True)
        self.b = Tensor(data=draw.standard_normal((8, 8)), dtype="float32", stores_grad=True)
        self.has_bias = has_bias

    def forward(self, x: Tensor) -> Tensor:
        w = autograd.reshape(autograd.matmul(self.w, self.mix), (8, 4, 2, 2))
        b = autograd.reshape(autograd.matmul(self.b, self.b)[0], (8,)) if self.has_bias else None
        y = autograd.relu(autograd.conv2d(x, w, b, padding=1))
        return autograd.conv2d(y, autograd.reshape(autograd.matmul(self.w, self.mix), (4, 8, 2, 2)))

    def train_one_batch(self, x: Tensor) -> Tensor:
        loss = autograd.reduce_mean(self.forward(x) ** 2, None, 0)
        self.optimizer(loss)
        return loss


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_convolution_by_weights_that_the_step_computes_is_recorded_as_it_is_eagerly(
    precision: str, has_bias: bool
) -> None:
    found = []
    for use_graph in (False, True):
        net, draw = Dynamic(has_bias), np.random.default_rng(7)
        net.set_optimizer(opt.SGD(1e-4))
        x = Tensor(data=draw.standard_normal((6, 4, 5, 5)), dtype="float32")
        net.compile([x], use_graph=use_graph, precision=precision)
        losses = []
        for _ in range(4):
            x.copy_from_numpy(draw.standard_normal((6, 4, 5, 5)).astype("float32"))
            losses.append(float(net(x)))
        assert all(info.break_reason is None for info in net.graph_info())
        found.append((losses, *map(to_numpy, net.get_params().values())))
    for eager, recorded in zip(*found, strict=True):
        np.testing.assert_allclose(recorded, eager, rtol=2e-2 if precision == "bf16" else 1e-4, atol=1e-4)
