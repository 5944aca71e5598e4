# SPDX-License-Identifier: Apache-2.0
"""The engine, driven by operators made here, so that no formula of ops/ takes part."""

import gc

import numpy as np
import pytest

from singa_lite import autograd
from singa_lite.autograd.engine import Operator
from singa_lite.config import this_thread
from singa_lite.errors import DTypeError, GraphError, ShapeError
from singa_lite.tensor import Tensor, to_numpy

pytestmark = pytest.mark.usefixtures("training")


class PassThrough(Operator):
    """a + b, whose backward hands on dy itself to both inputs."""

    def forward(self, context, a, b):
        return a + b

    def backward(self, context, dy):
        return dy, dy


class Average(Operator):
    """(a + b) / 2, whose backward hands one new array to both inputs."""

    def forward(self, context, a, b):
        return (a + b) / a.dtype.type(2)

    def backward(self, context, dy):
        half = dy / dy.dtype.type(2)
        return half, half


class Times(Operator):
    """x * factor."""

    def __init__(self, factor):
        self.factor = factor

    def forward(self, context, x):
        return x * x.dtype.type(self.factor)

    def backward(self, context, dy):
        return dy * dy.dtype.type(self.factor)


class Total(Operator):
    """The sum of all elements, shape (1,)."""

    def forward(self, context, x):
        context.save(x.shape)
        return x.sum(keepdims=True).reshape(1)

    def backward(self, context, dy):
        return np.broadcast_to(dy, context.saved[0]).copy() if context.saved[0] else dy


class Halves(Operator):
    """The first and the second half of a vector: two outputs."""

    def forward(self, context, x):
        middle = x.size // 2
        return x[:middle].copy(), x[middle:].copy()

    def backward(self, context, first, second):
        return np.concatenate([first, second])


def parameter(values, name=None):
    return Tensor(data=np.asarray(values, np.float32), stores_grad=True, name=name)


def test_gradients_do_not_alias_when_both_inputs_get_dy_and_both_are_used_again():
    # s = (p + 3p) + (q + 5q) through nodes that pass dy on unchanged: dp = 1 + 3, dq = 1 + 5
    p, q = parameter([1.0, 2.0]), parameter([3.0, 4.0])
    inner = PassThrough()(p, q)
    outer = PassThrough()(Times(3)(p), Times(5)(q))
    result = dict(autograd.backward(Total()(PassThrough()(inner, outer))))
    np.testing.assert_array_equal(to_numpy(result[p]), [4, 4])
    np.testing.assert_array_equal(to_numpy(result[q]), [6, 6])


def test_gradients_do_not_alias_when_both_inputs_get_one_new_array_and_both_are_used_again():
    # the average is visited first, then 3p and 5q add to what it gave: dp = 1/2 + 3, dq = 1/2 + 5
    p, q = parameter([1.0, 2.0]), parameter([3.0, 4.0])
    outer = PassThrough()(Times(3)(p), Times(5)(q))
    inner = Average()(p, q)
    result = dict(autograd.backward(Total()(PassThrough()(inner, outer))))
    np.testing.assert_array_equal(to_numpy(result[p]), [3.5, 3.5])
    np.testing.assert_array_equal(to_numpy(result[q]), [5.5, 5.5])


def test_yielded_gradients_own_their_memory():
    p, q = parameter([1.0, 2.0]), parameter([3.0, 4.0])
    result = dict(autograd.backward(Total()(PassThrough()(p, q))))
    result[p].data[:] = 99
    np.testing.assert_array_equal(to_numpy(result[q]), [1, 1])


def test_a_parameter_used_by_one_node_twice_gets_both_gradients():
    p = parameter([1.0, 2.0])
    result = dict(autograd.backward(Total()(PassThrough()(p, p))))
    np.testing.assert_array_equal(to_numpy(result[p]), [2, 2])


def test_parameters_come_as_soon_as_their_last_use_was_visited():
    first, second, shared = parameter([1.0], "first"), parameter([1.0], "second"), parameter([1.0], "shared")
    y = PassThrough()(PassThrough()(first, shared), second)
    y = PassThrough()(y, shared)
    assert [param.name for param, _ in autograd.backward(Total()(y))] == ["second", "first", "shared"]


def test_no_parameter_is_lost_to_a_reused_id():
    # temporaries die between the layers, so their ids are free to be used again
    parameters = [parameter(np.full(3, i), f"p{i}") for i in range(50)]
    y = Times(1)(parameters[0])
    for param in parameters[1:]:
        y = PassThrough()(Times(1)(y), param)
        gc.collect(0)
    assert {param.name for param, _ in autograd.backward(Total()(y))} == {p.name for p in parameters}


def test_several_outputs_and_an_unused_one():
    p = parameter([1.0, 2.0, 3.0, 4.0])
    first, _ = Halves()(p)
    result = dict(autograd.backward(Total()(Times(2)(first))))
    np.testing.assert_array_equal(to_numpy(result[p]), [2, 2, 0, 0])


def test_dy_scales_every_gradient():
    p = parameter([1.0, 2.0])
    result = dict(autograd.backward(Total()(Times(2)(p)), 1024.0))
    np.testing.assert_array_equal(to_numpy(result[p]), [2048, 2048])


def test_inputs_without_stores_grad_get_no_gradient():
    x = Tensor(data=np.ones(2, np.float32))
    assert Times(2)(x).creator is None


def test_backward_of_something_not_recorded_raises_at_the_call():
    p = parameter([1.0])
    with autograd.no_grad():
        y = Times(2)(p)
    with pytest.raises(GraphError, match="not recorded"):
        autograd.backward(y)
    autograd.training = False
    with pytest.raises(GraphError, match="not recorded"):
        autograd.backward(Times(2)(p))


