# SPDX-License-Identifier: Apache-2.0
"""EnableGraph, RunGraph and ResetGraph of a device: a replay is what the script would compute, or an error."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.device import Device
from singa_lite.errors import GraphError
from singa_lite.tensor import Tensor, to_numpy
from tests.limits import LIMIT_S

pytestmark = pytest.mark.usefixtures("training")
RNG = np.random.default_rng(4)
X, Y = RNG.standard_normal((5, 8, 3)).astype("f"), RNG.integers(0, 4, (5, 8)).astype("i4")


class Net(layer.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer.Linear(6), layer.Linear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(autograd.relu(self.first(x)))


def trained(where: Device, use_graph: bool, optimizer: opt.Optimizer) -> tuple[list[float], list[np.ndarray]]:
    """Losses and parameters of five steps, the second one recorded if asked."""
    where.SetRandSeed(3)
    net, losses = Net(), []
    x, y = Tensor(data=X[0], device=where), Tensor(data=Y[0], device=where)
    net(x)
    loss = None
    for number in range(5):
        x.copy_from_numpy(X[number])
        y.copy_from_numpy(Y[number])
        if use_graph and number > 1:
            where.RunGraph()
        else:
            if use_graph and number == 1:
                where.EnableGraph(True)
                assert where.graph_enabled()
            loss = autograd.softmax_cross_entropy(net(x), y)
            optimizer(loss)
            where.EnableGraph(False)
        assert loss is not None and not where.graph_enabled()
        losses.append(loss.item())
    where.ResetGraph()
    return losses, [to_numpy(param) for param in net.get_params().values()]


@pytest.mark.parametrize("make", [lambda: opt.SGD(lr=0.1, momentum=0.9), lambda: opt.Adam(lr=0.01)])
@pytest.mark.parametrize("is_distributed", [False, True])
def test_replays_train_as_the_script_does(device: Device, make, is_distributed: bool) -> None:
    results = []
    for use_graph in (False, True):
        optimizer = opt.DistOpt(make()) if is_distributed else make()
        results.append(trained(device, use_graph, optimizer))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    for eager, replayed in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_allclose(replayed, eager, rtol=1e-4, atol=1e-6)


def test_a_replay_draws_new_random_numbers(device: Device) -> None:
    x = Tensor((100,)).set_value(1.0)
    device.EnableGraph(True)
    y = autograd.dropout(x, 0.5)
    device.EnableGraph(False)
    first = to_numpy(y)
    device.RunGraph(serial=True)
    assert (to_numpy(y) != first).any() and set(np.unique(to_numpy(y))) <= {0.0, 2.0}
    device.ResetGraph()


def test_what_cannot_be_replayed_is_an_error_that_says_why(device: Device) -> None:
    x = Tensor((3,)).set_value(1.0)
    with pytest.raises(GraphError, match="nothing was recorded"):
        device.RunGraph()
    device.EnableGraph(True)
    with pytest.raises(GraphError, match="EnableGraph\\(False\\) first"):
        device.RunGraph()
    with pytest.raises(GraphError, match="EnableGraph\\(False\\) first"):
        device.ResetGraph()
    assert to_numpy(x)[0] == 1
    device.EnableGraph(False)
    with pytest.raises(GraphError, match="reads values on the host"):
        device.RunGraph()
    device.ResetGraph()
    with pytest.raises(GraphError, match="nothing was recorded"):
        device.RunGraph()


REPLACES = {
    "data": lambda x: setattr(x, "data", x.clone().data),
    "to_type": lambda x: x.to_type("float64"),
    "reset_like": lambda x: x.reset_like(Tensor((3,))),
}


@pytest.mark.parametrize("kind", REPLACES)
@pytest.mark.parametrize("is_recording", [False, True])
def test_a_tensor_whose_array_was_replaced_is_an_error(device: Device, kind: str, is_recording: bool) -> None:
    x, other = Tensor((3,)).set_value(1.0), Tensor((3,))
    device.EnableGraph(True)
    y = x * 3.0
    if is_recording:
        REPLACES[kind](x)
    device.EnableGraph(False)
    if not is_recording:
        REPLACES[kind](other)  # of which the graph knows nothing
        x.data = x.data
        x.set_value(2.0)
        device.RunGraph()
        assert to_numpy(y).tolist() == [6, 6, 6]
        REPLACES[kind](x)
    with pytest.raises(GraphError, match=r"(replaces|reads) Tensor\.data|has another array since"):
        device.RunGraph()
    device.ResetGraph()


def test_a_thread_ends_only_what_it_has_started(device: Device) -> None:
    device.EnableGraph(True)
    errors = []

    def end() -> None:
        try:
            device.EnableGraph(False)
        except GraphError as error:
            errors.append(error)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join(LIMIT_S)
    device.EnableGraph(False)
    device.ResetGraph()
    assert len(errors) == 1 and "in the thread that called" in str(errors[0])


def test_a_thread_that_has_ended_records_no_more(device: Device) -> None:
    thread = threading.Thread(target=device.EnableGraph, args=(True,))
    thread.start()
    thread.join(LIMIT_S)
    assert not device.graph_enabled()
    x = Tensor((2,), device)
    device.EnableGraph(True)
    y = x + 1.0
    device.EnableGraph(False)
    x.set_value(3.0)
    device.RunGraph()
    device.ResetGraph()
    assert to_numpy(y).tolist() == [4, 4]


def test_a_second_thread_cannot_record_on_a_device(device: Device) -> None:
    errors = []

    def record() -> None:
        try:
            device.EnableGraph(True)
        except GraphError as error:
            errors.append(str(error))

    device.EnableGraph(True)
    thread = threading.Thread(target=record)
    thread.start()
    thread.join(LIMIT_S)
    device.EnableGraph(False)
    device.ResetGraph()
    assert errors == ["EnableGraph: another thread records; call EnableGraph(False) there first"]


def test_a_model_that_records_by_itself_refuses(device: Device) -> None:
    class Recording(model.Model):
        def __init__(self) -> None:
            super().__init__()
            self.linear = layer.Linear(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

        def train_one_batch(self, x: Tensor) -> Tensor:
            device.EnableGraph(True)
            return self.forward(x)

    net, x = Recording(), Tensor((2, 3))
    net.compile([x], use_graph=True)
    with pytest.raises(GraphError, match="records a step already"):
        net(x)
