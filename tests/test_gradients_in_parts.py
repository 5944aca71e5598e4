# SPDX-License-Identifier: Apache-2.0
"""Recorded steps update parameters while backward runs, with the bits of eager ones, which update at the end."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.autograd import engine
from singa_lite.autograd.parts import BackwardPairs
from singa_lite.backend.cpu import CpuBackend
from singa_lite.errors import GraphError
from singa_lite.graph.interrupts import deferred_interrupts
from singa_lite.graph.memory import root_of
from singa_lite.opt import base
from singa_lite.record import record
from singa_lite.tensor import Tensor, from_numpy, to_numpy

STEPS = 4


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parts of a few numbers, and kernels as they were recorded: lowered ones round differently."""
    monkeypatch.setattr(base, "PART_BYTES", 64)
    monkeypatch.setattr(CpuBackend, "lower", lambda self, nodes: nodes)
    yield
    autograd.training = False


class Net(model.Model):
    """Three layers of which the second is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = layer.Linear(6), layer.Linear(6), layer.Linear(1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = autograd.tanh(self.second(autograd.tanh(self.first(x))))
        return self.third(autograd.tanh(self.second(hidden)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


class ReadLater(Net):
    """An operator before the second layer reads its weight, and again for the gradient of its own input."""

    def read(self, x: Tensor, weight: Tensor) -> Tensor:
        weight.requires_grad = False
        y = autograd.matmul(x, weight)
        weight.requires_grad = True
        return y

    def forward(self, x: Tensor) -> Tensor:
        if not autograd.training:
            return super().forward(x)
        hidden = self.read(autograd.tanh(self.first(x)), self.second.W)
        return self.third(autograd.tanh(self.second(hidden)))


class ReadsAView(ReadLater):
    def read(self, x: Tensor, weight: Tensor) -> Tensor:
        with autograd.no_grad():
            view = autograd.reshape(weight, weight.shape)
        return autograd.matmul(x, view)


class KeepsOnItself(autograd.Operator):
    """A product as SINGA's operators are written, with what backward needs on the operator."""

    is_recordable = True

    def forward(self, context: Any, *inputs: Any) -> Any:
        self.inputs = inputs
        out = context.empty((inputs[0].shape[0], inputs[1].shape[1]), inputs[0].dtype)
        context.run("matmul", *inputs, out=out, transpose_a=False, transpose_b=False)
        return out

    def backward(self, context: Any, *dys: Any) -> Any:
        (x, w), (dy,) = self.inputs, dys
        dx = context.empty(x.shape, x.dtype)
        context.run("matmul", dy, w, out=dx, transpose_a=False, transpose_b=True)
        return dx, None


class ReadsByAnOperatorOfTheUser(ReadLater):
    def read(self, x: Tensor, weight: Tensor) -> Tensor:
        weight.requires_grad = False
        y: Tensor = KeepsOnItself()(x, weight)
        weight.requires_grad = True
        return y


