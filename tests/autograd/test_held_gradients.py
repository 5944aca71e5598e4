# SPDX-License-Identifier: Apache-2.0
"""``Tensor.backward`` and ``Tensor.grad``: one gradient a parameter, which is added to while it is fresh."""

import copy

import numpy as np
import pytest

from singa_lite import autograd, layer, opt
from singa_lite.backend.cpu import CpuBackend
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.config import this_thread
from singa_lite.device import Device
from singa_lite.errors import DeviceError, DTypeError, GraphError, OptionError, ShapeError
from singa_lite.tensor import Tensor, to_numpy

pytestmark = pytest.mark.usefixtures("device")


def parameter(values=(2.0, -3.0), dtype="float32", name="w"):
    return Tensor(data=np.array(values), dtype=dtype, stores_grad=True, name=name)


def square(w, factor=1.0):
    """The sum of factor * w * w, whose gradient is 2 * factor * w."""
    with autograd.record():
        return autograd.reduce_sum(w * w * factor, keepdims=0)


def values(t):
    return to_numpy(t).tolist()


def test_the_gradient_is_zero_at_first_and_the_same_tensor_ever_after():
    w = parameter()
    grad = w.grad
    memory = grad.array
    assert values(grad) == [0, 0] and not w.has_fresh_grad
    for _ in range(2):
        square(w).backward()
    w.mark_grad_stale()
    square(w).backward()
    assert w.grad is grad and grad.array is memory and values(grad) == [4, -6]


def test_a_fresh_gradient_is_added_to_and_another_one_replaced():
    w = parameter()
    for expected in ([4, -6], [8, -12], [12, -18]):
        square(w).backward()
        assert values(w.grad) == expected and w.has_fresh_grad
    w.mark_grad_stale()
    assert values(w.grad) == [12, -18] and not w.has_fresh_grad
    w.grad *= 0.5
    assert values(w.grad) == [6, -9] and not w.has_fresh_grad
    square(w).backward()
    assert values(w.grad) == [4, -6]


def test_gradients_of_slices_add_up_to_that_of_the_whole_batch():
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((8, n)) for n in (5, 3))
    net = layer.Linear(3)
    net(Tensor(data=x))
    whole = autograd_of(net, x, y, slice(0, 8))
    net.W.mark_grad_stale()
    for start in range(0, 8, 2):
        with autograd.record():
            loss = autograd.mse_loss(*both(net, x, y, slice(start, start + 2)))
        loss.backward(2 / 8)
    np.testing.assert_allclose(to_numpy(net.W.grad), whole, rtol=1e-5, atol=1e-6)


def both(net, x, y, part):
    return net(Tensor(data=x[part])), Tensor(data=y[part])


def autograd_of(net, x, y, part):
    with autograd.record():
        loss = autograd.mse_loss(*both(net, x, y, part))
    return to_numpy(autograd.gradients(loss)[net.W])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_it_has_the_dtype_of_its_parameter_and_the_bits_of_the_engine(dtype):
    w = parameter([0.1, -0.7, 3.0], dtype)
    expected = to_numpy(autograd.gradients(square(w))[w])
    square(w).backward()
    assert w.grad.dtype == dtype and to_numpy(w.grad).tobytes() == expected.tobytes()
    square(w).backward()
    assert to_numpy(w.grad).tobytes() == (expected + expected).tobytes()


def test_dy_is_a_number_or_a_tensor_like_y():
    w = parameter()
    square(w).backward(10)
    square(w).backward(Tensor(data=np.float32(0.5)))
    assert values(w.grad) == [42, -63]
    with autograd.record():
        y = w * w
    y.backward(Tensor(data=np.array([1.0, 0.0])))
    assert values(w.grad) == [46, -63]


def test_dy_may_be_the_gradient_that_changes():
    v, w = parameter(name="v"), parameter()
    square(v).backward()
    with autograd.record():
        y = v + w
    y.backward(v.grad)
    assert values(v.grad) == [8, -12] and values(w.grad) == [4, -6]


def test_a_shared_parameter_has_the_sum_over_its_uses():
    w = parameter()
    with autograd.record():
        loss = autograd.reduce_sum(w * w + w * 3.0, keepdims=0)
    loss.backward()
    assert values(w.grad) == [7, -3]


