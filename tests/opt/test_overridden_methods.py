# SPDX-License-Identifier: Apache-2.0
"""Methods that a script's optimizer overrides: recorded steps and every dist_option give what plain eager steps do."""

from __future__ import annotations

import collections
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt, tensor
from singa_lite.errors import GraphError
from singa_lite.opt.overrides import OF_STEPS_BY_HAND
from singa_lite.sync import find_schemes
from singa_lite.tensor import Tensor, from_numpy, to_numpy
from tests.ranks import run_ranks

STEPS = 8


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = layer.Linear(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([step, rank])
    return tuple(from_numpy(rng.standard_normal((4, n)).astype(np.float32)) for n in (3, 1))  # type: ignore[return-value]


def trained(optimizer: Any, use_graph: bool, kind: type[Net] = Net, rank: int = 0) -> tuple[np.ndarray, Net]:
    """The weights after each step, and the model."""
    net = kind()
    net.set_optimizer(optimizer)
    net.compile([batch(0)[0]], use_graph=use_graph)
    net.linear.W.set_value(0.5)
    net.linear.b.set_value(0)
    if isinstance(optimizer, opt.DistOpt):
        optimizer.opt.net = net
    optimizer.net = net
    weights = []
    for step in range(STEPS):
        net(*batch(step, rank))
        weights.append(to_numpy(net.linear.W).ravel().copy())
    autograd.training = False
    return np.array(weights), net


class KeepsGradient(opt.Optimizer):
    """Twice this gradient minus the last one; ``clones`` says how it keeps that."""

    def __init__(self, clones: bool) -> None:
        super().__init__(0.1)
        self.clones, self.last = clones, dict[Tensor, Tensor]()

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        change = param_grad * 2.0 - self.last[param_value] if param_value in self.last else param_grad
        self.last[param_value] = param_grad.clone() if self.clones else param_grad
        param_value -= change * 0.05


class KeepsPairs(KeepsGradient):
    """The same by ``update_all``, whose gradients it keeps in a list."""

    def __init__(self, clones: bool) -> None:
        super().__init__(clones)
        self.grads: list[list[Tensor]] = []

    def update_all(self, pairs: Any) -> None:
        self.grads.append([grad.clone() if self.clones else grad for _, grad in pairs])
        for number, (param, grad) in enumerate(pairs):
            change = grad * 2.0 - self.grads[-2][number] if len(self.grads) > 1 else grad
            param -= change * 0.05


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("kind", [KeepsGradient, KeepsPairs])
def test_a_gradient_that_an_optimizer_keeps_stays_what_it_was(kind: Any, use_graph: bool) -> None:
    expected, _ = trained(kind(clones=True), use_graph)
    weights, net = trained(kind(clones=False), use_graph)
    np.testing.assert_array_equal(weights, expected)
    assert all(info.break_reason is None for info in net.graph_info())


def keep_with_every_option(communicator: Any, clones: bool) -> dict[tuple[str, bool], np.ndarray]:
    return {
        (name, use_graph): trained(
            opt.DistOpt(KeepsGradient(clones), communicator=communicator, dist_option=name),
            use_graph,
            rank=communicator.rank,
        )[0]
        for name in sorted(set(find_schemes()) - {"dgc"})  # which needs SGD
        for use_graph in (False, True)
    }


@pytest.mark.parametrize("size", [1, 2, 3])
def test_so_it_does_with_every_dist_option(size: int) -> None:
    transport = "local" if size == 1 else "shm"
    kept = run_ranks(keep_with_every_option, size, False, transport=transport)
    cloned = run_ranks(keep_with_every_option, size, True, transport=transport)
    for rank in range(size):
        for case, weights in cloned[rank].items():
            np.testing.assert_array_equal(kept[rank][case], weights, err_msg=str(case))


class Pops(opt.Optimizer):
    def update_all(self, pairs: Any) -> None:
        while pairs:
            param, grad = pairs.pop()
            param -= grad * 0.1


class SetsPairs(opt.SGD):
    def update_all(self, pairs: Any) -> None:
        for number, (param, grad) in enumerate(pairs):
            pairs[number] = param, tensor.sign(grad)
        super().update_all(pairs)


class ReplacesLater(opt.Optimizer):
    """Clips the values of gradients from the fifth update on, in numpy."""

    calls = 0

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        self.calls += 1
        if self.calls > 8:
            param_grad.data = np.clip(param_grad.data, -0.1, 0.1)
        param_value -= param_grad * 0.1


class ReplacesForOthers(opt.SGD):
    """Sets half of each gradient from the third update on, which the inherited method applies."""

    calls = 0

    def update_all(self, pairs: Any) -> None:
        self.calls += 1
        pairs = list(pairs)
        for _, grad in pairs if self.calls > 2 else ():
            grad.data = grad.data / 2
        super().update_all(pairs)


class UpdatesByName(opt.Optimizer):
    def __init__(self) -> None:
        super().__init__(0.1)
        self.last = dict[Tensor, Tensor]()

    def update(self, param: Tensor, grad: Tensor) -> None:
        param -= (grad + self.last.get(param, grad)) * 0.05
        self.last[param] = grad


class GivesNames(Net):
    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        for param, grad in autograd.backward(loss):
            self.optimizer.update(grad=grad, param=param)
        self.optimizer.step()
        return loss


@pytest.mark.parametrize("kind", [Pops, SetsPairs, ReplacesLater, ReplacesForOthers])
@pytest.mark.parametrize("wrap", [lambda own: own, opt.DistOpt], ids=["plain", "DistOpt"])
def test_what_an_update_does_to_its_arguments_is_done_in_each_replay(kind: Any, wrap: Any) -> None:
    (eager, _), (recorded, net) = (trained(wrap(kind(0.1)), use_graph) for use_graph in (False, True))
    np.testing.assert_allclose(recorded, eager, rtol=1e-5, atol=1e-6)
    assert net.graph_info()[0].break_reason is None


def test_gradients_given_by_name_are_kept_too() -> None:
    (eager, _), (recorded, net) = (trained(UpdatesByName(), graph, GivesNames) for graph in (False, True))
    np.testing.assert_allclose(recorded, eager, rtol=1e-5, atol=1e-6)
    assert net.graph_info()[0].break_reason is None


Pair = collections.namedtuple("Pair", "param grad")


@pytest.mark.parametrize("kind", [tuple, list, Pair._make], ids=["tuple", "list", "namedtuple"])
def test_pairs_keep_their_kind(kind: Any) -> None:
    class Reads(opt.Optimizer):
        def update_all(self, pairs: Any) -> None:
            for pair in pairs:
                if isinstance(pair, list):
                    pair[1] = pair[1] * 2.0
                grad = pair.grad if isinstance(pair, Pair) else pair[1]
                param = pair[0]
                param -= grad

    param, grad = Tensor(data=np.ones(2), stores_grad=True), Tensor(data=np.full(2, 0.25))
    Reads(0.1).update_all([kind([param, grad])])
    np.testing.assert_array_equal(to_numpy(param), 0.5 if kind is list else 0.75)


def test_a_call_that_raises_keeps_a_gradient_of_its_own_too() -> None:
    kept: list[Tensor] = []

    class Raises(opt.Optimizer):
        def update(self, grad: Tensor, param: Tensor) -> None:  # type: ignore[override]
            kept.append(grad)
            raise ValueError

    param, grad = Tensor(data=np.ones(2), stores_grad=True), Tensor(data=np.ones(2))
    with pytest.raises(ValueError):
        Raises(0.1).update(grad, param)
    grad.set_value(5)
    np.testing.assert_array_equal(to_numpy(kept[0]), 1)


def test_a_gradient_that_cannot_be_written_is_replaced() -> None:
    class Halves(opt.Optimizer):
        def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
            param_grad.data = param_grad.data / 2
            param_grad.seen = True  # type: ignore[attr-defined]

    values = np.full(3, 4.0, np.float32)
    values.setflags(write=False)
    param, grad = Tensor(data=np.ones(3), stores_grad=True), from_numpy(np.ones(3, np.float32))
    grad.array = values
    Halves(0.1).apply("w", param, grad)
    np.testing.assert_array_equal(to_numpy(grad), 2)
    assert grad.seen  # type: ignore[attr-defined]


def test_a_gradient_that_a_call_replaces_is_the_callers_too() -> None:
    class Halves(opt.Optimizer):
        def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
            param_grad.data = param_grad.data / 2

    param, grad = Tensor(data=np.ones(3), stores_grad=True), Tensor(data=np.full(3, 4.0))
    Halves(0.1).apply("w", param, grad)
    np.testing.assert_array_equal(to_numpy(grad), 2)


class CountsZeroGrad(opt.SGD):
    def __init__(self) -> None:
        super().__init__(0.1)
        self.calls = 0

    def zero_grad(self) -> None:
        self.calls += 1
        super().zero_grad()

    def value_of(self, name: str, step: int | None = None) -> float:
        return 0.1 / max(1, self.calls) if name == "lr" else super().value_of(name, step)


class ForgetsMomentum(opt.SGD):
    def __init__(self) -> None:
        super().__init__(0.1, momentum=0.9)
        self.calls = 0

    def slots(self, param: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        slots = super().slots(param)
        if self.calls % 8 == 0:
            slots["momentum"].set_value(0)
        return slots


class WithZeroGrad(Net):
    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        return super().train_one_batch(x, y)


@pytest.mark.parametrize(("kind", "method"), [(CountsZeroGrad, "zero_grad"), (ForgetsMomentum, "slots")])
def test_a_step_whose_optimizer_overrides_what_a_replay_would_not_run_is_eager(
    kind: Any, method: str
) -> None:
    (eager, _), (recorded, net) = (trained(kind(), use_graph, WithZeroGrad) for use_graph in (False, True))
    np.testing.assert_array_equal(recorded, eager)
    assert f"{kind.__name__} overrides {method}" in str(net.graph_info()[0].break_reason)


def rate_of(net: Any) -> float:
    return 0.1 * min(1.0, net.loss.item())


class Helper:
    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def rate(self) -> float:
        return rate_of(self.owner.net)


class ReadsLoss(opt.Optimizer):
    """Its rate depends on the loss of the model, which it reads in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__(0.1)
        self.way, self.net = way, cast(Any, None)
        self.helper = Helper(self)

    def rate(self) -> float:
        if self.way == "attribute":
            return 0.1 * min(1.0, self.net.loss.item())
        if self.way == "computed name":
            return 0.1 * min(1.0, getattr(self.net, "".join("loss")).item())
        if self.way == "method":
            return self.net.rate()
        return self.helper.rate() if self.way == "helper" else partial(rate_of, self.net)()

    def update_all(self, pairs: Any) -> None:
        for param, grad in pairs:
            param -= grad * self.rate()


class ReadsLossInSchedule(opt.DecayScheduler):
    def __init__(self) -> None:
        super().__init__(0.1)
        self.owner: Any = None

    def call(self, step: int) -> float:
        return rate_of(self.owner.net)


class SetsLoss(Net):
    """Keeps its loss; the class has an attribute of that name, too."""

    loss: Tensor | None = None
    number = 0

    def rate(self) -> float:
        return rate_of(self)

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        self.loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(self.loss)
        return self.loss


def reading(way: str) -> Any:
    if way != "schedule":
        return ReadsLoss(way)
    sgd = opt.SGD(schedule := ReadsLossInSchedule())
    schedule.owner = sgd
    return sgd


@pytest.mark.parametrize("way", ["attribute", "computed name", "method", "helper", "partial", "schedule"])
@pytest.mark.parametrize("wrap", [lambda own: own, opt.DistOpt], ids=["plain", "DistOpt"])
def test_an_optimizer_that_reads_what_the_step_sets_is_not_one_step_late(way: str, wrap: Any) -> None:
    (eager, _), (recorded, net) = (trained(wrap(reading(way)), graph, SetsLoss) for graph in (False, True))
    np.testing.assert_array_equal(recorded, eager)
    assert "it sets loss, which an optimizer or a schedule reads" in str(net.graph_info()[0].break_reason)
    assert type(net) is SetsLoss and type(net.linear) is layer.Linear


class ReadsLater(opt.Optimizer):
    calls = 0
    net: Any = None

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        self.calls += 1
        param_value -= param_grad * (0.1 if self.calls < 9 else rate_of(self.net))


def test_a_first_read_in_a_replay_is_an_error() -> None:
    with pytest.raises(GraphError, match="it sets loss, which an optimizer or a schedule reads"):
        trained(ReadsLater(0.1), True, SetsLoss)


class SetsTurn(Net):
    turn = 0

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        self.turn = 1 - self.turn
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


class SharesByTurn(opt.DecayScheduler):
    """Has two values by the step, and by the model's turn from step ``first`` on."""

    net: Any = SetsTurn()

    def __init__(self, first: int) -> None:
        super().__init__(0.1)
        self.first = first

    def call(self, step: int) -> float:
        turn = (0, 0, 1, 1)[step % 4] if step < self.first else self.net.turn
        return (0.3, 0.9)[turn]


@pytest.mark.parametrize("first", [0, 3, 11, 12])
def test_a_structure_option_that_reads_what_the_step_sets_is_not_one_step_late(first: int) -> None:
    found = []
    for use_graph in (False, True):
        net, shares = SetsTurn(), SharesByTurn(first)
        shares.net = net
        net.set_optimizer(opt.DistOpt(opt.SGD(0.1), dist_option="sparseTopK", spars=shares))
        net.compile([batch(0)[0]], use_graph=use_graph)
        net.linear.W.set_value(0.5)
        weights = []
        for step in range(16):
            net(*batch(step))
            weights.append(to_numpy(net.linear.W).ravel().copy())
        found.append(weights)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert "it sets turn, which an optimizer or a schedule reads" in str(net.graph_info())


class Ends(opt.DecayScheduler):
    def call(self, step: int) -> float:
        if step >= 4:
            raise ArithmeticError("it has ended")
        return 0.3


def test_a_record_asks_no_schedule_of_another_dist_option() -> None:
    net = SetsTurn()
    sgd = opt.DistOpt(opt.SGD(0.1), dist_option="sparseTopK", spars=Ends(0.1))
    net.set_optimizer(sgd)
    net.compile([batch(0)[0]], use_graph=True)
    for step in range(8):
        if step == 4:
            sgd.dist_option = "fp32"
        net(*batch(step))
    assert not any(info.break_reason for info in net.graph_info())


class SetsLossLast(SetsLoss):
    """Sets it when the optimizer has read that of the step before."""

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        self.loss = loss
        return loss


class ReadsLastLoss(ReadsLoss):
    def update_all(self, pairs: Any) -> None:
        for param, grad in pairs:
            param -= grad * (0.1 if self.net.loss is None else self.rate())


@pytest.mark.parametrize("wrap", [lambda own: own, opt.DistOpt], ids=["plain", "DistOpt"])
def test_what_a_step_sets_after_its_optimizer_may_be_read(wrap: Any) -> None:
    (eager, _), (recorded, net) = (
        trained(wrap(ReadsLastLoss("method")), use_graph, SetsLossLast) for use_graph in (False, True)
    )
    np.testing.assert_allclose(recorded, eager, rtol=1e-5, atol=1e-6)
    assert net.graph_info()[-1].break_reason is None


class Final(type):
    """Lets a class have no subclass."""

    def __new__(cls, name: str, bases: tuple[type, ...], held: dict[str, Any]) -> Final:
        if any(isinstance(base, Final) for base in bases):
            raise TypeError("this class is final")
        return super().__new__(cls, name, bases, held)


def test_where_reads_cannot_be_noticed_the_step_is_eager() -> None:
    class FinalNet(SetsLoss, metaclass=Final):
        pass

    (eager, _), (recorded, net) = (trained(reading("method"), graph, FinalNet) for graph in (False, True))
    np.testing.assert_array_equal(recorded, eager)
    assert "it sets loss, which an optimizer or a schedule reads" in str(net.graph_info()[0].break_reason)


class OwnNames(opt.Optimizer):
    """Has attributes that are called as the model's, and reads one that the step does not set."""

    net: Any = None

    def __init__(self) -> None:
        super().__init__(0.1)
        self.loss, self.log = 1.0, {"loss": 0.1}

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        self.loss = self.log["loss"] + self.net.number
        param_value -= param_grad * self.loss


def test_an_optimizer_with_such_names_of_its_own_is_replayed() -> None:
    (eager, _), (recorded, net) = (trained(OwnNames(), use_graph, SetsLoss) for use_graph in (False, True))
    np.testing.assert_allclose(recorded, eager, rtol=1e-5, atol=1e-6)
    assert [info.break_reason for info in net.graph_info()] == [None]


class Counts(opt.DecayScheduler):
    def __init__(self) -> None:
        super().__init__(0.1)
        self.calls = 0

    def call(self, step: int) -> float:
        self.calls += 1
        return 0.1


class TwoDtypes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.wide = Tensor((3, 1), dtype=tensor.float64, stores_grad=True)

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        wide = autograd.reduce_mean(autograd.matmul(x.as_type(tensor.float64), self.wide), None, 0)
        pairs = [*autograd.backward(loss), *autograd.backward(wide)]
        self.optimizer.update_all(pairs)
        self.optimizer.step()
        return loss


def test_a_schedule_is_called_once_a_step_for_parameters_of_two_dtypes() -> None:
    calls = []
    for use_graph in (False, True):
        schedule = Counts()
        _, net = trained(opt.SGD(schedule), use_graph, TwoDtypes)
        calls.append(schedule.calls)
    assert calls[0] == calls[1] and net.graph_info()[0].break_reason is None


@pytest.mark.parametrize("name", OF_STEPS_BY_HAND)
def test_a_dist_opt_that_overrides_what_its_calls_do_not_call_is_warned_of(name: str) -> None:
    kind = type("Own", (opt.DistOpt,), {name: lambda self, *arguments: None})
    net = Net()
    net.set_optimizer(kind(opt.SGD(0.1)))
    net.compile([batch(0)[0]])
    with pytest.warns(UserWarning, match=f"Own overrides {name}, which steps by hand alone call"):
        net(*batch(0))


class Steps(opt.DistOpt):
    def step(self) -> None:
        super().step()


def test_a_step_of_a_dist_opts_own_is_part_of_its_calls_in_replays() -> None:
    net = Net()
    net.set_optimizer(Steps(opt.SGD(0.1), dist_option="sparseTopK:0.5"))
    net.compile([batch(0)[0]], use_graph=True)
    for step in range(4):  # without a warning that an exception ended the update
        net(*batch(step))
    assert [info.break_reason for info in net.graph_info()] == [None]
    assert net.optimizer.step_counter == 4


@pytest.mark.parametrize("use_graph", [False, True])
@pytest.mark.parametrize("method", ["step", "update_all"])
def test_an_optimizer_that_calls_the_model_is_an_error_in_replays_too(method: str, use_graph: bool) -> None:
    calls: list[int] = []

    class Calls(opt.SGD):
        def step(self) -> None:
            super().step()
            self.call_model("step")

        def update_all(self, pairs: Any) -> None:
            super().update_all(pairs)
            self.call_model("update_all")

        def call_model(self, where: str) -> None:
            if where == method:
                calls.append(len(calls))
                if len(calls) == STEPS:
                    self.net(*batch(0))

    sgd = Calls(0.1)
    with pytest.raises(GraphError, match="its step calls the model, which would train it; call forward"):
        trained(sgd, use_graph)
    assert len(calls) == STEPS
    sgd.net.graph(False)
    sgd.net(*batch(0))  # so the thread is in no step