class ReadsRecurrent(ReadLater):
    """What a recurrent layer saves lies in lists of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.second = layer.CudnnRNN(6, return_sequences=True)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        hidden = autograd.reshape(self.first(x), (5, 1, 6))
        if autograd.training:
            self.second.W.requires_grad = False
            hidden = self.second(hidden)
            self.second.W.requires_grad = True
        return self.third(autograd.reshape(self.second(hidden), (5, 6)))


def data(step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(step)
    x, y = (from_numpy(rng.standard_normal((5, size)).astype(np.float32)) for size in (6, 1))
    return x, y


def trained(kind: type[Net], optimizer: opt.Optimizer, use_graph: bool) -> tuple[Net, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    net = kind()
    net.set_optimizer(optimizer)
    net.compile([data(0)[0]], use_graph=use_graph)
    for value in net.get_params().values():
        value.copy_from_numpy(0.5 * rng.standard_normal(value.shape).astype(np.float32))
    for step in range(STEPS):
        net(*data(step))
    return net, states(net)


def states(net: Net) -> dict[str, np.ndarray]:
    found = {name: np.array(value) for name, value in net.optimizer.get_states().items()}
    return {**{name: to_numpy(value) for name, value in net.get_params().items()}, **found}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def num_updates(net: Net) -> int:
    (info,) = net.graph_info()
    assert info.break_reason is None
    return sum("_update" in node.split(" ")[0] for node in info.nodes)


OPTIMIZERS = [
    lambda: opt.SGD(lr=0.3),
    lambda: opt.SGD(lr=opt.ExponentialDecay(0.3, 1, 0.5), momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda: opt.Adam(lr=0.05),
    lambda: opt.AdamW(lr=0.05),
    lambda: opt.RMSProp(lr=0.01),
    lambda: opt.AdaGrad(lr=0.05),
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: repr(make()).split("(")[0])
@pytest.mark.parametrize("kind", [Net, ReadLater, ReadsAView, ReadsByAnOperatorOfTheUser, ReadsRecurrent])
def test_updates_in_parts_give_the_bits_of_updates_at_the_end(kind: Any, make: Any) -> None:
    (_, expected), (net, found) = trained(kind, make(), False), trained(kind, make(), True)
    assert_equal(found, expected)
    assert num_updates(net) == 1 if kind is ReadsByAnOperatorOfTheUser else num_updates(net) > 1


@pytest.mark.parametrize("kind", [Net, ReadLater])
def test_lowered_steps_in_parts_give_the_bits_of_lowered_ones_that_update_at_the_end(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    found = []
    for part_bytes in (64, 1 << 30):
        monkeypatch.setattr(base, "PART_BYTES", part_bytes)
        net, values = trained(kind, opt.Adam(lr=0.05), True)
        found.append(values)
        assert (num_updates(net) > 1) == (part_bytes == 64)
    assert_equal(*found)


def test_a_parameter_waits_for_the_operators_that_read_it() -> None:
    net, _ = trained(ReadLater, opt.SGD(lr=0.1), False)
    autograd.training = True
    x, y = data(9)
    parts = list(BackwardPairs(autograd.mse_loss(net.forward(x), y), 1).parts())
    numbers = {id(param): number for number, part in enumerate(parts) for param, _ in part}
    assert len(numbers) == len(net.get_params()) == sum(map(len, parts)) and all(parts)
    # the product in between reads the weight for the gradient of its input, when that of the bias is there
    assert numbers[id(net.third.W)] < numbers[id(net.second.b)] < numbers[id(net.second.W)]


def test_pairs_are_there_as_often_as_asked_or_once_in_parts() -> None:
    net, _ = trained(Net, opt.SGD(lr=0.1), False)
    autograd.training = True
    loss = autograd.mse_loss(net.forward(data(9)[0]), data(9)[1])
    pairs = BackwardPairs(loss, 1)
    assert list(pairs) == list(pairs) == next(pairs.parts()) and len(list(pairs)) == len(net.get_params())
    pairs = BackwardPairs(autograd.mse_loss(net.forward(data(9)[0]), data(9)[1]), 1)
    assert len(list(pairs.parts())) > 1
    for again in (pairs.parts, pairs.__iter__):
        with pytest.raises(GraphError, match="applied in parts, which keeps none; make a list"):
            list(again())


def test_gradients_that_were_applied_are_gone_when_the_next_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied: list[weakref.ref[Any]] = []
    alive: list[int] = []
    update, visit = opt.SGD._run_update, engine._visit

    def noted(self: Any, kernel: str, slots: Any, groups: Any, attributes: Any) -> None:
        update(self, kernel, slots, groups, attributes)
        applied.extend(weakref.ref(root_of(grad)) for *_, grads in groups for grad in grads)

    def counted(*arguments: Any) -> None:
        alive.append(sum(array() is not None for array in applied))
        visit(*arguments)

    monkeypatch.setattr(opt.SGD, "_run_update", noted)
    monkeypatch.setattr(engine, "_visit", counted)
    net = Net()
    net.set_optimizer(opt.SGD(lr=0.1))
    net.compile([data(0)[0]], use_graph=True)
    net(*data(0))
    assert len(applied) == len(net.get_params()) and len(alive) > 5 and not any(alive)


def test_gradients_of_a_replay_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deep(Net):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [layer.Linear(100) for _ in range(4)]

        def forward(self, x: Tensor) -> Tensor:
            for each in self.hidden:
                x = autograd.tanh(each(x))
            return self.third(x)

    held = []
    for part_bytes in (1 << 30, 1 << 10):
        monkeypatch.setattr(base, "PART_BYTES", part_bytes)
        net, _ = trained(Deep, opt.SGD(lr=0.1), True)
        held.append(net.graph_info()[0].num_bytes)
    assert held[0] - held[1] > 100 * 100 * 4  # three gradients of so many numbers are there at once, or fewer


# ---- updates of a user's own, which may look at all gradients ----------------------------------------------


def scaled(pairs: Any) -> list[tuple[Tensor, Tensor]]:
    """By the number of all gradients."""
    return [(param, grad * (1.0 / len(list(pairs)))) for param, grad in pairs]


class Mixin:
    def update_all(self, pairs: Any) -> None:
        super().update_all(scaled(pairs))  # type: ignore[misc]


class ByMixin(Mixin, opt.SGD):
    is_recordable = True


class ByUpdateAll(opt.SGD):
    is_recordable = True

    def update_all(self, pairs: Any) -> None:
        super().update_all(scaled(pairs))


class ByUpdatePairs(opt.SGD):
    is_recordable = True

    def update_pairs(self, pairs: Any) -> None:
        super().update_pairs(scaled(pairs))


class ByRunUpdate(opt.SGD):
    is_recordable = True

    def run_update(self, kernel: str, pairs: Any, **attributes: Any) -> None:
        super().run_update(kernel, scaled(pairs), **attributes)


class Later(opt.SGD):
    is_recordable = True


Later.update_all = lambda self, pairs: opt.SGD.update_all(self, scaled(pairs))  # type: ignore[method-assign]


class ByApply(opt.SGD):
    def apply(self, name: str, value: Tensor, grad: Tensor) -> None:
        super().apply(name, value, grad * 0.1)


class OnTheHost(opt.SGD):
    def update_pairs(self, pairs: Any) -> None:
        super().update_pairs(scaled(pairs))


class TwiceTheSame(opt.SGD):
    is_recordable = True

    def update_all(self, pairs: Any) -> None:
        super().update_all(pairs)
        super().update_all(pairs)


@pytest.mark.parametrize(
    "kind",
    [ByMixin, ByUpdateAll, ByUpdatePairs, ByRunUpdate, Later, ByApply, OnTheHost, TwiceTheSame],
)
def test_an_update_of_a_users_own_gets_all_pairs(kind: Any) -> None:
    (_, expected), (net, found) = (trained(Net, kind(lr=0.1), use_graph) for use_graph in (False, True))
    assert_equal(found, expected)
    assert net.graph_info()[0].break_reason is None


def test_an_update_that_is_set_on_the_object_gets_all_pairs() -> None:
    found = []
    for use_graph in (False, True):
        sgd = opt.SGD(lr=0.1)
        sgd.update_all = lambda pairs, sgd=sgd: opt.SGD.update_all(sgd, scaled(pairs))  # type: ignore[assignment]
        found.append(trained(Net, sgd, use_graph)[1])
    assert_equal(*found)


class Counting(opt.DecayScheduler):
    """Falls at every call."""

    def __init__(self) -> None:
        super().__init__(0.3)
        self.num_calls = 0

    def call(self, step: int) -> float:
        self.num_calls += 1
        return self.init_value / self.num_calls


def test_a_schedule_is_read_once_a_step() -> None:
    seen = []
    for use_graph in (False, True):
        schedule = Counting()
        before = schedule.num_calls
        seen.append(
            (trained(Net, opt.SGD(lr=schedule, momentum=0.9), use_graph)[1], schedule.num_calls - before)
        )
    assert seen[0][1] == seen[1][1]
    assert_equal(seen[1][0], seen[0][0])


# ---- a step is whole, or has not been ----------------------------------------------------------------------


@pytest.mark.parametrize("use_graph", [False, True])
def test_a_record_that_is_used_up_in_part_is_refused_before_anything_changes(use_graph: bool) -> None:
    class Spends(Net):
        spends = False

        def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = autograd.tanh(self.first(x))
            loss = autograd.mse_loss(self.third(autograd.tanh(self.second(hidden))), y)
            if self.spends:
                autograd.gradients(hidden, hidden)
            self.optimizer(loss)
            return loss

    net, before = trained(Spends, opt.Adam(lr=0.1), use_graph)
    net.spends = True
    with pytest.raises(GraphError, match="used up"):
        net(*data(7))
    assert_equal(states(net), before)


@pytest.mark.parametrize("is_replay", [False, True])
def test_ctrl_c_between_two_parts_is_raised_when_all_parameters_have_made_the_step(
    is_replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    execute = CpuBackend.execute

    def interrupted(self: Any, kernel: str, *arguments: Any) -> None:
        execute(self, kernel, *arguments)
        if kernel == "momentum_update":
            calls.append(kernel)
            if len(calls) == 1:
                os.kill(os.getpid(), signal.SIGINT)

    net, _ = trained(Net, opt.SGD(lr=0.1, momentum=0.9), True)
    other, _ = trained(Net, opt.SGD(lr=0.1, momentum=0.9), True)
    other(*data(STEPS))
    if not is_replay:
        net.graph(True)  # without its records
    monkeypatch.setattr(CpuBackend, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        net(*data(STEPS))
    assert len(calls) > 1
    for name, value in other.get_params().items():
        np.testing.assert_array_equal(to_numpy(net.get_params()[name]), to_numpy(value), err_msg=name)


def test_interrupts_are_deferred_to_the_end_in_the_main_thread_alone() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        done.append(1)
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # whatever else ends the block
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError
    handler = signal.getsignal(signal.SIGINT)

    def elsewhere() -> None:
        with deferred_interrupts():
            done.append(signal.getsignal(signal.SIGINT) is handler)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done == [1, True] and signal.getsignal(signal.SIGINT) is handler


def test_a_replay_with_collectives_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise AssertionError("deferred")

    monkeypatch.setattr(record, "deferred_interrupts", fail)
    net, _ = trained(Net, opt.DistOpt(opt.SGD(lr=0.1)), True)
    assert net.graph_info()[0].break_reason is None
    with pytest.raises(AssertionError, match="deferred"):
        trained(Net, opt.SGD(lr=0.1), True)
