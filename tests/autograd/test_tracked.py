# SPDX-License-Identifier: Apache-2.0
"""No gradient is lost in silence: methods of recorded tensors are recorded, functions of values alone warn."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt, tensor
from singa_lite.errors import DTypeError
from singa_lite.tensor import Tensor, bfloat16, float32, to_numpy

RNG = np.random.default_rng(5)
W, X = RNG.standard_normal((3, 4)), RNG.standard_normal((2, 3))
DY = RNG.standard_normal((2, 4))

# how a step reads x @ w, and the result as numpy has it
METHODS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "reshape": (lambda h: h.reshape((4, -1)), lambda h: h.reshape(4, 2)),
    "transpose": (lambda h: h.transpose((1, 0)), np.transpose),
    "T": (lambda h: h.T(), np.transpose),
    "tensor.reshape": (lambda h: tensor.reshape(h, (8,)), lambda h: h.reshape(8)),
    "tensor.transpose": (lambda h: tensor.transpose(h), np.transpose),
    "as_type": (lambda h: h.as_type("float32").as_type("float64"), lambda h: h),
    "its own dtype": (lambda h: h.as_type("float64"), lambda h: h),
}


@pytest.fixture(autouse=True)
def in_training(training: None) -> None:
    """Operators are recorded."""


def param(values: np.ndarray, dtype: object = "float64") -> Tensor:
    return Tensor(data=values, dtype=dtype, stores_grad=True)


@pytest.mark.parametrize("is_leaf", [False, True], ids=["recorded", "parameter"])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_a_tracked_tensor_has_the_gradient_of_its_operator(name: str, is_leaf: bool) -> None:
    method, reference = METHODS[name]
    w = param(DY if is_leaf else W)
    h = w if is_leaf else autograd.matmul(Tensor(data=X, dtype="float64"), w)
    y = method(h)
    values = DY if is_leaf else X @ W
    np.testing.assert_allclose(to_numpy(y), reference(values), rtol=1e-6)
    weights = reference(np.arange(8.0).reshape(2, 4))
    [(_, grad)] = autograd.backward(y, Tensor(data=weights, dtype="float64"))
    upstream = np.arange(8.0).reshape(2, 4)
    np.testing.assert_allclose(to_numpy(grad), upstream if is_leaf else X.T @ upstream, rtol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_the_result_is_a_leaf_where_nothing_is_recorded(name: str) -> None:
    method, _ = METHODS[name]
    with autograd.no_grad():
        assert method(param(DY)).creator is None
    assert method(Tensor(data=DY, dtype="float64")).creator is None
    autograd.training = False
    assert method(param(DY)).creator is None


def test_what_backward_has_gone_through_gives_leaves() -> None:
    y = param(DY) * 2.0
    loss = autograd.reduce_mean(y, None, 0)
    assert y.reshape((8,)).creator is not None
    list(autograd.backward(loss))
    for method, _ in METHODS.values():
        result = method(y)
        result *= 2.0
        assert result.creator is None


def test_other_dtypes_than_those_of_a_block_are_reshaped_in_it() -> None:
    w = param(DY)  # float64
    with autograd.autocast("bf16"):
        assert w.reshape((8,)).T().dtype == np.float64
        assert (param(DY, float32) * 2.0).as_type("float64").reshape((8,)).dtype == np.float64


def test_an_integer_parameter_is_rounded_to_a_leaf() -> None:
    counts = Tensor(data=[1, 2], stores_grad=True)
    assert counts.as_type("float32").creator is None


def test_a_function_of_a_16_bit_parameter_and_a_number_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor.add(param(DY, "float16"), 1.0)
        tensor.axpy(0.1, param(DY, "float16"), Tensor((2, 4), dtype="float16"))
    with pytest.warns(UserWarning, match="of a recorded tensor") as found:
        tensor.add(param(DY, "float16") * 2.0, 1.0)
    assert len(found) == 1


def test_a_whole_number_has_no_gradient() -> None:
    assert param(DY).as_type("int").creator is None
    with pytest.raises(DTypeError, match="cast: to = int32 is no float dtype"):
        autograd.cast(param(DY), "int32")
    with pytest.raises(DTypeError, match="cast: needs float"):
        autograd.cast(Tensor(data=[1, 2]), "float32")


def test_a_copy_in_the_same_dtype_is_a_copy() -> None:
    w = param(DY)
    y = w.as_type("float64")
    w *= 2.0
    np.testing.assert_array_equal(to_numpy(y), DY)


def test_a_cast_is_the_way_out_for_dtypes_that_autocast_refuses() -> None:
    with autograd.autocast("bf16"):
        y = autograd.relu(param(DY, float32).as_type("float16").as_type(float32).as_type(bfloat16))
    [(w, grad)] = autograd.backward(y, Tensor(data=np.ones((2, 4)), dtype=bfloat16))
    assert grad.dtype == w.dtype == float32
    np.testing.assert_array_equal(to_numpy(grad), DY > 0)


VALUES_ALONE: dict[str, Callable[[Tensor], object]] = {
    "relu": tensor.relu,
    "exp": tensor.exp,
    "sum": tensor.sum,
    "average": lambda h: tensor.average(h, 0),
    "softmax": tensor.softmax,
    "add": lambda h: tensor.add(1.0, h),
    "eltwise_mult": lambda h: tensor.eltwise_mult(h, h),
    "mult": lambda h: tensor.mult(h, Tensor(data=DY.T, dtype="float64")),
    "tensordot": lambda h: tensor.tensordot(h, h),
    "einsum": lambda h: tensor.einsum("ij,ij->", h, h),
    "concatenate": lambda h: tensor.concatenate([Tensor(data=DY, dtype="float64"), h], 0),
    "repeat": lambda h: h.repeat(2),
}


@pytest.mark.parametrize("name", VALUES_ALONE)
def test_a_function_of_values_alone_warns_of_a_recorded_tensor_once(name: str) -> None:
    function, w = VALUES_ALONE[name], param(DY)
    h = w * 2.0
    with pytest.warns(UserWarning, match=rf"tensor\.{name} of a recorded tensor.* no gradient") as found:
        result = function(h)
    assert len(found) == 1 and isinstance(result, Tensor) and result.creator is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(w)  # a parameter is looked at
        function(h.clone())
        with autograd.no_grad():
            function(h)
        list(autograd.backward(autograd.reduce_mean(h, None, 0)))
        function(h)  # nothing goes through it any more


class Tied(model.Model):
    """A decoder with the transposed weights of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = layer.Linear(2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return autograd.relu(self.encoder(x)) @ self.encoder.W.T()

    def train_one_batch(self, x: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x).reshape((-1,)), x.reshape((-1,)))
        self.optimizer(loss)
        return loss


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tied_weights_get_the_gradient_of_both_uses(use_graph: bool, precision: str) -> None:
    net, x = Tied(), Tensor(data=X)
    net.set_optimizer(opt.SGD(0.5))
    net.compile([x], use_graph=use_graph, precision=precision)
    w, values = W[:, :2].copy(), X.astype(np.float32).astype(np.float64)
    net.encoder.W.copy_from_numpy(w.astype(np.float32))
    for _ in range(4):
        net(x)
        h = values @ w
        error = np.maximum(h, 0) @ w.T - values
        into_h = error @ w * (h > 0) / 3
        w -= 0.5 * (values.T @ into_h + error.T @ np.maximum(h, 0) / 3)
        if precision == "bf16":
            break
    if not use_graph or precision == "fp32":
        assert all(info.break_reason is None for info in net.graph_info())
    np.testing.assert_allclose(to_numpy(net.encoder.W), w, rtol=0, atol=1e-5 if precision == "fp32" else 0.03)
