# SPDX-License-Identifier: Apache-2.0
"""Steps captured as CUDA graphs do what eager steps do, and start nothing else."""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.comm.base import Communicator, Operation, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.config import state
from singa_lite.errors import CommError, GraphError
from singa_lite.graph.nodes import Collective, Flight, Host, Kernel, Scalar, Wait
from singa_lite.opt.schedule import as_schedule
from singa_lite.record import records
from singa_lite.tensor import Tensor, to_numpy
from tests.devices import cuda_device, no_gpu

OPTIONS = ["fp32", "fp16", "partialUpdate", "sparseTopK", "sparseThreshold"]
pytestmark = [] if no_gpu() else [pytest.mark.gpu]


class Net(model.Model):
    """A perceptron with a branch, dropout and softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = layer.Linear(13), layer.Linear(13), layer.Linear(5)
        self.relu, self.dropout = layer.ReLU(), layer.Dropout(0.3)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first(x))
        return self.third(self.dropout(y) + self.relu(self.second(y)))

    def train_one_batch(self, x: Tensor, y: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss, *options)
        return out, loss


class Images(Net):
    """Convolution, batch norm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = (
            layer.Conv2d(4, 3, padding=1),
            layer.BatchNorm2d(),
            layer.MaxPool2d(2),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.reshape(x, (x.shape[0], 1, 6, 6))
        y = self.pool(self.relu(self.norm(self.conv(y))))
        return super().forward(autograd.reshape(y, (x.shape[0], 36)))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield cuda_device(monkeypatch)
    autograd.training = False


def batch(device: Any, step: int, size: int = 6) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(step)
    x = rng.standard_normal((size, 36)).astype(np.float32)
    return Tensor(data=x, device=device), Tensor(
        data=rng.integers(0, 5, size).astype(np.int32), device=device
    )


def compiled(device: Any, use_graph: bool, optimizer: Any, make: type[Net] = Net) -> Net:
    device.SetRandSeed(3)
    net = make()
    net.set_optimizer(optimizer)
    net.compile([batch(device, 0)[0]], use_graph=use_graph)
    device.SetRandSeed(8)
    return net


def distributed(sgd: Any = None, **arguments: Any) -> opt.DistOpt:
    sgd = sgd or opt.SGD(lr=opt.ExponentialDecay(0.1, 2, 0.7), momentum=0.9)
    return opt.DistOpt(sgd, communicator=LocalCommunicator(World()), threshold=60, **arguments)


def trained(net: Net, device: Any, steps: Any, *options: Any) -> list[bytes]:
    """Outputs and losses of the steps, then the parameters."""
    seen = []
    for step in steps:
        seen += [to_numpy(value).tobytes() for value in net(*batch(device, step), *options)]
    return seen + [to_numpy(value).tobytes() for value in net.get_states().values()]


def graphs(net: Net) -> list[Any]:
    """The CUDA graphs of the model's records."""
    found = [record for kind in net._records._kinds.values() for record in reversed(kind.records)]
    parts = [part for record in found for part in record._replay_nodes if hasattr(part, "num_launches")]
    return [part for part in parts if part._graph is not None]


def test_a_step_is_recorded_when_its_backward_pass_is_the_first_to_need_so_much_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = cuda_device(monkeypatch)
    monkeypatch.setitem(vars(device.backend), "_workspaces", [[] for _ in device.backend.streams.all])
    monkeypatch.setitem(vars(device.backend), "_plans", {})
    net = compiled(device, True, opt.SGD(lr=0.1), Images)
    trained(net, device, range(4))
    autograd.training = False
    assert [info.break_reason for info in net.graph_info()] == [None] and graphs(net)


@pytest.mark.parametrize("option", OPTIONS)
def test_captured_steps_equal_eager_ones_bit_for_bit(device: Any, option: str) -> None:
    eager, graph = (compiled(device, use_graph, distributed()) for use_graph in (False, True))
    expected = None
    for net in (eager, graph):
        device.SetRandSeed(8)
        seen = trained(net, device, range(9), option)
        expected = expected or seen
        assert seen == expected
    assert eager.optimizer.get_states().keys() == graph.optimizer.get_states().keys()
    for name, value in eager.optimizer.get_states().items():
        assert value.tobytes() == graph.optimizer.get_states()[name].tobytes(), name
    # one on each side of the count; of the chunks only the first comes a third time
    assert len(graphs(graph)) == (2 if option == "sparseThreshold" else 1)
    assert all(found.num_launches == (1 if option == "partialUpdate" else 7) for found in graphs(graph))


def test_gradients_without_padding_between_them_equal_eager_ones_bit_for_bit(device: Any) -> None:
    """All travel in one group, where most begin at no multiple of 16 bytes: there cuBLAS would add in another order."""
    seen = []
    for use_graph in (False, True):
        sgd = opt.SGD(lr=0.1, momentum=0.9)
        net = compiled(device, use_graph, opt.DistOpt(sgd, communicator=LocalCommunicator(World())))
        device.SetRandSeed(8)
        seen.append(trained(net, device, range(5), "sparseTopK", 1.0))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("use_graph", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_the_host_waits_for_the_device_once_a_step_and_only_for_the_thresholds_counts(
    device: Any, monkeypatch: Any, option: str, use_graph: bool
) -> None:
    net = compiled(device, use_graph, distributed(bucket_bytes=200))
    trained(net, device, range(2), option)
    x, y = batch(device, 3)
    waits: list[str] = []
    for name in ("to_numpy", "synchronize"):
        wait = getattr(device.backend, name)
        monkeypatch.setattr(
            device.backend, name, lambda *a, name=name, wait=wait: (waits.append(name), wait(*a))[1]
        )
    launch, launches = device.backend.launch, []
    monkeypatch.setattr(
        device.backend, "launch", lambda *a: (launches.append(len(waits)) if waits else None, launch(*a))[1]
    )
    net(x, y, option)
    # of all groups before any goes on
    num_groups = 4
    assert waits == (["to_numpy", "synchronize"] * num_groups if option == "sparseThreshold" else [])
    assert set(launches) == ({2 * num_groups} if option == "sparseThreshold" else set())


@pytest.mark.parametrize("has_norm", [False, True])
def test_captured_convolutions_equal_eager_ones_in_fewer_kernels(device: Any, has_norm: bool) -> None:
    seen = []
    for use_graph in (False, True):
        net = compiled(device, use_graph, distributed(), Images)
        net.norm.forward = net.norm.forward if has_norm else lambda x: x
        seen.append(trained(net, device, range(6)))
    assert seen[0] == seen[1] and graphs(net)[0].num_launches == 4
    calls = graphs(net)[0]._nodes
    assert sum(call.name == "relu" for call in calls) == has_norm
    assert sum(call.name == "add" and "relu" in call.attributes for call in calls) == 3 - has_norm


class Residual(Net):
    """Blocks of convolutions without bias, batch norm, both poolings, a sum; 16 and 8 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (layer.Conv2d(16, 3, padding=1, bias=False) for _ in range(2))
        self.conv3 = layer.Conv2d(8, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = (layer.BatchNorm2d() for _ in range(3))
        self.max_pool, self.avg_pool = layer.MaxPool2d(3, 2, padding=1), layer.AvgPool2d(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.reshape(x, (x.shape[0], 1, 6, 6))
        y = self.max_pool(self.relu(self.norm1(self.conv1(y))))
        y = self.relu(self.norm2(self.conv2(y)) + y)
        y = self.avg_pool(self.norm3(self.conv3(y)))
        return super().forward(autograd.reshape(y, (x.shape[0], -1)))


class Bottleneck(Net):
    """Filters of one pixel before and behind one of 3 x 3, and beside them with a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv3 = (layer.Conv2d(8 * n, 1, bias=False) for n in (2, 1))
        self.conv2 = layer.Conv2d(16, 3, stride=2, padding=1, bias=False)
        self.shortcut = layer.Conv2d(8, 1, stride=2, bias=False)
        self.norm1, self.norm2, self.norm3 = (layer.BatchNorm2d() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(autograd.reshape(x, (x.shape[0], 1, 6, 6))))
        y = self.norm3(self.conv3(self.norm2(self.conv2(self.relu(x)))))
        y = self.relu(y + self.shortcut(x))
        return super().forward(autograd.reshape(y, (y.shape[0], -1)))


def with_and_without_formats(
    device: Any, monkeypatch: Any, make: type[Net], dtype: str, tolerance: float
) -> list[Kernel]:
    """Train with images row-major and as they are chosen, compare all numbers, and return the second step's kernels."""
    results = []
    for is_chosen in (False, True):
        with monkeypatch.context() as patched:
            if not is_chosen:
                patched.setattr(sys.modules[type(device.backend).__module__], "preferred_formats", no_formats)
            net = make()
            net.set_optimizer(opt.SGD(lr=0.1, momentum=0.9))
            device.SetRandSeed(3)
            inputs = [batch(device, step) for step in range(5)]
            net.compile([inputs[0][0].as_type(dtype)], use_graph=True)
            device.SetRandSeed(8)
            seen = [to_numpy(net(x.as_type(dtype), y)[1]) for x, y in inputs]
        results.append([*seen, *map(to_numpy, net.get_states().values())])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)
    [graph] = graphs(net)
    return graph._nodes


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_channels_come_last_where_tensor_cores_work(device: Any, monkeypatch: Any, dtype: str) -> None:
    monkeypatch.setattr(state, "allow_tf32", dtype == "float32")
    tolerance = {"float16": 2e-2, "float32": 1e-2 if not no_gpu() else 1e-5}[dtype]
    calls = with_and_without_formats(device, monkeypatch, Residual, dtype, tolerance)
    formats = [call.attributes["memory_formats"] for call in calls if "conv2d" in call.name]
    assert formats == [(1, 16), (16, 16), (16, 8), (16, 8), (16, 8), (16, 16), (16, 16), (1, 16)]
    assert sum(call.name == "reorder" for call in calls) == 2  # an image that becomes a row, and its gradient


def test_channels_come_last_where_a_convolution_is_a_product(device: Any, monkeypatch: Any) -> None:
    calls = with_and_without_formats(device, monkeypatch, Bottleneck, "float32", 1e-4)
    formats = [call.attributes.get("memory_formats") for call in calls if "conv2d" in call.name]
    forward, backward = (
        [(1, 16), None, (1, 8), (16, 8)],
        [(16, 8), (16, 8), (1, 8), (16, 8), None, None, (1, 16)],
    )
    assert formats == forward + backward
    # two for the row, three around filters of 3 x 3
    assert sum(call.name == "reorder" for call in calls) == 5


def no_formats(*arguments: Any, **geometry: Any) -> None:
    """No channels last."""


@pytest.mark.parametrize("make", [lambda: opt.Adam(lr=0.01), lambda: distributed(opt.Adam(lr=0.01))])
def test_adam_counts_its_steps_in_a_graph(device: Any, make: Any) -> None:
    seen = [trained(compiled(device, use_graph, make()), device, range(6)) for use_graph in (False, True)]
    assert seen[0] == seen[1]


def test_a_replay_starts_one_graph_and_nothing_for_each_kernel(device: Any, monkeypatch: Any) -> None:
    net = compiled(device, True, distributed(opt.SGD(lr=0.1)))
    trained(net, device, range(3))
    [graph] = graphs(net)
    launches: list[str] = []
    backend = device.backend
    launch = backend.launch

    def listen(name: str, *arguments: Any) -> None:
        launches.append(name)
        launch(name, *arguments)

    monkeypatch.setattr(backend, "launch", listen)
    x, y = batch(device, 5)
    net(x, y)
    assert launches == ["store.store"]  # dropout's numbers; inputs and results are plain copies
    assert sum(isinstance(node, Kernel) for node in graph._nodes) > 20


def test_numbers_that_stay_are_not_stored_again(device: Any, monkeypatch: Any) -> None:
    net = compiled(device, True, distributed(opt.SGD(lr=0.1)))
    net.dropout.ratio = 0.0
    net.forward = lambda x: net.third(net.first(x))  # type: ignore[method-assign]
    trained(net, device, range(3))
    launches: list[str] = []
    launch = device.backend.launch
    monkeypatch.setattr(
        device.backend, "launch", lambda name, *a: (launches.append(name), launch(name, *a))[1]
    )
    trained(net, device, [3])
    net.optimizer.lr = 0.2
    trained(net, device, [3, 3])
    assert launches == ["store.store"]


def test_optimizer_states_that_were_set_are_what_a_graph_goes_on_from(device: Any) -> None:
    for option in OPTIONS:
        seen = []
        for use_graph in (False, True):
            net = compiled(device, use_graph, distributed())
            trained(net, device, range(3), option)
            states = net.optimizer.get_states()
            trained(net, device, [7], option)
            net.optimizer.set_states(states)
            seen.append(trained(net, device, range(3, 6), option))
        assert seen[0] == seen[1], option


class TwoHeads(Net):
    """Uses one or the other of two last layers."""

    def __init__(self) -> None:
        super().__init__()
        self.other = layer.Linear(5)

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        y = self.relu(self.first(x))
        y = self.dropout(y) + self.relu(self.second(y))
        return (self.other if head else self.third)(y)

    def train_one_batch(self, x: Tensor, y: Tensor, head: int, option: str) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out = self.forward(x, head)
        loss = self.loss(out, y)
        self.optimizer(loss, option, 0.03)
        return out, loss


@pytest.mark.parametrize("option", ["sparseTopK", "sparseThreshold"])
def test_residuals_go_from_graph_to_graph_with_their_parameters(device: Any, option: str) -> None:
    seen = []
    for use_graph in (False, True):
        net = compiled(device, use_graph, distributed(opt.SGD(lr=0.1)), TwoHeads)
        heads = [0, 1] * 4 + [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
        seen.append(
            [
                to_numpy(net(*batch(device, step), head, option)[1]).tobytes()
                for step, head in enumerate(heads)
            ]
        )
        seen[-1] += [to_numpy(value).tobytes() for value in net.get_states().values()]
    assert seen[0] == seen[1]
    assert sum(graph.num_launches for graph in graphs(net)) > 6


def test_a_schedule_of_spars_gets_graphs_of_its_own(device: Any) -> None:
    seen = []
    for use_graph in (False, True):
        net = compiled(
            device, use_graph, distributed(spars=opt.ExponentialDecay(0.5, 3, 0.5, staircase=True))
        )
        seen.append(trained(net, device, range(8), "sparseTopK"))
    assert seen[0] == seen[1] and len(graphs(net)) == 2  # the last kind's third step was not reached


def test_a_changed_option_of_the_optimizer_is_captured_again(device: Any) -> None:
    seen = []
    for use_graph in (False, True):
        net = compiled(device, use_graph, opt.Adam(lr=0.01))
        first = trained(net, device, range(3))
        net.optimizer.beta_1 = as_schedule("beta_1", 0.5)
        seen.append(first + trained(net, device, range(3, 6)))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("option", ["local", "partialUpdate", "sparseTopK"])
def test_what_one_optimizer_counts_is_not_counted_twice_where_another_changes(
    device: Any, option: str
) -> None:
    class TwoLosses(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = opt.Adam(lr=0.01)

        def train_one_batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            out = self.forward(x)
            loss = self.loss(out, y)
            self.optimizer(loss, *([] if option == "local" else [option]))
            self.other(self.loss(self.forward(x * x), y))
            return out, loss

    seen = []
    for use_graph in (False, True):
        adam = opt.Adam(lr=opt.ExponentialDecay(0.1, 2, 0.7))
        net = compiled(device, use_graph, adam if option == "local" else distributed(adam), TwoLosses)
        seen.append(trained(net, device, range(4)))
        net.other.beta_1 = opt.ExponentialDecay(0.9, 1, 0.9)  # from here on every step is another one
        seen[-1] += trained(net, device, range(4, 9))
        assert adam.step_counter == net.other.step_counter == 9
    assert seen[0] == seen[1]


@pytest.mark.parametrize("method", ["update_all", "apply"])
@pytest.mark.parametrize("option", ["fp32", "sparseTopK"])
def test_an_optimizer_that_a_user_wrote_runs_between_two_graphs(
    device: Any, method: str, option: str
) -> None:
    """Its Python reads values, draws noise and counts, once a step."""

    def work(self: Any, param: Tensor, grad: Tensor) -> None:
        self.seen = getattr(self, "seen", 0) + float(to_numpy(grad).sum() > 0)
        noise = Tensor(param.shape, param.device)
        noise.gaussian(0.0, 0.01)
        param -= (grad + noise) * self.lr(self.step_counter) * (1 + self.seen)

    class UpdatesAll(opt.SGD):
        def update_all(self, pairs: Any) -> None:
            for param, grad in pairs:
                work(self, param, grad)

    class Applies(opt.Optimizer):
        def apply(self, name: str, value: Tensor, grad: Tensor) -> None:
            work(self, value, grad)

    kind = UpdatesAll if method == "update_all" else Applies
    results = []
    for use_graph in (False, True):
        sgd = distributed(kind(lr=opt.ExponentialDecay(0.1, 2, 0.7)))
        net = compiled(device, use_graph, sgd)
        results.append((trained(net, device, range(8), option), device.get_random_state(), sgd.step_counter))
    assert results[0] == results[1]
    assert len(graphs(net)) == 1 and graphs(net)[0].num_launches == 6


def test_graphs_on_cuda_agree_with_graphs_on_the_cpu(device: Any, monkeypatch: Any) -> None:
    from singa_lite.device import get_default_device

    losses = []
    for where in (get_default_device(), device):
        net = compiled(where, True, distributed())
        net.dropout.ratio = 0.0
        rng = np.random.default_rng(0)
        for value in net.get_states().values():
            value.copy_from_numpy(rng.standard_normal(value.shape).astype(np.float32) / 4)
        losses.append([float(to_numpy(net(*batch(where, step))[1])[0]) for step in range(20)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)


def nodes_of(device: Any, *kernels: Any) -> list[Kernel]:
    """Nodes that run (name, inputs, out, attributes) on real arrays."""
    return [
        Kernel(device.backend, name, inputs, out, attributes, "Forward")
        for name, inputs, out, attributes in kernels
    ]


def test_numbers_are_read_before_each_launch_in_the_order_of_the_tape(device: Any) -> None:
    backend = device.backend
    a, b = (backend.zeros((3,), "float32") for _ in range(2))
    seen: list[str] = []

    def read(name: str, value: float) -> float:
        seen.append(name)
        return value * len(seen)

    first, second = Scalar(lambda: read("first", 1.0)), Scalar(lambda: read("second", 10.0))
    grad = backend.asarray(np.ones(3, np.float32))
    one, other = nodes_of(
        device,
        ("sgd_update", (grad,), a, {"lr": first, "weight_decay": first}),
        ("sgd_update", (grad,), b, {"lr": second}),
    )
    seen.clear()
    [part] = backend.compile([one, Host(lambda: seen.append("count"), (), sees_arrays=False), other])
    expected = np.zeros(3, np.float32), np.zeros(3, np.float32)
    for step in range(5):
        seen.clear()
        part()
        assert seen in (["first", "count", "second"], ["first", "first", "count", "second"])
        reads = seen.count("first")  # one by one a number that is given twice is read twice
        decay = 1.0 * reads
        expected[0][...] -= 1.0 * (1 + decay * expected[0])
        expected[1][...] -= 10.0 * (reads + 2)
        np.testing.assert_allclose(backend.to_numpy(a), expected[0], rtol=1e-6, err_msg=str(step))
        np.testing.assert_allclose(backend.to_numpy(b), expected[1], rtol=1e-6)
    assert part.num_launches == 4


def test_a_graph_ends_before_python_that_sees_arrays(device: Any) -> None:
    backend = device.backend
    a = backend.zeros((3,), "float32")
    seen: list[float] = []
    nodes = nodes_of(device, ("fill", (), a, {"value": 1.0}), ("add", (a, a), a, {}))
    look = Host(lambda: seen.append(float(backend.to_numpy(a)[0])), (), sees_arrays=True)
    parts = backend.compile([nodes[0], look, nodes[1], look])
    for _ in range(4):
        for part in parts:
            part()
    assert seen == [1.0, 2.0] * 4
    assert [part.num_launches for part in parts if part is not look] == [3, 3]


@pytest.mark.skipif(not no_gpu(), reason="the stand-in runs a graph's work in an order that a test can see")
def test_work_that_others_wait_for_goes_first_in_a_graph(device: Any, monkeypatch: Any) -> None:
    """The priorities of the streams that the work was captured on are those of the graph's nodes."""
    backend = device.backend
    cupy = sys.modules["singa_lite.backend.cuda"].cupy  # type: ignore[attr-defined]
    order: list[str] = []
    launch = backend.launch

    def launch_and_note(name: str, *arguments: Any) -> None:
        launch(name, *arguments)
        stream = "computing" if backend.streams.number == 0 else "packing"
        cupy.cuda.do(lambda: order.append(stream))

    def pack_beside_computing() -> None:
        backend.run("fill", out=a, value=1.0)
        with backend.packing(a):
            for _ in range(3):
                backend.run("fill", out=b, value=2.0)
        for _ in range(6):
            backend.run("fill", out=a, value=3.0)

    a, b = backend.zeros((3,), "float32"), backend.zeros((3,), "float32")
    monkeypatch.setattr(backend, "launch", launch_and_note)
    executable = sys.modules["singa_lite.backend.cuda.executable"]
    backend.activate()
    executable.begin_capture(backend.stream)
    pack_beside_computing()
    backend.join()
    graph = executable.ExecutableGraph(backend.stream)
    by_priority = ["computing", *["packing"] * 3, *["computing"] * 6]
    count = 0
    for _ in range(20):
        order.clear()
        graph.launch(backend.stream)
        backend.synchronize()
        count += order == by_priority
    assert count >= 10  # every other launch of the stand-in follows priorities


def part_with_a_sum(device: Any, communicator: Communicator, a: Any) -> Any:
    """Return a part that fills ``a`` with ones and sums it over the ranks."""
    fill = nodes_of(device, ("fill", (), a, {"value": 1.0}))
    flight = Flight()
    reduce = Collective(communicator, Operation("all_reduce", "a", "sum"), (a,), a, flight)
    [part] = device.backend.compile([*fill, reduce, Wait(flight, (a,), a, None)])
    return part


def test_a_graph_is_not_launched_after_a_collective_has_failed(device: Any, monkeypatch: Any) -> None:
    """NCCL was aborted then, and what its kernels in the graph use is gone."""

    class Aborted:
        def check(self) -> None:
            raise CommError("rank 1 died")

    part = part_with_a_sum(device, LocalCommunicator(World()), device.backend.zeros((3,), "float32"))
    for _ in range(3):
        part()
    aborted = Aborted()
    monkeypatch.setattr(state, "gpu_communicators", (weakref.ref(aborted),))
    with pytest.raises(CommError, match="rank 1 died"):
        part()
    assert part.num_launches == 2


def test_a_graph_that_was_destroyed_is_never_launched_again(device: Any) -> None:
    """The communicator of its collectives has ended: the step runs kernel by kernel, and raises what that raises."""
    backend = device.backend
    a = backend.zeros((3,), "float32")
    followed: list[Any] = []

    class Followed(LocalCommunicator):
        def follow_graph(self, graph: Any, last: Any) -> Any:
            followed.append(graph)
            return lambda: followed.append("launch"), lambda: followed.append("launched")

    communicator = Followed(World())
    part = part_with_a_sum(device, communicator, a)
    for _ in range(3):
        part()
    assert followed == [part, "launch", "launched", "launch", "launched"]
    assert communicator.traffic.bytes_payload == 3 * 12  # a launch counts as much as a call
    part.destroy()
    backend.run("fill", out=a, value=-1.0)
    for _ in range(3):
        part()
    assert followed[5:] == [part, "launch", "launched", "launch", "launched"] and part.num_launches == 4
    assert backend.to_numpy(a)[0] == 1.0
    communicator.close()
    part.destroy()
    with pytest.raises(CommError, match="closed"):
        part()


def test_a_kernel_that_cannot_be_captured_leaves_the_step_uncaptured(device: Any, monkeypatch: Any) -> None:
    backend = device.backend
    a = backend.zeros((3,), "float32")
    fill = backend.fill

    def reads(**arguments: Any) -> None:
        fill(**arguments)
        backend.to_numpy(a)

    monkeypatch.setattr(backend, "fill", reads)
    [part] = backend.compile(nodes_of(device, ("fill", (), a, {"value": 1.0})))
    part()
    with pytest.warns(
        UserWarning, match="kernel by kernel from now on: .* reads values of the device"
    ) as caught:
        part()
    assert caught[0].filename == __file__
    for _ in range(3):  # no other warning: the tests make those errors
        part()
    assert part.num_launches == 0 and backend.capture is None
    assert backend.to_numpy(a)[0] == 1.0


def test_what_broke_a_capture_is_raised_not_that_it_is_broken(device: Any, monkeypatch: Any) -> None:
    backend = device.backend
    runtime = sys.modules["singa_lite.backend.cuda"].cupy.cuda.runtime  # type: ignore[attr-defined]
    end = runtime.streamEndCapture
    a = backend.zeros((3,), "float32")
    fill = backend.fill

    def fails(**arguments: Any) -> None:
        fill(**arguments)
        raise ValueError("mine")

    def end_invalid(stream: int) -> None:  # as CUDA where a collective was started and not waited for
        end(stream)
        raise RuntimeError("cudaErrorStreamCaptureUnjoined")

    [part] = backend.compile(nodes_of(device, ("fill", (), a, {"value": 1.0})))
    part()
    with monkeypatch.context() as patched:
        patched.setattr(runtime, "streamEndCapture", end_invalid)
        patched.setattr(backend, "fill", fails)
        with pytest.raises(ValueError, match="mine"):
            part()
    assert backend.capture is None and not backend.stream.is_capturing()
    for _ in range(2):
        part()
    assert backend.to_numpy(a)[0] == 1.0


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_other_threads_wait_while_a_step_is_captured(
    device: Any, monkeypatch: Any, is_waited_for: bool
) -> None:
    backend = device.backend
    a, b = backend.zeros((3,), "float32"), backend.zeros((3,), "float32")
    seen: list[Any] = []
    threads: list[threading.Thread] = []
    if is_waited_for:
        monkeypatch.setattr(backend.lock, "PATIENCE_S", 0.1)
    fill = backend.fill

    def other() -> None:
        try:
            backend.run("add", b, b, out=b)
            seen.append(backend.to_numpy(b)[0])
        except GraphError as error:
            seen.append(str(error))

    def meanwhile(**arguments: Any) -> None:
        fill(**arguments)
        if backend.stream.is_capturing():
            threads.append(threading.Thread(target=other))
            threads[-1].start()
            threads[-1].join(60 if is_waited_for else 0.1)

    backend.run("fill", out=b, value=1.0)
    monkeypatch.setattr(backend, "fill", meanwhile)
    [part] = backend.compile(nodes_of(device, ("fill", (), a, {"value": 1.0})))
    for _ in range(4):
        part()
    [thread] = threads
    thread.join(60)
    if is_waited_for:
        assert "must not wait for a thread" in seen[0]
    assert seen[0] == 2.0 or is_waited_for
    assert backend.to_numpy(b)[0] == (1.0 if is_waited_for else 2.0)  # and no launch does it again


def test_a_step_that_sends_numpy_arrays_by_hand_runs_eagerly(device: Any) -> None:
    """What it sends may be other numbers at every step."""
    communicator = LocalCommunicator(World())

    class Sends(Net):
        def train_one_batch(self, x: Tensor, y: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
            seen.append(int(communicator.all_gather(np.array([len(seen)])).wait()[0, 0]))
            return super().train_one_batch(x, y, *options)

    seen: list[int] = []
    net = compiled(device, True, distributed(), Sends)
    trained(net, device, range(5))
    assert seen == [0, 1, 2, 3, 4]
    assert "no kernel of the step has made" in net.graph_info()[0].break_reason


def test_more_chunks_than_records_are_kept_still_train_alike(device: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(records, "MAX_RECORDS", 2)
    eager, graph = (compiled(device, use_graph, distributed()) for use_graph in (False, True))
    device.SetRandSeed(8)
    expected = trained(eager, device, range(12), "partialUpdate")
    device.SetRandSeed(8)
    assert trained(graph, device, range(12), "partialUpdate") == expected


@pytest.mark.parametrize("stream", ["pack", "compute"])
@pytest.mark.parametrize("run", ["replay", "capture"])
def test_an_interrupt_leaves_the_thread_on_the_computing_stream(device, monkeypatch, stream, run):
    backend, other = device.backend, compiled(device, False, distributed(bucket_bytes=256))
    expected = trained(compiled(device, False, distributed(bucket_bytes=256)), device, range(4), "fp16")
    net = compiled(device, True, distributed())
    steps = 1 if run == "replay" else 2
    for step in range(steps):
        net(*batch(device, step), "fp16")
    real, interrupted = type(backend).execute, []

    def execute(self: Any, kernel: str, *arguments: Any) -> None:
        is_there = (self.streams.number == 1) == (stream == "pack") and (
            run == "replay" or self.capture is not None
        )
        if is_there and kernel != "copy" and not interrupted:
            interrupted.append(kernel)
            raise KeyboardInterrupt
        real(self, kernel, *arguments)

    monkeypatch.setattr(type(backend), "execute", execute)
    with pytest.raises(KeyboardInterrupt):
        net(*batch(device, steps), "fp16")
    monkeypatch.setattr(type(backend), "execute", real)
    assert interrupted and backend.streams.number == 0
    assert not any(each.stream.is_capturing() for each in backend.streams.all)
    device.SetRandSeed(8)
    assert trained(other, device, range(4), "fp16") == expected


def test_a_graph_for_which_there_is_no_memory_runs_kernel_by_kernel(device, monkeypatch):
    expected = trained(compiled(device, False, distributed()), device, range(4), "fp32")
    net = compiled(device, True, distributed())
    seen = [to_numpy(value).tobytes() for step in range(2) for value in net(*batch(device, step), "fp32")]
    fails = type("Function", (), {"__call__": lambda self, *arguments: 2})()  # CUDA_ERROR_OUT_OF_MEMORY
    driver = types.SimpleNamespace(cuGraphInstantiateWithFlags=fails)
    monkeypatch.setattr(sys.modules["singa_lite.backend.cuda.executable"], "open_driver", lambda: driver)
    with pytest.warns(
        UserWarning, match="kernel by kernel from now on: the GPU has no memory for its CUDA graph"
    ):
        seen += trained(net, device, range(2, 4), "fp32")
    assert seen == expected and not graphs(net)
