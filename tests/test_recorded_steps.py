# SPDX-License-Identifier: Apache-2.0
"""What a user may write into ``train_one_batch``: six recorded steps do what six eager ones do, or say why they are not
replayed."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import logging
import multiprocessing
import os
import random
import threading
import weakref
from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, deque, namedtuple
from dataclasses import dataclass, is_dataclass
from functools import cached_property, partial, partialmethod, singledispatch
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, data, layer, model, opt, tensor
from singa_lite.backend.cpu import CpuBackend
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.device import get_default_device, get_num_threads
from singa_lite.errors import GraphError
from singa_lite.record import attributes as record_attributes
from singa_lite.tensor import Tensor, from_numpy, to_numpy
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first

STEPS = 6
Pair = namedtuple("Pair", "out loss")


@dataclass(frozen=True)
class Scored:
    loss: Tensor
    score: float


class Attributes(OrderedDict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclass(frozen=True)
class Batch:
    x: Tensor
    y: Tensor


class Net(model.Model):
    """Two layers; a subclass writes the step."""

    unrecorded_attributes = (*model.Model.unrecorded_attributes, "python")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer.Linear(6), layer.Linear(1)
        self.python = SimpleNamespace(runs=0)  # counts calls

    def forward(self, x: Tensor) -> Tensor:
        return self.second(autograd.tanh(self.first(x)))

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        self.python.runs += 1
        return autograd.mse_loss(self.forward(x), y)

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        loss = self.loss_of(x, y)
        self.optimizer(loss)
        return loss


def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([step, rank])
    return from_numpy(rng.standard_normal((5, 4)).astype(np.float32)), from_numpy(
        rng.standard_normal((5, 1)).astype(np.float32)
    )


@pytest.fixture(autouse=True)
def as_recorded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replay the very kernels that were recorded: lowered ones (tests/backend/test_lower.py) round differently."""
    monkeypatch.setattr(CpuBackend, "lower", lambda self, nodes: nodes)
    yield
    autograd.training = False


def schedule() -> opt.DecayScheduler:
    return opt.ExponentialDecay(0.2, 1, 0.5)


def trained(
    make: Any, use_graph: bool, optimizer: Any = None, communicator: Any = None, call: Any = None
) -> tuple[list[Any], dict[str, bytes], Any]:
    """Results of the steps, parameters and optimizer states as bytes, and the model."""
    get_default_device().SetRandSeed(4)
    net = make()
    net.set_optimizer((optimizer or (lambda: opt.SGD(lr=schedule(), momentum=0.9)))())
    net.compile([batch(0)[0]], use_graph=use_graph)
    rank = 0 if communicator is None else communicator.rank
    call = call or (lambda net, step, x, y: net(x, y))
    results = [call(net, step, *batch(step, rank)) for step in range(STEPS)]
    autograd.training = False
    states = {name: to_numpy(value).tobytes() for name, value in net.get_states().items()}
    states |= {name: value.tobytes() for name, value in net.optimizer.get_states().items()}
    return [values_of(result) for result in results], states, net