def test_what_is_no_parameter_has_no_gradient():
    w = parameter()
    frozen = Tensor((2,), requires_grad=False, stores_grad=True)
    with autograd.record():
        y = w * Tensor((2,))
    for other in (Tensor((2,)), frozen, y, w.grad):
        assert other.grad is None and not other.has_fresh_grad
    for other, value in ((w, Tensor((2,))), (w, None), (y, None)):
        with pytest.raises(GraphError, match="grad stays the same Tensor"):
            other.grad = value
    square(w).backward()
    assert values(w.clone().grad) == [0, 0]  # a parameter of its own


def test_it_follows_the_dtype_and_the_shape_of_its_parameter():
    w = parameter()
    square(w).backward()
    old = w.grad
    w.to_type("float64")
    assert not w.has_fresh_grad and w.grad is not old and w.grad.dtype == np.float64
    square(w).backward()
    assert values(w.grad) == [4, -6]
    w.reset_like(Tensor((3,)))
    assert w.grad.shape == (3,) and values(w.grad) == [0, 0, 0]


@pytest.mark.parametrize("device", ["cpu"], indirect=True)  # the stand-in is not copied
def test_a_copy_of_a_layer_has_gradients_of_its_own():
    linear = layer.Linear(2)
    linear(Tensor((1, 2)))
    twin = copy.deepcopy(linear)
    square(linear.W).backward()
    assert (
        twin.W.grad is not linear.W.grad and not twin.W.has_fresh_grad and values(twin.W.grad) == [[0, 0]] * 2
    )


def test_record_trains_inside_and_leaves_all_as_it_was():
    w = parameter()
    assert not autograd.training
    with autograd.no_grad():
        with autograd.record():
            assert autograd.training and this_thread.recording
            y = w * w
        assert not this_thread.recording
    assert not autograd.training and y.creator is not None
    with pytest.raises(ZeroDivisionError), autograd.record():
        raise ZeroDivisionError
    assert not autograd.training


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda w: (w * w).backward(), GraphError, "not recorded"),
        (lambda w: w.backward(), GraphError, "not recorded"),
        (lambda w: recorded(w).backward(), ShapeError, "give dy, or reduce y"),
        (lambda w: recorded(w).backward(Tensor((3,))), ShapeError, r"dy has shape \(3,\) but y has \(2,\)"),
        (lambda w: recorded(w).backward(Tensor((2,), dtype="float16")), DTypeError, "float16 and float32"),
        (
            lambda w: recorded(w).backward(np.ones(2)),
            DTypeError,
            "dy must be a Tensor, a number or None, not ndarray",
        ),
        (lambda w: square(w).backward("2"), DTypeError, "not str"),
        (lambda w: square(w).backward(b"2"), DTypeError, "not bytes"),
        (lambda w: square(w).backward(10**400), DTypeError, "not int: int too large"),
        (lambda w: square(w).backward(1, print), OptionError, "must be a BackwardCallback .* not builtin"),
        (lambda w: square(w).backward(1, [None]), OptionError, "not NoneType"),
        (lambda w: square(w).backward(1, [CALLBACK, CALLBACK]), OptionError, "a callback twice"),
    ],
)
def test_bad_calls_raise_and_change_nothing(call, error, message):
    w = parameter()
    square(w).backward()
    with pytest.raises(error, match=message):
        call(w)
    assert values(w.grad) == [4, -6] and w.has_fresh_grad


def recorded(w):
    with autograd.record():
        return w * w


CALLBACK = autograd.BackwardCallback()


def test_a_second_backward_of_a_record_raises_and_adds_nothing():
    w = parameter()
    loss = square(w)
    loss.backward()
    with pytest.raises(GraphError, match="used up"):
        loss.backward()
    assert values(w.grad) == [4, -6]


# ---- callbacks ---------------------------------------------------------------------------------------


