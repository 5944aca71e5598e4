# SPDX-License-Identifier: Apache-2.0
"""What a step may do that a replay could freeze, forget or compute in the wrong order of memory."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.config import state, this_thread
from singa_lite.device import get_default_device
from singa_lite.tensor import Tensor, from_numpy, to_numpy


class Net(model.Model):
    """A subclass writes ``features``; images (16, 8, 8) to five classes."""

    def __init__(self):
        super().__init__()
        self.conv, self.other = layer.Conv2d(16, 3, padding=1), layer.Conv2d(16, 3, padding=1)
        self.norm, self.linear, self.head = layer.BatchNorm2d(), layer.Linear(32), layer.Linear(5)
        self.loss = layer.SoftMaxCrossEntropy()

    def features(self, x):
        return autograd.relu(self.norm(self.conv(x)))

    def forward(self, x):
        return self.head(autograd.flatten(self.features(x)))

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss)
        return out, loss


def batch(step):
    rng = np.random.default_rng(step)
    return from_numpy(rng.standard_normal((4, 16, 8, 8)).astype(np.float32)), from_numpy(
        rng.integers(0, 5, 4)
    )


def trained(make, use_graph, between=lambda net, step: None, steps=3, lr=0.05):
    get_default_device().SetRandSeed(3)
    net = make()
    net.set_optimizer(opt.SGD(lr=lr, momentum=0.9))
    net.compile([batch(0)[0]], use_graph=use_graph)
    losses = []
    for step in range(steps):
        between(net, step)
        losses.append(to_numpy(net(*batch(step))[-1]).item())
    autograd.training = False
    return losses, {name: to_numpy(value) for name, value in net.get_states().items()}, net


def assert_alike(make, **options):
    """Both modes agree; the model that was recorded."""
    eager, graph = (trained(make, use_graph, **options) for use_graph in (False, True))
    np.testing.assert_allclose(graph[0], eager[0], rtol=1e-4)
    assert graph[1].keys() == eager[1].keys()
    for name, value in eager[1].items():
        np.testing.assert_allclose(graph[1][name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    return graph[2]


def reshaped_image(net, x):
    return net.norm(autograd.relu(autograd.reshape(net.conv(x), (4, 32, 4, 8))))


def reshaped_pixels(net, x):
    return net.other(autograd.reshape(autograd.max_pool_2d(autograd.relu(net.conv(x)), 8), (4, 4, 2, 2)))


def product_of_matrices(net, x):
    matrices = autograd.reshape(net.linear(autograd.flatten(x)), (4, 2, 4, 4))
    return autograd.relu(autograd.matmul(matrices, matrices))


def row_behind_a_reshape(net, x):
    matrices = autograd.reshape(net.linear(autograd.flatten(x)), (4, 8, 4))
    products = autograd.matmul(matrices, autograd.transpose(matrices, (0, 2, 1)))
    row = autograd.reduce_mean(x, (0, 1, 2), 0)
    return autograd.reshape(autograd.reshape(products, (32, 8)) + row, (4, 64))


def times_a_number(net, x):
    return autograd.relu(net.conv(x) * 0.5)


def of_repeated_parts(net, x):
    return net.conv(x.repeat([2, *[1] * 15], 1))


FEATURES = [
    reshaped_image,
    reshaped_pixels,
    product_of_matrices,
    row_behind_a_reshape,
    times_a_number,
    of_repeated_parts,
]


@pytest.mark.parametrize("features", FEATURES, ids=lambda features: features.__name__)
def test_what_is_read_in_another_shape_than_it_was_made_in(features):
    net = assert_alike(type("Reshaping", (Net,), {"features": features}))
    assert net.graph_info()[0].break_reason is None


def test_an_update_between_two_losses_changes_no_gradient_of_a_relu():
    class TwoUpdates(Net):
        def train_one_batch(self, x, y):
            images = x, autograd.mul(x, x)
            losses = [autograd.reduce_mean(autograd.relu(self.conv(each)), None, 0) for each in images]
            for loss in losses:
                self.optimizer(loss)
            return losses

    assert assert_alike(TwoUpdates, steps=2, lr=0.5).graph_info()[0].break_reason is None


@pytest.mark.parametrize("is_backward", [False, True])
def test_an_operator_that_computes_in_numpy_is_not_frozen(is_backward):
    class Shifted(autograd.Operator):
        is_recordable = True  # which is wrong

        def forward(self, context, *inputs):
            return inputs[0] if is_backward else np.sin(inputs[0])

        def backward(self, context, *dys):
            return np.sin(dys[0]) if is_backward else dys[0]

    class Mixed(Net):
        def features(self, x):
            return Shifted()(self.conv(x))

    assert "outside of the backend" in assert_alike(Mixed).graph_info()[0].break_reason


@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[::-1], lambda x: x[:, ::-1]])
def test_an_operator_may_return_a_view_that_is_not_row_major(view):
    class Viewed(autograd.Operator):
        is_recordable = True

        def forward(self, context, *inputs):
            return view(inputs[0])

        def backward(self, context, *dys):
            return view(dys[0])  # each is its own inverse

    class Mixed(Net):
        def features(self, x):
            square = autograd.reshape(self.linear(autograd.flatten(x)), (4, 32))
            square = autograd.matmul(square, autograd.transpose(square, (1, 0)))
            return autograd.relu(autograd.matmul(Viewed()(square), Viewed()(autograd.relu(square))))

    assert assert_alike(Mixed).graph_info()[0].break_reason is None


def test_a_gradient_that_numpy_computes_under_autocast_is_not_frozen():
    class Half(autograd.Operator):
        autocast = "float32"
        is_recordable = True  # which is wrong

        def forward(self, context, *inputs):
            return inputs[0]

        def backward(self, context, *dys):
            return dys[0] / 2

    class Mixed(Net):
        def features(self, x):
            with autograd.autocast("bf16"):
                return Half()(self.conv(x))

    assert "outside of the backend" in assert_alike(Mixed).graph_info()[0].break_reason


COPIES = {
    "deepcopy": lambda net, x: copy.deepcopy(x),
    "copy": lambda net, x: copy.copy(x),
    "pickle": lambda net, x: pickle.loads(pickle.dumps(x)),
    "deepcopy of a list": lambda net, x: copy.deepcopy([x])[0],
    "deepcopy of the model": lambda net, x: x * (1.0 + len(copy.deepcopy(net).get_params())),
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_tensor_that_python_copies_is_not_frozen(kind):
    class Copies(Net):
        def features(self, x):
            return super().features(COPIES[kind](self, x))

    assert "Python's copy or pickle" in assert_alike(Copies).graph_info()[0].break_reason


def test_a_tensor_put_aside_holds_the_values_of_the_last_step():
    class Keeping(Net):
        def features(self, x):
            self.seen = self.conv(x)
            return self.seen

    eager, graph = (to_numpy(trained(Keeping, use_graph)[2].seen) for use_graph in (False, True))
    np.testing.assert_allclose(graph, eager, rtol=1e-4, atol=1e-5)


def test_statistics_of_a_layer_outside_of_the_model_move():
    means = []
    for use_graph in (False, True):
        hidden = layer.BatchNorm2d()
        trained(
            type("Hiding", (Net,), {"features": lambda net, x, norm=hidden: norm(net.conv(x))}), use_graph
        )
        means.append(to_numpy(hidden.running_mean))
    np.testing.assert_allclose(*means, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flag", ["stores_grad", "requires_grad"])
def test_a_parameter_may_be_frozen_and_melted_between_steps(flag):
    def between(net, step):
        setattr(net.conv.W, flag, not 2 <= step < 4)

    assert_alike(Net, between=between, steps=6)


SCALE = Tensor((1,))  # replaced by tests


class WithScale:
    scale = SCALE


def read_from(held):
    return lambda: held.scale


def in_layer(scale):
    outside = layer.Layer()
    outside.scale = scale
    return outside


OUTSIDE = {
    "global": lambda scale: lambda: SCALE,
    "class": lambda scale: lambda: WithScale.scale,
    "closure": lambda scale: lambda: scale,
    "object": lambda scale: read_from(SimpleNamespace(scale=scale)),
    "layer": lambda scale: read_from(in_layer(scale)),
}


def scaling(kind):
    """A model that trains a Tensor outside of it, and what the Tensor was after each step."""
    global SCALE
    SCALE = WithScale.scale = Tensor(data=np.ones(1), stores_grad=True, name="scale")
    read = OUTSIDE[kind](SCALE)

    class Scales(Net):
        def features(self, x):
            return super().features(x) * read()

    return Scales()


@pytest.mark.parametrize("flag", ["stores_grad", "requires_grad"])
@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_tensor_outside_of_the_model_may_be_frozen_and_melted_between_steps(kind, flag):
    seen = []

    def between(net, step):
        setattr(SCALE, flag, not 2 <= step < 4)
        seen.append(to_numpy(SCALE).item())

    net = assert_alike(lambda: scaling(kind), between=between, steps=7)
    np.testing.assert_allclose(seen[7:], seen[:7], rtol=1e-4)
    assert seen[2] == seen[3] == seen[4] != seen[1], seen
    assert [info.break_reason for info in net.graph_info()] == [None, None]


def test_a_layer_outside_of_the_model_may_be_frozen_and_melted_between_steps():
    hidden, seen = None, []

    class Hiding(Net):
        def features(self, x):
            return hidden(super().features(x))

    def make():
        nonlocal hidden
        hidden = layer.BatchNorm2d()
        return Hiding()

    def between(net, step):
        for tensor in hidden.get_params().values():
            tensor.requires_grad = not 2 <= step < 4
        seen.append(to_numpy(hidden.get_params()["scale"]))

    net = assert_alike(make, between=between, steps=6)
    np.testing.assert_allclose(seen[6:], seen[:6], rtol=1e-4)
    assert [info.break_reason for info in net.graph_info()] == [None, None]


class HasScale(Net):
    def __init__(self):
        super().__init__()
        self.scale = Tensor(data=np.ones(1), name="scale")


SWITCHED = {
    "it changes the global variable SCALE": lambda net: SCALE,
    "of a tensor in scale": lambda net: net.scale,
}


@pytest.mark.parametrize("reason", SWITCHED)
@pytest.mark.parametrize("flag", ["stores_grad", "requires_grad"])
def test_a_step_that_freezes_and_melts_a_tensor_runs_eagerly_and_says_so(flag, reason):
    seen = []

    class Switches(HasScale):
        def features(self, x):
            scale = SWITCHED[reason](self)
            setattr(scale, flag, not getattr(scale, flag))
            return super().features(x) * scale

    def make():
        global SCALE
        SCALE = Tensor(data=np.ones(1), name="scale")
        return Switches()

    def between(net, step):
        seen.append(to_numpy(SWITCHED[reason](net)).item())

    net = assert_alike(make, between=between, steps=7)
    np.testing.assert_allclose(seen[7:], seen[:7], rtol=1e-4)
    (info,) = net.graph_info()
    assert reason in info.break_reason


def test_an_optimizer_that_is_assigned_is_the_one_that_updates():
    def between(net, step):
        if step == 2:
            net.optimizer = opt.SGD(lr=0.0)

    assert_alike(Net, between=between, steps=4)


def test_another_thread_is_no_part_of_a_recorded_step():
    class Disturbed(Net):
        def features(self, x):
            thread = threading.Thread(target=lambda: to_numpy(Tensor(data=np.ones(3)) * 2))
            thread.start()
            thread.join()
            return super().features(x)

    assert assert_alike(Disturbed).graph_info()[0].break_reason is None
    assert this_thread.recorder is None
    assert not state.recorders


def in_thread(function, *arguments):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def average_of(net):
    net.average *= 0.9
    net.average += net.conv.b


COUNTED = Tensor((1,))


def count(tensor):
    tensor += 1.0


THREADS = {
    "makes a part of the input": lambda net, x: x * in_thread(lambda: x * 0.5),
    "makes a constant": lambda net, x: x * in_thread(lambda: from_numpy(np.float32([1 + net.conv.b.size()]))),
    "sets a parameter before it is used": lambda net, x: (in_thread(net.head.b.set_value, 0.5), x)[1],
    "sets a parameter after it was used": lambda net, x: (in_thread(net.conv.b.set_value, 0.5), x)[1],
    "averages a parameter before it is used": lambda net, x: (in_thread(average_of, net), x)[1],
    "reads a value": lambda net, x: x * in_thread(lambda: (x * x).l2()),
    "runs a model": lambda net, x: in_thread(net.conv.forward, x),
    "counts in an attribute that the step does not use": lambda net, x: (in_thread(count, net.average), x)[1],
    "counts in a global that the step does not use": lambda net, x: (in_thread(count, COUNTED), x)[1],
}


@pytest.mark.parametrize("kind", THREADS)
def test_what_a_step_does_in_another_thread_is_not_frozen(kind):
    class Threaded(Net):
        def __init__(self):
            super().__init__()
            self.average = Tensor((16,))
            self.average.set_value(0)

        def features(self, x):
            if "before" in kind:
                return super().features(THREADS[kind](self, x) if self.head._is_initialized else x)
            return self.norm(THREADS[kind](self, autograd.relu(self.conv(x))))

    COUNTED.set_value(0)
    net = assert_alike(Threaded, steps=6)
    assert to_numpy(COUNTED)[0] == (14 if "global" in kind else 0)  # compile runs it too
    assert "another thread" in net.graph_info()[0].break_reason
    assert not state.recorders


def test_what_the_host_does_in_another_thread_is_done_at_every_replay():
    class Applies(opt.Optimizer):
        def apply(self, name, value, grad):
            in_thread(value.__isub__, grad * 0.05)

    def between(net, step):
        if step == 0:
            net.optimizer = Applies(0.1)

    assert assert_alike(Net, between=between).graph_info()[0].break_reason is None


def test_a_copy_of_a_recorded_model_trains_on_its_own():
    net = trained(Net, True)[2]
    twin = copy.deepcopy(net)
    assert twin.graph_info() == []
    before = {name: to_numpy(value).tobytes() for name, value in net.get_states().items()}
    twin.set_optimizer(opt.SGD(lr=0.1))
    twin.train()
    for step in range(3):
        twin(*batch(step))
    autograd.training = False
    assert {name: to_numpy(value).tobytes() for name, value in net.get_states().items()} == before


def test_profiles_of_records_that_are_gone_disturb_no_other(capsys):
    class Longer(Net):
        def features(self, x):
            return self.other(super().features(x))

    device = get_default_device()
    device.SetVerbosity(1)
    try:
        for number in range(6):
            trained((Net, Longer)[number % 2], True, steps=7)
        assert len(device.profile.entries) == 6
    finally:
        device.SetVerbosity(0)


@pytest.mark.parametrize("use_graph", [False, True])
def test_two_threads_train_a_model_each(use_graph):
    losses = trained(Net, use_graph, steps=8)[0]
    nets, seen = [], [[], []]
    for _ in seen:
        get_default_device().SetRandSeed(3)
        net = Net()
        net.set_optimizer(opt.SGD(lr=0.05, momentum=0.9))
        net.compile([batch(0)[0]], use_graph=use_graph)
        nets.append(net)

    def work(number):
        seen[number] += [to_numpy(nets[number](*batch(step))[1]).item() for step in range(8)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    autograd.training = False
    np.testing.assert_allclose(seen, [losses, losses], rtol=1e-4)
    assert all(info.break_reason is None for net in nets for info in net.graph_info())