def values_of(result: Any) -> Any:
    if isinstance(result, Tensor):
        return to_numpy(result).tobytes()
    if isinstance(result, dict):
        return {key: values_of(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [type(result).__name__, *map(values_of, result)]
    if is_dataclass(result):
        return [values_of(value) for value in vars(result).values()]
    return result


def assert_alike(make: Any, replays: int | None, reason: str = "", **options: Any) -> Any:
    """Both modes give the same bits, and so many steps were replayed, or none for that reason; the recorded model."""
    eager, graph = (trained(make, use_graph, **options) for use_graph in (False, True))
    assert graph[0] == eager[0]
    assert graph[1] == eager[1]
    assert eager[2].python.runs == STEPS
    reasons = [info.break_reason for info in graph[2].graph_info() if info.break_reason is not None]
    if replays is not None:
        assert graph[2].python.runs == STEPS - replays, reasons
    assert bool(reasons) == bool(reason) and all(reason in found for found in reasons), reasons
    return graph[2]


# ---- updates by hand ------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: opt.SGD(lr=schedule(), momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda: opt.Adam(lr=schedule(), weight_decay=0.01),
    "dist": lambda: opt.DistOpt(opt.Adam(lr=schedule()), communicator=LocalCommunicator(World())),
}


def by_update(net: Any, loss: Tensor) -> None:
    for param, grad in autograd.backward(loss):
        net.optimizer.update(param, grad)
    net.optimizer.step()


def by_apply(net: Any, loss: Tensor) -> None:
    for param, grad in autograd.backward(loss):
        net.optimizer.apply(param.name, param, grad)
    net.optimizer.step()


def by_update_all(net: Any, loss: Tensor) -> None:
    net.optimizer.update_all(autograd.backward(loss))
    net.optimizer.step()


def clipped(net: Any, loss: Tensor) -> None:
    """By the norm of all gradients, on the device."""
    pairs = list(autograd.backward(loss))
    squares = [tensor.sum(grad * grad) for _, grad in pairs]
    total = squares[0]
    for square in squares[1:]:
        total = total + square
    factor = 0.1 / (tensor.sqrt(total) + 1e-6)
    for _, grad in pairs:
        grad *= factor
    net.optimizer.update_all(pairs)
    net.optimizer.step()


def twice(net: Any, loss: Tensor) -> None:
    """Two counted updates in one step."""
    pairs = list(autograd.backward(loss))
    for _ in range(2):
        net.optimizer.update_all(pairs)
        net.optimizer.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("update", [by_update, by_apply, by_update_all, clipped, twice])
def test_updates_by_hand_read_their_numbers_at_every_step(update: Any, optimizer: Any) -> None:
    class Updates(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = self.loss_of(x, y)
            update(self, loss)
            return loss

    net = assert_alike(Updates, STEPS - 1, optimizer=optimizer)
    assert net.optimizer.step_counter == STEPS * (1 + (update is twice))


def test_numbers_of_an_optimizer_that_change_between_steps_are_seen() -> None:
    def change(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step == 2:
            net.optimizer.lr = opt.Constant(0.01)
        if step == 4:
            net.optimizer.nesterov = True
        return net(x, y)

    assert_alike(Net, STEPS - 2, call=change)  # nesterov is another kernel


def test_numbers_set_between_steps_and_momentum_that_begins_then_are_seen() -> None:
    def change(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step == 2:
            net.optimizer.lr, net.optimizer.weight_decay = 0.01, 0.1
        if step == 4:
            net.optimizer.momentum = 0.9
        return net(x, y)

    assert_alike(Net, STEPS - 2, call=change, optimizer=lambda: opt.SGD(0.1))  # momentum is another kernel


def test_a_learning_rate_read_in_python_is_not_frozen() -> None:
    class ByHand(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = self.loss_of(x, y)
            lr = self.optimizer.lr(self.optimizer.step_counter)
            for param, grad in autograd.backward(loss):
                param -= grad * lr
            self.optimizer.step()
            return loss

    assert_alike(ByHand, 0, "step counter")


def test_a_counter_read_from_the_states_is_not_frozen() -> None:
    class ByStates(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            steps = int(self.optimizer.get_states()["step_counter"])
            loss = self.loss_of(x, y) * (1.0 / (1 + steps))
            self.optimizer(loss)
            return loss

    assert_alike(ByStates, 0, "optimizer's states", optimizer=lambda: opt.SGD(0.1))


def test_the_number_of_threads_read_in_a_step_is_not_frozen() -> None:
    class ByThreads(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = self.loss_of(x, y) * (1.0 / get_num_threads())
            self.optimizer(loss)
            return loss

    assert_alike(ByThreads, 0, "number of threads")


# ---- optimizers that users write ----------------------------------------------------------------------------------


class Applies(opt.Optimizer):
    """SINGA's contract: ``apply`` for each parameter; it keeps a number of its own."""

    def __init__(self) -> None:
        super().__init__(schedule())
        self.strength = 1.0

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        self.strength *= 0.9
        param_value -= param_grad * (self.lr(self.step_counter) * self.strength)


class Scaled(opt.SGD):
    """Changes the gradient, then takes SGD's step."""

    def apply(self, param_name: str, param_value: Tensor, param_grad: Tensor) -> None:
        param_grad *= 1.0 / (1 + self.step_counter)
        super().apply(param_name, param_value, param_grad)


class UpdatesAll(opt.Adam):
    def update_all(self, pairs: Any) -> None:
        super().update_all([(param, grad * (1.0 + self.step_counter)) for param, grad in pairs])


class Counts(opt.SGD):
    def step(self) -> None:
        super().step()
        self.extra = getattr(self, "extra", 0) + 1


WRITTEN = [Applies, lambda: Scaled(0.1, momentum=0.9), lambda: UpdatesAll(0.01), lambda: Counts(0.1)]


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("make", WRITTEN, ids=["apply", "apply of SGD", "update_all", "step"])
def test_what_a_subclass_overrides_is_called_at_every_step(make: Any, is_wrapped: bool) -> None:
    def optimizer() -> Any:
        return opt.DistOpt(make(), communicator=LocalCommunicator(World())) if is_wrapped else make()

    net = assert_alike(Net, STEPS - 1, optimizer=optimizer)
    written = net.optimizer.opt if is_wrapped else net.optimizer
    assert getattr(written, "strength", 0.9 ** (4 * STEPS)) == pytest.approx(0.9 ** (4 * STEPS))
    assert getattr(written, "extra", STEPS) == STEPS


@pytest.mark.parametrize("make", WRITTEN[:3], ids=["apply", "apply of SGD", "update_all"])
@pytest.mark.parametrize("update", [by_update, by_apply, by_update_all])
def test_what_a_subclass_overrides_is_honoured_by_hand(make: Any, update: Any) -> None:
    class Updates(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = self.loss_of(x, y)
            update(self, loss)
            return loss

    if not (update is by_update_all and make is WRITTEN[1]) and not (
        update is by_apply and make is WRITTEN[2]
    ):
        assert_alike(Updates, STEPS - 1, optimizer=make)


class Fades:
    """Beside an optimizer: a class that is none itself."""

    calls = 0

    def fade(self, grad: Tensor) -> Tensor:
        self.calls += 1
        return grad * 0.5**self.calls


class FadesInApply(Fades):
    def apply(self, name: str, value: Tensor, grad: Tensor) -> None:
        super().apply(name, value, self.fade(grad))  # type: ignore[misc]


class FadesInUpdateAll(Fades):
    def update_all(self, pairs: Any) -> None:
        super().update_all([(param, self.fade(grad)) for param, grad in pairs])  # type: ignore[misc]


class FadesInStep(Fades):
    def step(self) -> None:
        super().step()  # type: ignore[misc]
        self.lr = self.lr_value * 0.5  # type: ignore[attr-defined]


class FadesInCall(Fades):
    def __call__(self, loss: Tensor) -> None:
        super().__call__(self.fade(loss))  # type: ignore[misc]


@pytest.mark.parametrize("is_derived", [False, True])
@pytest.mark.parametrize("beside", [FadesInApply, FadesInUpdateAll, FadesInStep, FadesInCall])
def test_what_an_optimizer_inherits_from_a_class_beside_it_is_called_at_every_step(
    beside: Any, is_derived: bool
) -> None:
    kind = type("Mine", (beside, opt.SGD), {})
    if is_derived:
        kind = type("Again", (kind,), {})
    runs_eagerly = beside is FadesInCall
    reason = "Python a replay would not run" if runs_eagerly else ""
    net = assert_alike(Net, 0 if runs_eagerly else STEPS - 1, reason, optimizer=lambda: kind(0.1))
    assert net.optimizer.calls == {FadesInStep: 0, FadesInCall: STEPS}.get(beside, 4 * STEPS)


@pytest.mark.parametrize("name", ["update_all", "apply", "step", "backward_and_update"])
def test_a_function_set_as_an_attribute_of_an_optimizer_is_called_at_every_step(name: str) -> None:
    def fading() -> Any:
        sgd, fades = opt.SGD(0.1), Fades()

        def own(*given: Any) -> None:
            if name == "step":
                opt.SGD.step(sgd)
                sgd.lr = 0.1 * 0.5**sgd._step_counter
            elif name == "backward_and_update":
                sgd(fades.fade(given[0]))
            else:
                pairs = given[0] if name == "update_all" else [given[1:]]
                opt.SGD.update_all(sgd, [(param, fades.fade(grad)) for param, grad in pairs])

        setattr(sgd, name, own)
        return sgd

    class Updates(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = self.loss_of(x, y)
            self.optimizer.backward_and_update(loss)
            return loss

    assert_alike(Updates, 0, f"SGD.{name} is an attribute", optimizer=fading)


def test_a_function_set_as_an_attribute_of_an_optimizer_between_steps_is_seen() -> None:
    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step in (2, 4):
            sgd, factor = net.optimizer, 0.5**step
            sgd.update_all = lambda pairs: opt.SGD.update_all(sgd, [(p, g * factor) for p, g in pairs])
        return net(x, y)

    assert_alike(Net, 1, "SGD.update_all is an attribute", call=call)


@pytest.mark.parametrize("beside", [(FadesInApply, FadesInUpdateAll), (FadesInUpdateAll, FadesInApply)])
def test_the_class_beside_an_optimizer_that_comes_first_decides_how_it_updates(beside: Any) -> None:
    net = trained(Net, False, lambda: type("Mine", (*beside, opt.SGD), {})(0.1))[2]
    assert net.optimizer.calls == (4 * STEPS if beside[0] is FadesInUpdateAll else 8 * STEPS)


def test_a_subclass_with_apply_takes_the_step_that_it_writes() -> None:
    expected = trained(Net, False, lambda: opt.SGD(0.1))[1]

    class Same(opt.Optimizer):
        def apply(self, name: str, value: Tensor, grad: Tensor) -> None:
            value -= grad * 0.1

    class Opposite(opt.SGD):
        def apply(self, name: str, value: Tensor, grad: Tensor) -> None:
            super().apply(name, value, -grad)

    same = trained(Net, False, lambda: Same(0.1))[1]
    opposite = trained(Net, False, lambda: Opposite(0.1))[1]
    for name, value in expected.items():
        if name != "step_counter":
            np.testing.assert_allclose(
                *(np.frombuffer(v, np.float32) for v in (same[name], value)), rtol=1e-5
            )
            assert opposite[name] != value


# ---- arguments and results -----------------------------------------------------------------------------------------


def test_tensors_in_tuples_dicts_and_dataclasses_are_inputs() -> None:
    class Nested(Net):
        def train_one_batch(self, given: Any) -> Any:  # type: ignore[override]
            x, y = (given["x"], given["y"]) if isinstance(given, dict) else (given[0], given[1])
            return super().train_one_batch(x, y)

    for call in (
        lambda net, step, x, y: net((x, y)),
        lambda net, step, x, y: net([x, y]),
        lambda net, step, x, y: net({"x": x, "y": y}),
    ):
        assert_alike(Nested, STEPS - 1, call=call)

    class OfData(Net):
        def train_one_batch(self, given: Batch) -> Any:  # type: ignore[override]
            return super().train_one_batch(given.x, given.y)

    assert_alike(OfData, STEPS - 1, call=lambda net, step, x, y: net(Batch(x, y)))


def test_a_batch_object_that_is_used_again_is_not_frozen() -> None:
    class Listens(Net):
        def train_one_batch(self, given: Any) -> Any:  # type: ignore[override]
            return super().train_one_batch(given.x, given.y)

    reused = SimpleNamespace()

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        reused.x, reused.y = x, y
        return net(reused)

    assert_alike(Listens, 0, "SimpleNamespace", call=call)


@pytest.mark.parametrize("second", [False, True])
def test_an_input_that_is_changed_in_place_changes_for_the_caller(second: bool) -> None:
    class Doubles(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            changed = y if second else x
            changed *= 2.0
            return super().train_one_batch(x, y)

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        return net(x, y), x, y

    assert_alike(Doubles, 0, "changes an input in place", call=call)


@dataclass
class Noted:
    x: Tensor
    seen: Any = None


def of_a_list(given: Any, loss: Tensor) -> None:
    given["losses"].append(loss)


def of_a_nested_list(given: Any, loss: Tensor) -> None:
    given["pair"][1].insert(0, (given["x"], loss))


def of_a_list_that_shrinks(given: Any, loss: Tensor) -> None:
    given["more"].pop()


def of_a_dict(given: Any, loss: Tensor) -> None:
    given["stats"]["steps"] += 1
    given["stats"].pop("first", None)


def of_the_dict_that_holds_all(given: Any, loss: Tensor) -> None:
    given["loss"] = loss


def of_a_dataclass(given: Any, loss: Tensor) -> None:
    given["noted"].seen = loss


def of_a_frozen_dataclass(given: Any, loss: Tensor) -> None:
    object.__setattr__(given["batch"], "y", loss)


def beside_the_fields(given: Any, loss: Tensor) -> None:
    given["noted"].more = loss


def of_a_tensor(given: Any, loss: Tensor) -> None:
    given["x"].requires_grad, given["x"].name = False, "x"


def in_two_places(given: Any, loss: Tensor) -> None:
    given["losses"].append(given["x"])
    given["stats"]["losses"] = given["losses"]


CHANGES = [
    of_a_list,
    of_a_nested_list,
    of_a_list_that_shrinks,
    of_a_dict,
    of_the_dict_that_holds_all,
    of_a_dataclass,
    of_a_frozen_dataclass,
    beside_the_fields,
    of_a_tensor,
    in_two_places,
]


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_step_changes_of_its_arguments_the_caller_sees_once(change: Any, stays: bool) -> None:
    class Changes(Net):
        def train_one_batch(self, x: Tensor, y: Tensor, given: Any) -> Any:  # type: ignore[override]
            loss = super().train_one_batch(x, y)
            change(given, loss.clone())
            return loss

    def new(x: Tensor, y: Tensor) -> Any:
        pair = (2, [3])
        return {
            "x": x, "losses": [], "more": list(range(9)), "stats": {"steps": 0, "first": 1}, "pair": pair,
            "noted": Noted(x), "batch": Batch(x, y),
        }  # fmt: skip

    found: list[Any] = []

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        given = found[-1] if stays and step else new(x, y)
        found.append(given)
        inner = [given["pair"], given["pair"][1], given["losses"], given["noted"], given["x"]]
        result = net(given["x"], y, given)
        now = [given["pair"], given["pair"][1], given["losses"], given["noted"], given["x"]]
        assert all(a is b for a, b in zip(inner, now, strict=True))
        assert change is not in_two_places or given["stats"]["losses"] is given["losses"]
        assert change is not in_two_places or given["losses"][-1] is given["x"]
        return result, values_of(given), given["x"].requires_grad, given["x"].name

    sets_again = change is of_a_tensor and stays  # the values that are there since the first step
    net = assert_alike(Changes, STEPS - 2 if sets_again else 0, "it changes an argument", call=call)
    assert len(net.graph_info()) == 1 + sets_again


def test_a_container_that_is_given_twice_is_one_in_the_step() -> None:
    class Appends(Net):
        def train_one_batch(self, x: Tensor, y: Tensor, a: Any, b: Any) -> Any:  # type: ignore[override]
            loss = super().train_one_batch(x, y)
            a.append(1)
            b.append(len(a))
            return loss

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        both: list[int] = []
        return net(x, y, both, both), both

    net = assert_alike(Appends, 0, "it changes an argument, a list", call=call)
    assert len(net.graph_info()) == 1


def test_a_step_that_fails_has_changed_its_arguments() -> None:
    class Fails(Net):
        def train_one_batch(self, x: Tensor, y: Tensor, seen: Any) -> Any:  # type: ignore[override]
            seen.append(1)
            x *= 2.0
            loss = super().train_one_batch(x, y)
            if len(seen) % 2:
                raise RuntimeError("odd")
            return loss

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        seen = [0] * step
        try:
            result = net(x, y, seen)
        except RuntimeError as error:
            result = str(error)
        return result, x, seen

    assert_alike(Fails, 0, "it changes an argument, a list", call=call)


def test_a_dataclass_is_copied_without_making_it_again() -> None:
    @dataclass
    class Scaled:
        x: Tensor
        y: Tensor

        def __post_init__(self) -> None:
            self.x = self.x * 2.0

    class OfScaled(Net):
        def train_one_batch(self, given: Any) -> Any:  # type: ignore[override]
            return Batch(super().train_one_batch(given.x, given.y), given.x)

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        autograd.training = False
        result = net(Scaled(x, y))
        return result.x, result.y

    assert_alike(OfScaled, STEPS - 1, call=call)


def test_an_argument_given_twice_is_one_tensor_in_the_step() -> None:
    class Compares(Net):
        def train_one_batch(self, x: Tensor, y: Tensor, z: Tensor) -> Any:  # type: ignore[override]
            return super().train_one_batch(x * (2.0 if z is x else 3.0) + z, y)

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        return net(x, y, x if step % 2 else x.clone())

    assert_alike(Compares, STEPS - 2, call=call)


def test_an_argument_given_twice_is_changed_in_place_once() -> None:
    class Doubles(Net):
        def train_one_batch(self, x: Tensor, y: Tensor, z: Tensor) -> Any:  # type: ignore[override]
            x *= 2.0
            return super().train_one_batch(z, y)

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        return net(x, y, x), x

    assert_alike(Doubles, 0, "changes an input in place", call=call)


@pytest.mark.parametrize("is_changed", [False, True])
def test_arguments_that_share_memory_run_eagerly_and_say_so(is_changed: bool) -> None:
    class Doubles(Net):
        def train_one_batch(self, x: Tensor, y: Tensor, z: Tensor) -> Any:  # type: ignore[override]
            if is_changed:
                z *= 2.0
            return super().train_one_batch(x, y)

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        return net(x, y, x.copy()), x

    assert_alike(Doubles, 0, "share memory", call=call)


def test_the_name_of_an_argument_is_seen() -> None:
    class Reads(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            return super().train_one_batch(x * 2.0 if x.name == "even" else x, y)

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        x.name = "even" if step % 2 == 0 else "odd"
        return net(x, y)

    assert_alike(Reads, STEPS - 2, call=call)


def test_an_attribute_that_the_caller_gives_a_tensor_is_not_frozen() -> None:
    class Reads(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            return super().train_one_batch(x * x.weight, y)  # type: ignore[attr-defined]

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        x.weight = 1.0 + step  # type: ignore[attr-defined]
        return net(x, y)

    assert_alike(Reads, 0, "an attribute weight of its own", call=call)


def test_an_input_that_was_computed_keeps_its_gradient() -> None:
    scale = Tensor(data=np.ones(4), stores_grad=True, name="scale")

    class Upstream(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = self.loss_of(x, y)
            grads = dict(autograd.backward(loss))
            return loss, grads[scale]

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        autograd.training = True
        return net(autograd.mul(x, scale), y)

    assert_alike(Upstream, 0, "made by a recorded operator", call=call)


RESULTS = {
    "namedtuple": (lambda out, loss: Pair(out, loss), STEPS - 1, ""),
    "dict": (lambda out, loss: {"out": out, "more": [loss, (out,)]}, STEPS - 1, ""),
    "nothing": (lambda out, loss: None, STEPS - 1, ""),
    "a size": (lambda out, loss: (loss, out.shape[0]), STEPS - 1, ""),
    "a number": (lambda out, loss: (loss, 0.125), 0, "the number 0.125"),
    "a numpy number": (lambda out, loss: (loss, np.float32(0.125)), 0, "the number 0.125"),
    "a number in a dataclass": (lambda out, loss: Scored(loss, 0.125), 0, "the number 0.125"),
    "a dict of another class": (lambda out, loss: Attributes(loss=loss, out=out), STEPS - 1, ""),
    "an object": (lambda out, loss: SimpleNamespace(loss=loss), 0, "SimpleNamespace"),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_results_of_every_form_are_new_or_refused(kind: str) -> None:
    make, replays, reason = RESULTS[kind]

    class Returns(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            self.python.runs += 1
            out = self.forward(x)
            loss = autograd.mse_loss(out, y)
            self.optimizer(loss)
            return make(out, loss)

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        result = net(x, y)
        return [result.loss] if kind in ("an object", "a dict of another class") else result

    assert_alike(Returns, replays, reason, call=call)


# ---- attributes ----------------------------------------------------------------------------------------------------


class Sums(Net):
    """A mean that the step reads and rebinds."""

    def __init__(self) -> None:
        super().__init__()
        self.total = Tensor((1,))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        loss = super().train_one_batch(x, y)
        self.total = self.total * 0.5 + loss
        return loss, self.total


def test_an_attribute_that_is_read_and_rebound_goes_on() -> None:
    assert_alike(Sums, STEPS - 1)


@pytest.mark.parametrize("is_fresh", [False, True], ids=["result of a step with an update", "of one without"])
def test_no_gradient_is_cut_at_an_attribute_in_silence(is_fresh: bool) -> None:
    class Carries(Net):
        def __init__(self) -> None:
            super().__init__()
            self.doubled, self.carried = Tensor((5, 1)), Tensor((5, 1))

        def train_one_batch(self, x: Tensor, y: Tensor, updates: bool = True) -> Any:
            out = self.forward(x) + self.carried
            if updates:
                self.optimizer(autograd.mse_loss(out, y))
            self.doubled = out * 2.0
            self.carried = out
            return out

    for clones in (True, False):
        net, (x, y) = Carries(), batch(0)
        net.set_optimizer(opt.SGD(lr=0.1))
        net.compile([x], use_graph=True)
        net(x, y, not is_fresh)
        if clones:
            net.carried = net.carried.clone()
            net(x, y)
        else:
            with pytest.raises(GraphError, match=r"no gradient flows; take clone\(\)"):
                net(x, y)


def test_a_step_that_carries_a_mean_is_replayed_after_a_save_as_well(tmp_path: Path) -> None:
    class Keeps(Sums):
        buffers = ("total",)

    net = Keeps()
    net.set_optimizer(opt.SGD(lr=0.1))
    net.compile([batch(0)[0]], use_graph=True)
    for step in range(6):
        net(*batch(step))
        if step == 2:
            net.save_states(tmp_path / "net.zip")
    [info] = net.graph_info()
    assert net.python.runs == 2 and info.break_reason is None  # recorded, and compared behind the save
    assert "total" in net.get_states()


@pytest.mark.parametrize("wrap", [lambda draw: draw, partial], ids=["itself", "in a partial"])
def test_a_function_made_by_cython_runs_at_every_step(wrap: Any) -> None:
    class Draws(Net):
        def __init__(self) -> None:
            super().__init__()
            self.draw = wrap(np.random.default_rng(1).random)

        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = self.loss_of(x, y) * float(self.draw())
            self.optimizer(loss)
            return loss

    assert_alike(Draws, 0, "it changes ")


def test_tensors_move_from_attribute_to_attribute() -> None:
    class Moves(Net):
        def __init__(self) -> None:
            super().__init__()
            self.old, self.now, self.fixed = (from_numpy(np.float32([n])) for n in (2.0, 1.0, 0.5))
            self.shown: list[Tensor] = []

        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = self.loss_of(x, y)
            self.optimizer(loss * self.old)
            self.old, self.now = self.now, loss.clone()
            self.shown = [self.fixed]
            return loss

    net = assert_alike(Moves, None)
    assert net.python.runs < STEPS and net.shown[0] is net.fixed


def test_attributes_that_held_one_tensor_when_recorded_may_hold_two() -> None:
    class Moves(Net):
        def __init__(self) -> None:
            super().__init__()
            self.now, self.old = (from_numpy(np.float32([n])) for n in (1.0, 2.0))

        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = super().train_one_batch(x, y)
            self.old, self.now = self.now, loss.clone()
            return loss

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step == 0:
            net.old = net.now
        return net(x, y), net.old, net.now

    assert_alike(Moves, STEPS - 2, call=call)


def test_attributes_that_hold_one_tensor_go_on_holding_one() -> None:
    class Shares(Net):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (from_numpy(np.float32([n])) for n in (1.0, 2.0))

        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = self.loss_of(x, y)
            self.optimizer(loss * self.b)
            self.a, self.b = self.b, self.a
            return loss

    assert_alike(Shares, STEPS - 1)

    class Joins(Shares):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = super().train_one_batch(x, y)
            self.c = self.d = loss.clone()
            return loss

    net = assert_alike(Joins, None)
    assert net.c is net.d and net.python.runs < STEPS


def test_an_attribute_may_be_changed_between_steps() -> None:
    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step == 2:
            net.total = Tensor(data=np.full(1, 7.0, np.float32))
        if step == 4:
            net.total = net.total.clone()
            net.total.set_value(3.0)
        kept.append(net.total)
        return net(x, y)

    kept: list[Tensor] = []
    eager_kept = None
    for use_graph in (False, True):
        kept.clear()
        trained(Sums, use_graph, call=call)
        values = [to_numpy(value).tolist() for value in kept]  # what a caller has put aside stays as it was
        eager_kept = eager_kept or values
        assert values == eager_kept


class Recurrent(Net):
    """A state that one step leaves for the next, in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.state = (Tensor((5, 6)), Tensor((5, 6)))
        self.inner = layer.Linear(6)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.state
        c = autograd.tanh(self.inner(h)) + self.first(x) + c * 0.5
        h = autograd.tanh(c)
        if autograd.training:
            self.state = (h.clone(), c.clone())
        return self.second(h)


def test_a_recurrent_state_in_a_tuple_goes_on() -> None:
    assert_alike(Recurrent, STEPS - 1)


class Accumulates(Net):
    """Gradients of three batches, added by hand in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[Tensor, Tensor] = {}

    def train_one_batch(self, x: Tensor, y: Tensor, is_last: bool) -> Any:  # type: ignore[override]
        loss = self.loss_of(x, y)
        for param, grad in autograd.backward(loss):
            self.sums[param] = self.sums[param] + grad if param in self.sums else grad
        if is_last:
            self.optimizer.update_all(list(self.sums.items()))
            self.optimizer.step()
            self.sums.clear()
        return loss


def test_gradients_are_accumulated_by_hand() -> None:
    net = assert_alike(Accumulates, 3, call=lambda net, step, x, y: net(x, y, step % 3 == 2))
    assert net.optimizer.step_counter == 2


class AccumulatesInPlace(Accumulates):
    """Into tensors that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

    def train_one_batch(self, x: Tensor, y: Tensor, is_last: bool) -> Any:  # type: ignore[override]
        loss = self.loss_of(x, y)
        for param, grad in autograd.backward(loss):
            self.kept[param.name] += grad
        if is_last:
            self.optimizer.update_all([(param, self.kept[name]) for name, param in self.get_params().items()])
            self.optimizer.step()
            for kept in self.kept.values():
                kept.set_value(0.0)
        return loss


def test_gradients_are_accumulated_in_place() -> None:
    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if not net.kept:
            net.kept = {name: Tensor(param.shape) for name, param in net.get_params().items()}
        return net(x, y, step % 3 == 2)

    assert_alike(AccumulatesInPlace, STEPS - 2, call=call)


def test_a_counter_of_the_model_counts() -> None:
    class CountsUp(Net):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            self.calls = (self.calls + 1) % 2
            loss = super().train_one_batch(x * (1.0 + self.calls), y)
            return loss

    net = assert_alike(CountsUp, STEPS - 2)  # a record for each of two values
    assert net.calls == 0


def test_a_counter_without_end_runs_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("singa_lite.record.records.MAX_MISSES", 3)

    class CountsUp(Net):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            self.calls += 1
            return super().train_one_batch(x * float(self.calls), y)

    net = assert_alike(CountsUp, 0, "changes at every step")
    assert net.calls == STEPS


def test_a_counter_may_be_named_as_one_that_records_do_not_look_at() -> None:
    class CountsUp(Net):
        unrecorded_attributes = (*Net.unrecorded_attributes, "calls")
        calls = 0

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        net.calls += 1
        return net(x, y)

    assert_alike(CountsUp, STEPS - 1, call=call)


def test_a_plain_attribute_that_the_caller_changes_is_seen() -> None:
    class Weighs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.options = {"weight": 1.0}
            self.power = 1

        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = self.loss_of(x, y) * self.options["weight"] * float(self.power)
            self.optimizer(loss)
            return loss

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        net.power = 1 + step // 3
        return net(x, y)

    assert_alike(Weighs, STEPS - 2, call=call)


SETTERS = {
    "vars": lambda net, name, value: vars(net).update({name: value}),
    "object": object.__setattr__,
    "new vars": lambda net, name, value: setattr(net, "__dict__", vars(net) | {name: value}),
    "a layer's vars": lambda net, name, value: vars(net.first).update({name: value}),
    "deleted": lambda net, name, value: vars(net).pop(name),
}


@pytest.mark.parametrize("how", SETTERS)
def test_an_attribute_that_is_set_past_the_layer_is_seen(how: str) -> None:
    class Weighs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.alpha = 0.5

        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * getattr(self.first, "alpha", getattr(self, "alpha", 2.0))

    def change(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step == 3:
            SETTERS[how](net, "alpha", 0.25)
        return net(x, y)

    assert_alike(Weighs, STEPS - 2, call=change)


def test_replays_look_at_attributes_only_if_one_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    look = record_attributes.layers_of
    monkeypatch.setattr(record_attributes, "layers_of", lambda model: looks.append(0) or look(model))

    def change(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        looks.clear()
        if step == 4:
            vars(net)["alpha"] = 1.0
        result = net(x, y)
        assert step == 0 or bool(looks) == (step in (1, 4, 5))
        return result

    trained(Net, True, call=change)


def test_a_list_that_grows_with_the_steps_grows() -> None:
    class Remembers(Net):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []

        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = super().train_one_batch(x, y)
            self.losses.append(loss.clone())
            return loss

    net = assert_alike(Remembers, 0)
    assert len({to_numpy(loss).item() for loss in net.losses}) == STEPS


@pytest.mark.parametrize(
    ("kind", "put", "reason"),
    [
        (list, "append", "variable kept outside of train_one_batch"),
        (deque, "append", "variable kept outside of train_one_batch"),
        (SimpleQueue, "put", "neither in its result nor in an attribute"),
    ],
)
def test_what_a_step_puts_aside_elsewhere_is_not_frozen(kind: Any, put: str, reason: str) -> None:
    kept = kind()

    class PutsAside(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = super().train_one_batch(x, y)
            getattr(kept, put)(loss)
            return loss

    assert_alike(PutsAside, 0, reason)
    assert (kept.qsize() if kind is SimpleQueue else len(kept)) == 2 * STEPS


def test_a_tensor_put_aside_is_a_new_one_at_every_step() -> None:
    class PutsAside(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = super().train_one_batch(x, y)
            self.seen = loss
            return loss

    kept: list[Tensor] = []

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        result = net(x, y)
        kept.append(net.seen)
        return result

    assert_alike(PutsAside, STEPS - 2, call=call)  # the first step finds no such attribute
    assert len({to_numpy(value).item() for value in kept}) == STEPS


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", ["save_states", "snapshot"])
def test_a_step_that_saves_the_model_runs_eagerly_and_says_so(save: str, tmp_path: Any) -> None:
    class Saves(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = super().train_one_batch(x, y)
            getattr(self, save)(*([tmp_path / "net.zip"] if save == "save_states" else []))
            return loss

    net = assert_alike(Saves, 0, "reads values")
    assert len(net.graph_info()) == 1


# ---- numpy -----------------------------------------------------------------------------------------------------------


def in_numpy(net: Any, x: Tensor) -> Tensor:
    x.data[...] = np.clip(x.data, -1, 1)
    return x


def read_back(net: Any, x: Tensor) -> Tensor:
    return x * float(to_numpy(x).max())


def from_host(net: Any, x: Tensor) -> Tensor:
    return x * Tensor(data=np.full(1, 0.5 + net.python.runs, np.float32))


def drawn_by_numpy(net: Any, x: Tensor) -> Tensor:
    return x * Tensor(data=np.random.default_rng(net.python.runs).random(1).astype(np.float32))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (in_numpy, "Tensor.data"),
        (read_back, "reads values"),
        (from_host, "host values"),
        (drawn_by_numpy, "host values"),
    ],
)
def test_numpy_in_a_step_is_not_frozen(change: Any, reason: str) -> None:
    class Changes(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            return super().train_one_batch(change(self, x), y)

    assert_alike(Changes, 0, reason)


# ---- collectives by hand ---------------------------------------------------------------------------------------------


def summed(dist: Any, grads: list[Tensor]) -> None:
    for grad in grads:
        dist.all_reduce(grad)


def fused(dist: Any, grads: list[Tensor]) -> None:
    dist.fused_all_reduce(grads[:1], send=False)
    dist.fused_all_reduce(grads[1:])


def halved(dist: Any, grads: list[Tensor]) -> None:
    dist.all_reduce_half(grads[0])
    dist.fused_all_reduce_half(grads[1:])


def sparse(dist: Any, grads: list[Tensor]) -> None:
    for grad in grads:
        dist.sparsification(grad, None, 0.5, True)


def fused_sparse(dist: Any, grads: list[Tensor]) -> None:
    dist.fused_sparsification(grads, None, 0.3, True)


def thresholded(dist: Any, grads: list[Tensor]) -> None:
    for grad in grads:
        dist.sparsification(grad, None, 0.01, False)


def raw(dist: Any, grads: list[Tensor]) -> None:
    for grad in grads:
        dist.communicator.all_reduce(grad.data, "sum").wait()


def gathered(dist: Any, grads: list[Tensor]) -> None:
    for grad in grads:
        everyone = dist.communicator.all_gather(grad.data).wait()
        grad.data[...] = everyone.sum(axis=0)


def counted(dist: Any, grads: list[Tensor]) -> None:
    count = np.array([len(grads)], np.int64)
    dist.communicator.all_reduce(count, "sum").wait()
    for grad in grads:
        dist.all_reduce(grad)
        grad *= float(count[0]) / (len(grads) * dist.world_size)


def broadcast(dist: Any, grads: list[Tensor]) -> None:
    dist.broadcast(grads)
    for grad in grads:
        grad *= float(dist.world_size)


BY_HAND = {
    summed: "", fused: "", halved: "", sparse: "", fused_sparse: "", broadcast: "",
    thresholded: "reads values", raw: "Tensor.data", gathered: "Tensor.data", counted: "no kernel of the step",
}  # fmt: skip


def exchange_by_hand(communicator: Any, exchange: Any, use_graph: bool) -> Any:
    CpuBackend.lower = lambda self, nodes: nodes  # type: ignore[method-assign]

    class ByHand(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = self.loss_of(x, y)
            pairs = list(autograd.backward(loss))
            exchange(self.optimizer, [grad for _, grad in pairs])
            for param, grad in pairs:
                self.optimizer.update(param, grad)
            self.optimizer.step()
            return loss

    def optimizer() -> Any:
        return opt.DistOpt(opt.SGD(lr=schedule(), momentum=0.9), communicator=communicator)

    before = communicator.traffic.bytes_sent
    results, states, net = trained(ByHand, use_graph, optimizer, communicator)
    reasons = [info.break_reason for info in net.graph_info()]
    return results, states, communicator.traffic.bytes_sent - before, net.python.runs, reasons


@pytest.mark.parametrize("size", [2, 3])
@slow_but_first("exchange", BY_HAND, ids=lambda exchange: exchange.__name__, count=3)
def test_a_collective_by_hand_is_sent_at_every_replay(exchange: Any, size: int) -> None:
    eager, graph = (run_ranks(exchange_by_hand, size, exchange, use_graph) for use_graph in (False, True))
    for mine, theirs in zip(eager, graph, strict=True):
        assert mine[:3] == theirs[:3]
        assert theirs[1] == graph[0][1]  # and the ranks stay where each other are
        reason = BY_HAND[exchange]
        assert theirs[3] == (STEPS if reason else 1)
        assert all((reason in found) if reason else found is None for found in theirs[4])


def left_in_flight(communicator: Any, use_graph: bool) -> Any:
    """A sum that one step starts and the next one waits for."""

    class Overlaps(Net):
        work: Any = None
        unrecorded_attributes = (*Net.unrecorded_attributes, "work")

        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = super().train_one_batch(x, y)
            if self.work is not None:
                self.work.wait()
            self.sum = loss.clone()
            self.work = self.optimizer.communicator.all_reduce(self.sum.array, "sum")
            return loss

    results, states, net = trained(
        Overlaps, use_graph, lambda: opt.DistOpt(opt.SGD(0.1), communicator=communicator), communicator
    )
    net.work.wait()
    return results, states, [info.break_reason for info in net.graph_info()]


def test_a_collective_left_in_flight_is_refused() -> None:
    eager, graph = (run_ranks(left_in_flight, 2, use_graph) for use_graph in (False, True))
    for mine, theirs in zip(eager, graph, strict=True):
        assert mine[:2] == theirs[:2]
        assert all("in flight" in reason for reason in theirs[2]) and theirs[2]


# ---- variables outside of the model --------------------------------------------------------------------

SCALE = 1.0
SETTINGS = SimpleNamespace(scale=1.0)
TABLE = {"scale": [1.0]}


def scaled_by_global() -> float:
    return SCALE


def scaled_by_object() -> float:
    return float(SETTINGS.scale)


def scaled_by_table() -> float:
    return TABLE["scale"][0]


@pytest.mark.parametrize("scale", [scaled_by_global, scaled_by_object, scaled_by_table])
def test_a_variable_that_the_caller_changes_is_seen(scale: Any) -> None:
    class Reads(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * scale()

    def change(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        global SCALE
        SCALE = SETTINGS.scale = TABLE["scale"][0] = 1.0 if step < 3 else 0.5
        return net(x, y)

    assert_alike(Reads, STEPS - 2, call=change)


class Named(list[float]):
    """A list with an attribute, as a class of the user's own may have."""

    def __init__(self, *values: float) -> None:
        super().__init__(values)
        self.name = "scales"


class Row(tuple[Any, ...]):
    pass


class AttrDict(dict[str, float]):
    """A dict whose items are its attributes."""

    def __init__(self, **values: float) -> None:
        super().__init__(values)
        self.__dict__ = self


def apply_scale(scale: float, **others: float) -> float:
    return scale


READS: dict[str, tuple[Any, Any, Any]] = {  # what is read, how, and how the caller sets it
    "list": (Named(1.0), lambda held: held[0], lambda held, value: held.__setitem__(0, value)),
    "tuple": (Row([[1.0]]), lambda held: held[0][0], lambda held, value: held[0].__setitem__(0, value)),
    "dict": (
        AttrDict(scale=1.0),
        lambda held: sum(held.values()),
        lambda held, value: held.update(scale=value),
    ),
    "vars": (
        SimpleNamespace(scale=1.0),
        lambda held: apply_scale(**vars(held)),
        lambda held, value: setattr(held, "scale", value),
    ),
}


@pytest.mark.parametrize("is_attribute", [False, True])
@pytest.mark.parametrize("kind", READS)
def test_what_an_object_of_a_container_class_holds_is_seen(kind: str, is_attribute: bool) -> None:
    held, read, put = READS[kind]

    class Reads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.held = held if is_attribute else None

        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * float(read(self.held if is_attribute else held))

    def change(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        put(held, 1.0 if step < 3 else 0.5)
        return net(x, y)

    assert_alike(Reads, STEPS - 2, call=change)


class Lazy(list[float]):
    """A list that makes its items when it is iterated over."""

    def __iter__(self) -> Any:
        return iter([object() for _ in range(len(self))])


def holding_itself() -> Named:
    named = Named(1.0)
    named.append(named)  # type: ignore[arg-type]
    return named


LARGE = 1500  # items, more than are compared one by one
UNCHANGED: dict[str, Any] = {
    "large list": Named(*[1.0] * LARGE),
    "large tuple": Row([1.0] * LARGE),
    "large dict in a list": [AttrDict(**{f"k{number}": 1.0 for number in range(LARGE)})],
    "lazy list": Lazy([1.0]),
    "list that holds itself": holding_itself(),
    "vars of what has more": SimpleNamespace(
        scale=1.0, log=logging.getLogger("own"), thread=threading.current_thread()
    ),
}


@pytest.mark.parametrize("kind", UNCHANGED)
def test_an_object_that_stays_as_it_is_keeps_no_step_from_replay(kind: str) -> None:
    held = UNCHANGED[kind]

    class Reads(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            scale = len(vars(held)) if isinstance(held, SimpleNamespace) else len(held)
            return super().loss_of(x, y) * float(scale / LARGE)

    assert_alike(Reads, STEPS - 1)


class Linked:
    """One of several objects that know each other."""

    def __init__(self) -> None:
        self.others: list[Linked] = []


def test_objects_that_know_each_other_are_looked_at_once() -> None:
    nodes = [Linked() for _ in range(12)]  # on 12! ways through all of them
    for node in nodes:
        node.others = [other for other in nodes if other is not node]

    class Reads(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * float(len(nodes[0].others) / 10)

    assert_alike(Reads, STEPS - 1)


HISTORY: deque[int] = deque()  # more than is compared one by one


@pytest.mark.parametrize("grows", [False, True])
def test_a_long_deque_is_compared_by_its_length(grows: bool) -> None:
    class Reads(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * float(len(HISTORY) / 2000)

    def change(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step == 0:
            HISTORY.clear()
            HISTORY.extend(range(2000))
        elif step == 3 and grows:
            HISTORY.append(0)
        return net(x, y)

    assert_alike(Reads, STEPS - 1 - grows, call=change)


def test_a_variable_of_a_closure_and_an_attributes_object_are_seen() -> None:
    scale, settings = 1.0, SimpleNamespace(scale=1.0)

    class Reads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.settings = settings

        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * scale * self.settings.scale

    def change(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        nonlocal scale
        scale = 1.0 if step < 2 else 0.5
        settings.scale = 1.0 if step < 4 else 3.0
        return net(x, y)

    assert_alike(Reads, STEPS - 3, call=change)


COUNT = 0
CALLS: list[int] = []


def counted_global(net: Any) -> None:
    global COUNT
    COUNT += 1


def counted_list(net: Any) -> None:
    CALLS.append(len(CALLS))


def counted_list_of_a_class(net: Any) -> None:
    net.named.append(len(net.named))


def counted_object(net: Any) -> None:
    net.counter.calls += 1


def counted_class(net: Any) -> None:
    Counter.calls += 1


def counted_array(net: Any) -> None:
    ARRAY[0] += 1


class Counter:
    calls = 0


ARRAY = np.zeros(3)


@pytest.mark.parametrize(
    ("count", "label"),
    [
        (counted_global, "variable COUNT"),
        (counted_list, "variable CALLS"),
        (counted_list_of_a_class, "named"),
        (counted_object, "counter"),
        (counted_class, "Counter.calls"),
        (counted_array, "variable ARRAY"),
    ],
)
def test_a_step_that_changes_a_variable_runs_eagerly_and_says_so(count: Any, label: str) -> None:
    class Counts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.counter = SimpleNamespace(calls=0)
            self.named = Named()

        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            count(self)
            return super().train_one_batch(x, y)

    net = assert_alike(Counts, 0, label)
    calls = {"variable COUNT": COUNT, "variable CALLS": len(CALLS), "counter": 2 * net.counter.calls}
    calls |= {"Counter.calls": Counter.calls, "variable ARRAY": ARRAY[0], "named": 2 * len(net.named)}
    assert calls[label] == 2 * STEPS


OWN = np.random.default_rng(3)


@pytest.mark.parametrize(
    ("draw", "label"),
    [
        (lambda: np.random.rand(), "random state of numpy.random"),
        (lambda: random.random(), "random state of random"),
        (lambda: OWN.random(), "variable OWN"),
    ],
    ids=["numpy", "random", "Generator"],
)
def test_numbers_drawn_from_other_generators_are_not_frozen(draw: Any, label: str) -> None:
    class Draws(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * draw()

    def begin(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        global OWN
        if step == 0:
            np.random.seed(3)
            random.seed(3)
            OWN = np.random.default_rng(3)
        return net(x, y)

    assert_alike(Draws, 0, f"it changes the {'global ' if 'OWN' in label else ''}{label}", call=begin)


class Slotted:
    __slots__ = ("scale",)


class Gate(layer.Layer):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Inherits(Gate):
    pass


@pytest.mark.parametrize("kind", [Gate, Inherits])
def test_attributes_of_layers_in_slots_are_not_frozen(kind: Any) -> None:
    class Gated(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gate = kind()

        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            self.gate.scale *= 0.5
            return self.gate(super().loss_of(x, y))

    assert_alike(Gated, 0, "gate.scale is in __slots__")


class Failure(layer.Layer, Exception):
    """Has no slots, but attributes of its base that look like them."""

    __slots__ = ()

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


def test_layers_without_slots_are_replayed_whatever_their_bases() -> None:
    class Fails(Net):
        def __init__(self) -> None:
            super().__init__()
            self.failure = Failure()

        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return self.failure(super().loss_of(x, y))

    assert_alike(Fails, STEPS - 1)


class WithClass:
    scale = 1.0


@dataclass
class Weight:
    scale: float = 1.0


def set_class(c: Any, step: int) -> None:
    type(c).scale = float(step)


def scaled(c: Any, x: float = 1.0) -> float:
    return x * float(c.scale)


class Term:
    """Reads and may advance what it holds."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def value(self) -> float:
        return float(self.weight)

    def counted(self) -> float:
        self.weight += 1.0
        return float(self.weight)

    def drawn(self) -> float:
        return float(self.weight.random())

    def taken(self) -> float:
        return float(next(self.weight))


class Terms:
    def __init__(self, *weights: Any) -> None:
        self.terms = [Term(weight) for weight in weights]

    def values(self) -> float:
        return sum(term.value() for term in self.terms)


class Outer:
    def __init__(self, weight: Any) -> None:
        self.inner = SimpleNamespace(term=Term(weight))

    def term(self) -> Term:
        return self.inner.term  # type: ignore[no-any-return]


class Weighted(layer.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.terms = Terms(1.0)

    def forward(self) -> float:
        return self.terms.values()


# what an attribute of the model holds, how the step reads a number from it, what the caller does to it between steps
HELD: dict[str, tuple[Any, Any, Any]] = {
    "list": (lambda: [1.0], lambda c: c[0], lambda c, step: c.__setitem__(0, float(step))),
    "dict": (lambda: {"a": 1.0}, lambda c: c["a"], lambda c, step: c.__setitem__("a", float(step))),
    "dataclass": (Weight, lambda c: c.scale, lambda c, step: setattr(c, "scale", float(step))),
    "dict in a tuple": (
        lambda: ("a", {"a": 1.0}),
        lambda c: c[1]["a"],
        lambda c, step: c[1].__setitem__("a", float(step)),
    ),
    "layers in a list": (
        lambda: [layer.ReLU()],
        lambda c: 1.0 + isinstance(c[0], layer.Tanh),
        lambda c, step: c.__setitem__(0, layer.ReLU() if step == 1 else layer.Tanh()),
    ),
    "ndarray": (lambda: np.ones(1), lambda c: float(c[0]), lambda c, step: c.__setitem__(0, step)),
    "set": (lambda: {1}, lambda c: float(len(c)), lambda c, step: c.add(step)),
    "deque": (lambda: deque([1.0]), lambda c: c[-1], lambda c, step: c.append(float(step))),
    "nested object": (
        lambda: SimpleNamespace(inner=SimpleNamespace(scale=1.0)),
        lambda c: c.inner.scale,
        lambda c, step: setattr(c.inner, "scale", float(step)),
    ),
    "list in an object": (
        lambda: SimpleNamespace(scale=[1.0]),
        lambda c: c.scale[0],
        lambda c, step: c.scale.__setitem__(0, float(step)),
    ),
    "Tensor in an object": (
        lambda: SimpleNamespace(scale=from_numpy(np.float32([1]))),
        lambda c: c.scale,
        lambda c, step: setattr(c, "scale", from_numpy(np.float32([step]))),
    ),
    "object with slots": (
        Slotted,
        lambda c: getattr(c, "scale", 1.0),
        lambda c, step: setattr(c, "scale", step),
    ),
    "class attribute": (WithClass, lambda c: c.scale, set_class),
    "object in a list": (
        lambda: [SimpleNamespace(scale=1.0)],
        lambda c: c[0].scale,
        lambda c, step: setattr(c[0], "scale", float(step)),
    ),
    "objects in an object": (
        lambda: Terms(1.0, 2.0),
        lambda c: c.values(),
        lambda c, step: setattr(c.terms[1], "weight", float(step)),
    ),
    "object two levels down": (
        lambda: Outer(1.0),
        lambda c: c.term().value(),
        lambda c, step: setattr(c.inner.term, "weight", float(step)),
    ),
    "objects in an object of a layer": (
        Weighted,
        lambda c: c(),
        lambda c, step: setattr(c.terms.terms[0], "weight", float(step)),
    ),
    "item of a long list in an object": (
        lambda: SimpleNamespace(scale=[1.0] * 5000),
        lambda c: c.scale[7],
        lambda c, step: c.scale.__setitem__(7, float(step)),
    ),
    "item of a long dict in an object": (
        lambda: SimpleNamespace(scale=dict.fromkeys(range(5000), 1.0)),
        lambda c: c.scale[7],
        lambda c, step: c.scale.__setitem__(7, float(step)),
    ),
    "long ndarray": (
        lambda: np.ones(50_000),
        lambda c: float(c[7]),
        lambda c, step: c.__setitem__(7, float(step)),
    ),
    "long mapping proxy": (
        lambda: (held := dict.fromkeys(range(5000), 1.0), MappingProxyType(held)),
        lambda c: c[1][7],
        lambda c, step: c[0].__setitem__(7, float(step)),
    ),
    "released memoryview": (
        lambda: [1.0, (view := memoryview(b"a"), view.release())[0]],
        lambda c: c[0],
        lambda c, step: c.__setitem__(0, float(step)),
    ),
    "bytearray": (lambda: bytearray(9), lambda c: float(c[7]), lambda c, step: c.__setitem__(7, step)),
    "array": (lambda: array("d", [0.0] * 9), lambda c: c[7], lambda c, step: c.__setitem__(7, step)),
    "large array that grows": (
        lambda: array("d", bytes(2 << 20)),
        lambda c: float(len(c) % 7),
        lambda c, step: c.append(step),
    ),
    "partial": (
        lambda: partial(scaled, SimpleNamespace(scale=1.0)),
        lambda c: c(),
        lambda c, step: setattr(c.args[0], "scale", float(step)),
    ),
}


@pytest.mark.parametrize("kind", HELD)
def test_what_an_attribute_holds_may_be_changed_by_the_caller(kind: str) -> None:
    make, read, change = HELD[kind]

    class Holds(Net):
        def __init__(self) -> None:
            super().__init__()
            self.held = make()

        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * read(self.held)

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step in (0, 3):
            change(net.held, 1 if step == 0 else 2)
        return net(x, y)

    assert_alike(Holds, STEPS - 2, call=call)


def read_default(settings: Any = SETTINGS, *, table: Any = TABLE) -> float:
    return float(settings.scale * table["scale"][0])


def read_attribute() -> float:
    return read_attribute.scale  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("read", [read_default, read_attribute])
def test_what_a_function_holds_may_be_changed_by_the_caller(read: Any) -> None:
    class Reads(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * read()

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        SETTINGS.scale = 1.0 if step < 2 else 0.5
        TABLE["scale"][0] = read_attribute.scale = 1.0 if step < 4 else 3.0  # type: ignore[attr-defined]
        return net(x, y)

    assert_alike(Reads, STEPS - (3 if read is read_default else 2), call=call)


def count_by_default(calls: list[int] = []) -> None:  # noqa: B006
    calls.append(1)


def count_by_attribute() -> None:
    count_by_attribute.calls = getattr(count_by_attribute, "calls", 0) + 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("count", "label"),
    [(count_by_default, "the default of calls"), (count_by_attribute, "count_by_attribute")],
)
def test_a_step_that_changes_what_a_function_holds_runs_eagerly_and_says_so(count: Any, label: str) -> None:
    class Counts(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            count()
            held = count_by_default.__defaults__ or ([],)
            return super().loss_of(x, y) * (len(held[0]) + getattr(count_by_attribute, "calls", 0))

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step == 0:
            (count_by_default.__defaults__ or ([],))[0].clear()
            count_by_attribute.calls = 0  # type: ignore[attr-defined]
        return net(x, y)

    assert_alike(Counts, 0, f"it changes {label}" if "default" in label else label, call=call)


ADVANCED = {
    "Generator": (lambda: np.random.default_rng(3), lambda c: c.random(), "it changes held"),
    "RandomState": (lambda: np.random.RandomState(3), lambda c: c.rand(), "it changes held"),
    "count": (itertools.count, next, "it changes held"),
    "generator": (lambda: (n for n in range(1, 99)), next, "it reads held, an iterator"),
    "Generator two levels down": (
        lambda: Outer(np.random.default_rng(3)),
        lambda c: c.term().drawn(),
        "it changes held.inner.term.weight",
    ),
    "iterator two levels down": (
        lambda: Outer(iter(range(1, 99))),
        lambda c: c.term().taken(),
        "it reads held.inner.term.weight, an iterator",
    ),
    "bound Random": (lambda: random.Random(3).random, lambda c: c(), "it changes held"),
    "bound next": (lambda: iter([*range(1, 99)]).__next__, lambda c: c(), "it reads held, an iterator"),
    "bound pop": (lambda: [*range(1, 99)].pop, lambda c: c(), "it changes held"),
    "bound popleft": (lambda: deque(range(1, 99)).popleft, lambda c: c(), "it changes held"),
    "bound next in a partial": (
        lambda: partial(next, iter(range(1, 99))),
        lambda c: c(),
        "it reads held, an iterator",
    ),
    "counter in a list": (lambda: Terms(1.0), lambda c: c.terms[0].counted(), "it changes held.terms"),
}


@pytest.mark.parametrize("kind", ADVANCED)
def test_what_a_step_advances_is_not_frozen(kind: str) -> None:
    make, read, reason = ADVANCED[kind]

    class Advances(Net):
        def __init__(self) -> None:
            super().__init__()
            self.held = make()

        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * float(read(self.held))

    assert_alike(Advances, 0, reason)


class Base:
    scale = 1.0


class Derived(Base):
    pass


class Other(Base):
    scale = 2.0


class Mangled:
    __slots__ = ("__scale",)

    def __init__(self) -> None:
        self.__scale = 1.0

    def value(self) -> float:
        return self.__scale

    def set(self, scale: float) -> None:
        self.__scale = scale


def with_defaults(scale: float = 1.0, *, other: float = 1.0) -> float:
    return scale * other


def doubled(scale: float = 1.0, *, other: float = 1.0) -> float:
    return scale * other * 2


@singledispatch
def dispatched(value: object) -> float:
    raise TypeError(value)


@dispatched.register
def _(value: float) -> float:
    return value * TABLE["scale"][0]


class WithDescriptors:
    scaled = partialmethod(lambda self, factor: TABLE["scale"][0] * factor, factor=1.0)

    @cached_property
    def cached(self) -> float:
        return TABLE["scale"][0]


def set_table(scale: float) -> None:
    TABLE["scale"][0] = scale


# what the step reads, and what the caller does to it between steps
OUTSIDE: dict[str, tuple[Any, Any]] = {
    "class attribute set on a subclass": (lambda: Derived.scale, lambda: setattr(Derived, "scale", 2.0)),
    "class attribute read by an object": (
        lambda: HELD_OBJECT.scale,
        lambda: setattr(Derived, "scale", 2.0),
    ),
    "class of an object": (lambda: HELD_OBJECT.scale, lambda: set_class_of(HELD_OBJECT)),
    "mangled slot": (lambda: MANGLED.value(), lambda: MANGLED.set(2.0)),
    "new global": (lambda: new_global() if "NEW" in globals() else 1.0, lambda: globals().update(NEW=2.0)),
    "defaults": (lambda: with_defaults(), lambda: setattr(with_defaults, "__defaults__", (2.0,))),
    "defaults by keyword": (
        lambda: with_defaults(),
        lambda: setattr(with_defaults, "__kwdefaults__", {"other": 2.0}),
    ),
    "code": (lambda: with_defaults(), lambda: setattr(with_defaults, "__code__", doubled.__code__)),
    "partialmethod": (lambda: WithDescriptors().scaled(), lambda: set_table(2.0)),  # type: ignore[call-arg]
    "cached_property": (lambda: WithDescriptors().cached, lambda: set_table(2.0)),
    "singledispatch": (lambda: dispatched(1.0), lambda: set_table(2.0)),
    "function registered later": (
        lambda: dispatched(1.0),
        lambda: dispatched.register(float, lambda value: 2.0),
    ),
    "array of objects": (lambda: OBJECTS[0]["scale"], lambda: OBJECTS[0].update(scale=2.0)),
    "key of a dict": (lambda: next(iter(KEYS)).scale, lambda: setattr(next(iter(KEYS)), "scale", 2.0)),
    "element of a set": (
        lambda: next(iter(ELEMENTS)).scale,
        lambda: setattr(next(iter(ELEMENTS)), "scale", 2.0),
    ),
    "UserDict": (lambda: USER_DICT["scale"], lambda: USER_DICT.update(scale=2.0)),
    "UserList": (lambda: USER_LIST[0], lambda: USER_LIST.__setitem__(0, 2.0)),
    "ChainMap": (lambda: CHAIN["scale"], lambda: CHAIN.update(scale=2.0)),
    "mapping proxy": (lambda: PROXY["scale"], lambda: PROXIED.update(scale=2.0)),
    "weak reference": (lambda: WEAK().scale, lambda: setattr(HELD_OBJECT, "scale", 2.0)),
    "value of ctypes": (lambda: C_VALUE.value, lambda: setattr(C_VALUE, "value", 2.0)),
    "value of multiprocessing": (lambda: SHARED.value, lambda: setattr(SHARED, "value", 2.0)),
    "memoryview": (lambda: float(VIEW[0]), lambda: VIEWED.__setitem__(0, 2)),
}


def new_global() -> float:
    return NEW  # type: ignore[name-defined, no-any-return]  # noqa: F821


def set_class_of(held: Any) -> None:
    held.__class__ = Other


def renew_outside() -> None:
    global HELD_OBJECT, MANGLED, OBJECTS, KEYS, ELEMENTS, USER_DICT, USER_LIST, CHAIN, PROXIED, PROXY, WEAK
    global C_VALUE, SHARED, VIEWED, VIEW
    if "scale" in vars(Derived):
        del Derived.scale
    globals().pop("NEW", None)
    HELD_OBJECT, MANGLED = Derived(), Mangled()
    with_defaults.__code__, with_defaults.__defaults__ = ORIGINAL, (1.0,)
    with_defaults.__kwdefaults__ = {"other": 1.0}
    dispatched.register(float, lambda value: value * TABLE["scale"][0])
    set_table(1.0)
    OBJECTS, KEYS, ELEMENTS = np.array([{"scale": 1.0}], object), {Derived(): 1}, {Derived()}
    USER_DICT, USER_LIST, CHAIN = UserDict(scale=1.0), UserList([1.0]), ChainMap({"scale": 1.0})
    PROXIED, WEAK = {"scale": 1.0}, weakref.ref(HELD_OBJECT)
    PROXY, C_VALUE, SHARED = MappingProxyType(PROXIED), ctypes.c_float(1.0), multiprocessing.Value("d", 1.0)
    VIEWED = bytearray([1])
    VIEW = memoryview(VIEWED)


ORIGINAL = with_defaults.__code__


@pytest.mark.parametrize("kind", OUTSIDE)
def test_what_a_step_reads_by_a_roundabout_way_may_be_changed_by_the_caller(kind: str) -> None:
    read, change = OUTSIDE[kind]

    class Reads(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * read()

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step == 0:
            renew_outside()
        if step == 3:
            change()
        return net(x, y)

    assert_alike(Reads, STEPS - 2, call=call)


@pytest.mark.parametrize("changed", ["class", "method", "class attribute"])
def test_the_class_of_a_layer_may_be_changed_between_steps(changed: str) -> None:
    class Parent(Net):
        scale = 1.0

        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * self.scale

    class Child(Parent):
        pass

    class Doubled(Parent):
        scale = 2.0

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        if step == 0:
            for name in {"scale", "forward"} & vars(Child).keys():
                delattr(Child, name)
        if step == 3 and changed == "class":
            net.__class__ = Doubled
        elif step == 3 and changed == "method":
            Child.forward = lambda self, x: self.second(self.first(x))  # type: ignore[method-assign]
        elif step == 3:
            Child.scale = 2.0
        return net(x, y)

    assert_alike(Child, STEPS - 2, call=call)


class Multiplied(autograd.Operator):
    """x times a number of its own."""

    is_recordable = True
    factor = 1.0

    def forward(self, context: Any, x: Any) -> Any:
        return self.times(context, x)

    def backward(self, context: Any, dy: Any) -> Any:
        return self.times(context, dy)

    def times(self, context: Any, x: Any) -> Any:
        factor, y = context.empty((1,), x.dtype), context.empty(x.shape, x.dtype)
        context.run("fill", out=factor, value=self.factor)
        context.run("mul", x, factor, out=y)
        return y


def test_a_number_of_an_own_operator_is_seen() -> None:
    class Operates(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Multiplied()

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(super().forward(x))

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        net.scaled.factor = 1.0 if step < 3 else 0.5
        return net(x, y)

    assert_alike(Operates, STEPS - 2, call=call)


class AddsInNumpy(Multiplied):
    def forward(self, context: Any, x: Any) -> Any:
        y = super().forward(context, x)
        y += 1  # in an array that a kernel made
        return y


class ClipsInNumpy(Multiplied):
    def backward(self, context: Any, dy: Any) -> Any:
        dx = super().backward(context, dy)
        return np.clip(dx, -1e-2, 1e-2, out=dx)


class Decides(Multiplied):
    def forward(self, context: Any, x: Any) -> Any:
        self.factor = 1.0 if x.sum() > 0 else 0.5
        return super().forward(context, x)


@pytest.mark.parametrize("operator", [AddsInNumpy, ClipsInNumpy, Decides])
def test_operators_from_outside_run_eagerly_unless_they_say_that_they_can_be_recorded(operator: Any) -> None:
    class Operates(Net):
        def forward(self, x: Tensor) -> Tensor:
            return operator()(super().forward(x))

    assert_alike(Operates, 0, "set is_recordable = True")


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: np.random.default_rng().random(), "default_rng"),
        (lambda: random.Random().random(), "Random"),
        (lambda: np.random.RandomState().rand(), "RandomState"),
        (lambda: random.SystemRandom().random(), "SystemRandom"),
        (lambda: int.from_bytes(os.urandom(6), "big") / 2**48, "urandom"),
    ],
)
def test_numbers_of_generators_that_a_step_makes_are_not_frozen(draw: Any, name: str) -> None:
    class Draws(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            super().train_one_batch(x, y)
            return draw()

    results, _, net = trained(Draws, True)
    assert len(set(results)) == STEPS
    assert f"numbers from {name}," in net.graph_info()[0].break_reason


def test_numbers_from_a_generator_of_the_system_are_not_frozen() -> None:
    class Draws(Net):
        def __init__(self) -> None:
            super().__init__()
            self.held = random.SystemRandom()

        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * self.held.random()

    _, _, net = trained(Draws, True)
    assert net.python.runs == STEPS
    assert "it changes held" in net.graph_info()[0].break_reason


def test_a_layer_may_make_a_generator_for_its_parameters() -> None:
    class Starts(layer.Linear):
        def initialize(self, x: Tensor) -> None:
            super().initialize(x)
            self.W.copy_from_numpy(np.random.default_rng(3).random(self.W.shape, np.float32))

    class Nets(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = Starts(6)

    assert_alike(Nets, STEPS - 1)


BITS = np.random.PCG64(3)


def test_numbers_drawn_from_a_bit_generator_are_not_frozen() -> None:
    class Draws(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * BITS.random_raw() * 2.0**-64

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        global BITS
        BITS = np.random.PCG64(3) if step == 0 else BITS
        return net(x, y)

    assert_alike(Draws, 0, "variable BITS", call=call)


def test_a_number_that_every_call_gives_anew_ends_up_eager_and_says_why(monkeypatch: Any) -> None:
    monkeypatch.setattr("singa_lite.record.records.MAX_MISSES", 2)

    class Numbered(Net):
        def train_one_batch(self, x: Tensor, y: Tensor, step: int) -> Any:  # type: ignore[override]
            return super().train_one_batch(x, y)

    net = assert_alike(
        Numbered, 0, "a number among the arguments", call=lambda net, step, x, y: net(x, y, step)
    )
    assert len(net.graph_info()) == 1


def test_a_variable_of_an_own_module_is_seen(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_settings.py").write_text("ALPHA = 1.0\n\n\ndef weighted(x):\n    return x * ALPHA\n")
    monkeypatch.syspath_prepend(tmp_path)
    own_settings = importlib.import_module("own_settings")
    monkeypatch.setitem(globals(), "own_settings", own_settings)

    class Reads(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * globals_of_settings()

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        own_settings.ALPHA = 1.0 if step < 3 else 0.5  # type: ignore[attr-defined]
        return net(x, y)

    assert_alike(Reads, STEPS - 2, call=call)


def globals_of_settings() -> Any:
    return own_settings.weighted(own_settings.ALPHA)  # type: ignore[name-defined]  # noqa: F821


def test_a_number_that_the_user_gave_the_optimizer_is_seen() -> None:
    class Reads(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * self.optimizer.scale  # type: ignore[attr-defined]

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        net.optimizer.scale = 1.0 if step < 3 else 0.5
        return net(x, y)

    assert_alike(Reads, STEPS - 2, call=call)


def by_lr(net: Any, loss: Tensor) -> None:
    for param, grad in autograd.backward(loss):
        net.optimizer.lr = 0.01 if param.name.startswith("first") else 0.1  # type: ignore[union-attr]
        net.optimizer.update(param, grad)


def by_initial_lr(net: Any, loss: Tensor) -> None:
    lr = net.optimizer.lr.init_value
    for param, grad in autograd.backward(loss):
        net.optimizer.lr.init_value = lr * (0.1 if param.name.startswith("first") else 1)  # type: ignore[union-attr]
        net.optimizer.update(param, grad)
    net.optimizer.lr.init_value = lr


@pytest.mark.parametrize("update", [by_lr, by_initial_lr])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_schedule_that_a_step_sets_is_not_frozen(update: Any, is_wrapped: bool) -> None:
    class Updates(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = self.loss_of(x, y)
            update(self, loss)
            self.optimizer.step()
            return loss

    def optimizer() -> Any:
        sgd = opt.SGD(schedule())
        return opt.DistOpt(sgd, communicator=LocalCommunicator(World())) if is_wrapped else sgd

    reason = {by_lr: "it sets lr of an optimizer", by_initial_lr: "it sets init_value of a schedule"}[update]
    assert_alike(Updates, 0, reason, optimizer=optimizer)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda device: device.SetRandSeed(3), "it sets the seed of a device"),
        (lambda device: device.set_random_state((3, 5)), "it sets the random state of a device"),
        (lambda device: device.get_random_state(), "it reads the random state of a device"),
    ],
    ids=["seed", "set", "read"],
)
def test_a_random_stream_that_a_step_sets_is_not_frozen(change: Any, reason: str) -> None:
    class Draws(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            change(get_default_device())
            return super().loss_of(x, y + Tensor(y.shape).gaussian(0, 1))

    assert_alike(Draws, 0, reason)


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda s: s.epoch, ""),
        (lambda s: len(s), ""),
        (lambda s: s.position, "it reads the position of a sampler"),
        (lambda s: s.state_dict()["epoch"], "it reads the position of a sampler"),
    ],
    ids=["epoch", "length", "position", "state"],
)
def test_the_place_of_a_sampler_is_not_frozen(read: Any, reason: str) -> None:
    class Reads(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * float(1 + read(sampler))

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        nonlocal sampler, batches
        if step == 0:
            sampler = data.ShardedSampler(6, 2, 0, 1)
            batches = chain(sampler, sampler)
        next(batches)
        return net(x, y)

    sampler = batches = None
    net = assert_alike(Reads, 0 if reason else None, reason, call=call)
    if not reason:
        assert net.python.runs < STEPS  # some steps were replayed


MEASURED = (
    *("bytes_sent", "total_bytes_sent", "bytes_payload", "total_bytes_payload", "wait_s", "step_seconds"),
    *("bytes_inside_hosts", "bytes_between_hosts"),
)


def read_what_is_measured(communicator: Any, use_graph: bool) -> list[Any]:
    found = []
    for name in MEASURED:

        class Reads(Net):
            measured = name

            def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
                value = getattr(self.optimizer, self.measured)
                is_time = self.measured in ("wait_s", "step_seconds")
                return super().loss_of(x, y) * float(bool(value) if is_time else 1 + value)

        results, states, net = trained(
            Reads, use_graph, lambda: opt.DistOpt(opt.SGD(0.001), communicator=communicator), communicator
        )
        found.append((name, results, states, [info.break_reason for info in net.graph_info()]))
    return found


def test_what_is_measured_of_steps_is_not_frozen() -> None:
    eager, graph = (run_ranks(read_what_is_measured, 2, use_graph) for use_graph in (False, True))
    for mine, theirs in zip(chain(*eager), chain(*graph), strict=True):
        name = mine[0]
        if name.startswith(("bytes", "total")):  # no time, and "total" goes on
            assert mine[:3] == theirs[:3]
        assert theirs[3] == [f"it reads {name}, which a replay would not do"]


FADING = opt.ExponentialDecay(1.0, 1, 0.5)


def test_a_schedule_that_a_step_calls_is_seen() -> None:
    class Reads(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * FADING.call(2)

    def call(net: Any, step: int, x: Tensor, y: Tensor) -> Any:
        FADING.decay_rate = 0.5 if step < 3 else 0.8
        return net(x, y)

    assert_alike(Reads, STEPS - 2, call=call)


class Counted(opt.DecayScheduler):
    """Falls at every call."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.calls = 0

    def call(self, step: int) -> float:
        self.calls += 1
        return 0.1 / self.calls


def test_a_schedule_that_counts_its_calls_counts_those_of_replays() -> None:
    class Reads(Net):
        def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss_of(x, y) * (1.0 if self.optimizer.lr is not None else 0.5)

    assert_alike(Reads, STEPS - 1, optimizer=lambda: opt.SGD(Counted(), momentum=0.9))


@pytest.mark.parametrize("name", ["__call__", "call", "backward_and_update"])
def test_an_optimizer_that_overrides_the_whole_update_is_not_frozen(name: str) -> None:
    class Skips(opt.SGD):
        calls = 0

        def every_other(self, loss: Tensor) -> None:
            self.calls += 1
            for param, grad in list(autograd.backward(loss)):
                if self.calls % 2:
                    self.update(param, grad)
            if name != "call":
                self.step()

    kind = type("Own", (Skips,), {name: Skips.every_other})

    class Updates(Net):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
            loss = self.loss_of(x, y)
            getattr(self.optimizer, "__call__" if name == "call" else name)(loss)
            return loss

    assert_alike(Updates, 0, "overrides every_other", optimizer=lambda: kind(0.1))