class Watch(autograd.BackwardCallback):
    """Notes the calls, with the gradient as it is then; raises where told to."""

    def __init__(self, raises=""):
        self.calls, self.raises = [], raises

    def note(self, what, *more):
        self.calls.append((what, *more))
        if what == self.raises:
            raise ValueError(what)

    def begin(self):
        self.note("begin")

    def add_gradient(self, param):
        self.note(param.name, values(param.grad))

    def finish(self):
        self.note("finish")


def two_parameters():
    v, w = parameter([1.0], name="v"), parameter([5.0])
    with autograd.record():
        loss = autograd.reduce_sum(v * 2.0 + autograd.tanh(w * 0.0), keepdims=0)
    return v, w, loss


def test_callbacks_see_each_gradient_when_it_is_final_before_the_next():
    v, _, loss = two_parameters()
    square(v).backward()
    watches = [Watch(), Watch()]
    loss.backward(communicator_callbacks=watches)
    order = [call[0] for call in watches[0].calls]
    assert order[0] == "begin" and order[-1] == "finish" and sorted(order[1:3]) == ["v", "w"]
    assert ("v", [4.0]) in watches[0].calls and watches[0].calls == watches[1].calls  # 2 + 2, added up


@pytest.mark.parametrize("at", ["begin", "v", "w", "finish"])
def test_a_callback_that_raises_leaves_gradients_that_can_be_zeroed(at):
    v, w, loss = two_parameters()
    with pytest.raises(ValueError, match=at):
        loss.backward(communicator_callbacks=[Watch(at)])
    reached = [param.name for param in (w, v) if param.has_fresh_grad]
    assert reached == {"begin": [], "w": ["w"]}.get(at, ["w", "v"])
    if at == "begin":
        loss.backward()  # nothing was used up
    for param in (v, w):
        param.mark_grad_stale()
    again = autograd.gradients(square(v))[v]
    square(v).backward(communicator_callbacks=(Watch(),))
    assert values(v.grad) == values(again)


# ---- optimizers --------------------------------------------------------------------------------------


def test_zero_grad_makes_the_named_gradients_zero_and_not_fresh():
    named, other = parameter(name="a"), parameter(name="b")
    sgd = opt.SGD(lr=0.5)
    sgd.set_parameters({"named": named})
    for w in (named, other):
        square(w).backward()
    sgd.zero_grad()
    assert values(named.grad) == [0, 0] and not named.has_fresh_grad and named.name == "named"
    assert values(other.grad) == [4, -6] and other.has_fresh_grad
    square(named).backward()
    sgd.update_all([(named, named.grad)])
    sgd.step()
    assert values(named) == [0, 0] and values(named.grad) == [4, -6]


def test_a_compiled_model_names_its_parameters_and_a_frozen_one_has_nothing_to_zero():
    linear = layer.Linear(2)
    linear(Tensor((1, 2)))
    linear.b.requires_grad = False
    sgd = opt.Adam()
    sgd.prepare(linear.get_params(), {})
    square(linear.W).backward()
    sgd.zero_grad()
    assert not linear.W.has_fresh_grad and linear.b.grad is None


def test_a_dist_opt_zeroes_the_gradients_of_the_optimizer_it_wraps():
    w = parameter()
    sgd = opt.DistOpt(opt.SGD(), communicator=LocalCommunicator(World()))
    sgd.set_parameters({"w": w})
    square(w).backward()
    sgd.zero_grad()
    assert values(w.grad) == [0, 0] and not w.has_fresh_grad


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({}, OptionError, "SGD: set_parameters needs parameters by name, such as model.get_params"),
        ([parameter], OptionError, "SGD: set_parameters needs parameters by name"),
        ({"w": np.ones(2)}, DTypeError, "w must be a Tensor, not ndarray"),
    ],
)
def test_set_parameters_raises_for_what_are_no_parameters(params, error, message):
    sgd = opt.SGD()
    with pytest.raises(error, match=message):
        sgd.set_parameters(params)
    with pytest.raises(OptionError, match="zero_grad knows no parameters; call set_parameters"):
        sgd.zero_grad()


def test_dy_on_another_device_raises():
    w, dy = parameter(), Tensor((2,), Device("cpu", 1, CpuBackend()))
    with pytest.raises(DeviceError, match="dy and y"):
        recorded(w).backward(dy)
