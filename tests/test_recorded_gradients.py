# SPDX-License-Identifier: Apache-2.0
"""Gradients one can hold: six recorded steps do what six eager ones do, or say why they are not replayed."""

from __future__ import annotations

from typing import Any

import pytest

from singa_lite import autograd, opt
from singa_lite.tensor import Tensor, to_numpy
from tests.test_recorded_steps import Net, as_recorded, assert_alike, batch, schedule, trained

__all__ = ["as_recorded"]  # a fixture of every test
OPTIMIZERS = {
    "sgd": lambda: opt.SGD(lr=schedule(), momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda: opt.Adam(lr=schedule(), weight_decay=0.01),
    "own": lambda: Own(schedule()),
}


class Own(opt.Optimizer):
    """Its Python runs at every replay."""

    def apply(self, name: str, value: Tensor, grad: Tensor) -> None:
        value -= grad * (self.lr_value / 2)


class ByHand(Net):
    """The step of nnabla's tutorial; a subclass changes parts of it."""

    def update(self) -> None:
        pairs = [(param, param.grad) for param in self.get_params().values()]
        self.optimizer.update_all(pairs)
        self.optimizer.step()

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        loss = self.loss_of(x, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.update()
        return loss


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_zeroes_its_gradients_is_replayed(optimizer: str) -> None:
    net = assert_alike(ByHand, 4, optimizer=OPTIMIZERS[optimizer])  # it began fresh once, and stale
    assert all(param.has_fresh_grad for param in net.get_params().values())


class Stale(ByHand):
    """Marks its gradients as used, as a Trainer does."""

    def update(self) -> None:
        super().update()
        for param in self.get_params().values():
            param.mark_grad_stale()


class UsesZeroes(Stale):
    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        loss = self.loss_of(x, y)
        loss.backward()
        self.update()
        return loss, self.first.W.grad.clone(), self.second.b.grad.clone()


@pytest.mark.parametrize("make", [Stale, UsesZeroes])
def test_a_step_that_uses_its_gradients_up_is_replayed_from_the_second_on(make: type[Net]) -> None:
    assert_alike(make, 5)


class Accumulates(ByHand):
    """Two backward passes before an update, in one step."""

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = self.loss_of(x, y)
        loss.backward(0.5)
        again = autograd.mse_loss(self.forward(x), y)
        again.backward(0.25)
        self.update()
        return loss, again


def test_two_backward_passes_of_a_step_add_up() -> None:
    assert_alike(Accumulates, 4)


class OverSteps(Net):
    """Every step adds to the gradients; the update is made between steps."""

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        loss = self.loss_of(x, y)
        loss.backward(0.5)
        return loss


def update_every_second(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
    out = net(x, y)
    gradients = [to_numpy(param.grad).tobytes() for param in net.get_params().values()]
    if step % 2:
        net.optimizer.update_all([(param, param.grad) for param in net.get_params().values()])
        net.optimizer.step()
        net.optimizer.zero_grad()
    return [out, gradients, [param.has_fresh_grad for param in net.get_params().values()]]


def test_gradients_accumulate_over_recorded_steps() -> None:
    net = assert_alike(OverSteps, 4, call=update_every_second)
    assert len(net.graph_info()) == 2  # one begins with fresh gradients, one without


class Decides(ByHand):
    """Reads in Python whether a gradient is fresh."""

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        loss = self.loss_of(x, y)
        loss.backward(2.0 if self.first.W.has_fresh_grad else 1.0)
        if self.first.W.grad is not None:
            self.first.W.grad *= 0.5
        self.update()
        return loss


def test_a_step_that_asks_whether_a_gradient_is_fresh_depends_on_it() -> None:
    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step == 4:
            net.first.W.mark_grad_stale()
        return net(x, y)

    assert_alike(Decides, None, call=call)


class OnlyAsks(Net):
    """Its loss depends on a gradient that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = Tensor((2,), stores_grad=True)

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss_of(x, y) * (2.0 if self.extra.has_fresh_grad else 1.0)


def test_a_step_that_only_asks_depends_on_it_too() -> None:
    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step == 3:
            autograd.reduce_sum(net.extra * 2.0, keepdims=0).backward()
        return net(x, y)

    net = assert_alike(OnlyAsks, 4, call=call)
    assert len(net.graph_info()) == 2


def test_a_gradient_that_has_moved_is_found_again() -> None:
    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step == 3:
            grad = net.first.W.grad
            grad.data = grad.data.copy()
        return net(x, y)

    net = assert_alike(ByHand, 3, call=call)
    assert len(net.graph_info()) == 3


class Copied(autograd.BackwardCallback):
    """Doubles each gradient and keeps a running sum, in kernels."""

    def __init__(self) -> None:
        self.total = Tensor((1,))

    def add_gradient(self, param: Tensor) -> None:
        assert param.grad is not None
        param.grad *= 2.0
        if param.shape == (1,):
            self.total += param.grad


class WithCallback(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.callback = Copied()

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        loss = self.loss_of(x, y)
        self.optimizer.zero_grad()
        loss.backward(communicator_callbacks=self.callback)
        self.update()
        return loss


def test_what_a_callback_computes_is_replayed() -> None:
    totals = []
    for use_graph in (False, True):
        _, states, net = trained(WithCallback, use_graph)
        totals.append((to_numpy(net.callback.total).tobytes(), states))
    assert totals[0] == totals[1] and net.python.runs == 2


class Reads(ByHand):
    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        result = super().train_one_batch(x, y)
        to_numpy(self.first.W.grad)
        return result


class Names(ByHand):
    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.set_parameters(self.get_params())
        return super().train_one_batch(x, y)


@pytest.mark.parametrize(
    ("make", "reason"), [(Reads, "reads values on the host"), (Names, "names an optimizer's parameters")]
)
def test_what_a_replay_cannot_do_runs_eagerly(make: type[Net], reason: str) -> None:
    assert_alike(make, 0, reason)


def test_other_parameters_to_zero_are_another_step() -> None:
    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step == 3:
            net.optimizer.set_parameters({"b": net.second.b})
        return net(x, y)

    assert_alike(ByHand, None, call=call)


def test_a_model_recorded_on_its_first_step_has_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    net = ByHand()
    net.set_optimizer(opt.SGD(0.1))
    x, y = batch(0)
    net.compile([x], use_graph=True)
    for _ in range(3):
        net(x, y)
    assert net.python.runs == 2 and all(to_numpy(p.grad).any() for p in net.get_params().values())