def test_backward_twice_raises():
    loss = Total()(Times(2)(parameter([1.0])))
    list(autograd.backward(loss))
    with pytest.raises(GraphError, match="used up"):
        autograd.backward(loss)


def test_backward_of_many_elements_needs_dy():
    y = Times(2)(parameter([1.0, 2.0]))
    with pytest.raises(ShapeError, match="give dy"):
        autograd.backward(y)
    with pytest.raises(ShapeError, match="dy has shape"):
        autograd.backward(y, Tensor((3,)))
    gradient = dict(autograd.backward(y, Tensor(data=np.array([1, 10], np.float32))))
    assert [to_numpy(g).tolist() for g in gradient.values()] == [[2, 20]]


def test_changing_a_recorded_tensor_in_place_raises():
    y = Times(2)(parameter([1.0]))
    with pytest.raises(GraphError, match="falsify"):
        y += 1


def test_training_of_the_module_reaches_the_config():

    autograd.training = True
    assert this_thread.training is True
    autograd.training = False
    assert this_thread.training is False and autograd.training is False


# ---- what an operator of a script's own returns -----------------------------------------------------------------


class Returns(Operator):
    """Returns what two functions make of the input and of dy."""

    def __init__(self, forward=lambda x: x.copy(), backward=lambda dy: dy):
        self.of_input, self.of_gradient = forward, backward

    def forward(self, context, x):
        return self.of_input(x)

    def backward(self, context, dy):
        return self.of_gradient(dy)


@pytest.mark.parametrize(
    ("backward", "error", "message"),
    [
        (lambda dy: dy.T, ShapeError, r"input 0 must have its shape \(3, 4\), got \(4, 3\)"),
        (lambda dy: dy[0], ShapeError, r"got \(4,\)"),
        (lambda dy: dy.sum(), ShapeError, r"got \(\)"),
        (lambda dy: (dy, dy), ShapeError, "must return 1 gradients, .* got 2"),
        (lambda dy: dy.astype("f8"), DTypeError, "dtype float32, got float64"),
        (lambda dy: dy.astype("i4"), DTypeError, "dtype float32, got int32"),
        (lambda dy: dy > 0, DTypeError, "got bool"),
        (lambda dy: dy.tolist(), DTypeError, "got list"),
        (lambda dy: 1.0, DTypeError, "got float"),
        (lambda dy: Tensor(data=dy), DTypeError, "got Tensor"),
    ],
)
@pytest.mark.parametrize("factor", [None, 2.0])
def test_a_gradient_that_does_not_fit_is_an_error_that_names_the_operator(backward, error, message, factor):
    p = parameter(np.ones((3, 4)))
    y = Returns(backward=backward)(p if factor is None else p * factor)
    with pytest.raises(error, match=f"Returns: backward.*{message}"):
        autograd.gradients(Total()(y))


@pytest.mark.parametrize(
    "result",
    [[1.0], 1.0, None, Tensor((3,)), np.ones(3, bool)],
    ids=["list", "float", "None", "Tensor", "bool"],
)
def test_a_result_that_is_no_raw_array_is_an_error_that_names_the_operator(result):
    with pytest.raises(DTypeError, match="Returns: forward must return raw arrays"):
        Returns(lambda x: result)(parameter([1.0, 2.0, 3.0]))


def test_a_result_may_be_a_number_of_numpy():
    p = parameter([1.0, 2.0])
    y = Returns(lambda x: x.sum(), lambda dy: np.full(2, dy))(p)
    assert y.shape == () and to_numpy(autograd.gradients(y)[p]).tolist() == [1, 1]


@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[::-1], lambda x: np.broadcast_to(x[:1], (3, 3))])
def test_results_are_row_major(view):
    p = parameter(np.arange(9.0).reshape(3, 3))
    y = Returns(view, lambda dy: dy.T)(p)
    (gradient,) = autograd.gradients(Total()(y)).values()
    assert y.array.flags.c_contiguous and gradient.array.flags.c_contiguous
    np.testing.assert_array_equal(to_numpy(y), view(np.arange(9.0).reshape(3, 3)))


class KeepsGradient(Operator):
    """0.5 * sum of squares, whose backward returns the input that it has saved."""

    def forward(self, context, x):
        context.save(x)
        return (x * x).sum() / x.dtype.type(2)

    def backward(self, context, dy):
        return context.saved[0]


def test_a_saved_array_that_is_returned_as_a_gradient_is_not_written():
    p = parameter([1.0, 2.0])
    for gradient in autograd.gradients(PassThrough()(Total()(p).reshape(()), KeepsGradient()(p))).values():
        gradient *= 0.0
    y = autograd.add(autograd.reduce_sum(p * 10.0, keepdims=0), KeepsGradient()(p))
    assert to_numpy(autograd.gradients(y)[p]).tolist() == [11, 12]
    assert to_numpy(p).tolist() == [1, 2]


def test_an_operator_written_for_singa_is_told_about_the_context():
    class Old(autograd.Operator):
        def forward(self, x):
            return x

    with pytest.raises(
        TypeError, match=r"takes 2 positional .*; an operator has forward\(self, context, \*arrays\)"
    ):
        Old()(Tensor(data=np.ones(2, np.float32)))

    class Wrong(Old):
        def forward(self, context, x):
            return x + "1"

    with pytest.raises(TypeError) as error:
        Wrong()(Tensor(data=np.ones(2, np.float32)))
    assert "context, *arrays" not in str(error.value)
