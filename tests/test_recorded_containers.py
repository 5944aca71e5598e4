# SPDX-License-Identifier: Apache-2.0
"""Recorded steps whose lists, dicts, dataclasses and parameters are held elsewhere too: they stay the same objects."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt, tensor
from singa_lite.errors import GraphError
from singa_lite.opt.base import Pairs
from singa_lite.tensor import Tensor, from_numpy, to_numpy

STEPS = 6


def batch(number: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(number)
    return tuple(from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in ((4, 3), (4, 1)))


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.loss = layer.Linear(1), layer.MeanSquareError()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def compiled(net: model.Model, use_graph: bool, optimizer: Any = None) -> model.Model:
    net.set_optimizer(optimizer or opt.SGD(lr=0.05))
    net.compile([batch()[0]], use_graph=use_graph)
    for value in net.get_params().values():
        value.set_value(0.1)
    return net


def losses(net: model.Model, before: Callable[[int], None] = lambda number: None) -> list[float]:
    found = []
    for number in range(STEPS):
        before(number)
        found.append(to_numpy(net(*batch(number))).item())
    autograd.training = False
    return found


def assert_same(
    make: Callable[[], Net], before: Callable[[Net, int], None] = lambda net, number: None
) -> Net:
    """Train eagerly and recorded, compare the losses; return the recorded model, of which some step was recorded."""
    eager, recorded = compiled(make(), False), compiled(make(), True)
    expected = losses(eager, lambda number: before(eager, number))
    np.testing.assert_allclose(losses(recorded, lambda number: before(recorded, number)), expected, rtol=1e-5)
    assert any(info.num_kernels and info.break_reason is None for info in recorded.graph_info())
    return recorded


# ---- containers that two hold ------------------------------------------------------------------------


@dataclass
class Context:
    mask: Any = None
    more: dict[str, Any] = field(default_factory=dict)


class Enter(layer.Layer):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context, self.linear = context, layer.Linear(3)

    def forward(self, x: Tensor) -> Tensor:
        self.context.mask = self.context.more["mask"] = tensor.sign(x)
        return autograd.tanh(self.linear(x))


class Leave(layer.Layer):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context, self.linear = context, layer.Linear(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.context.mask * self.context.more["mask"] * self.context.mask)


class Sharing(Net):
    def __init__(self) -> None:
        super().__init__()
        context = Context()
        self.out, self.enter = Leave(context), Enter(context)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.enter(x))


def test_a_dataclass_that_two_layers_hold_stays_one() -> None:
    net = assert_same(Sharing)
    assert net.out.context is net.enter.context
    assert net.out.context.more is net.enter.context.more


def test_layers_that_share_no_more_are_not_replayed_as_if_they_did() -> None:
    def part(net: Sharing, number: int) -> None:
        if number == 3:
            old = net.enter.context
            net.enter.context = Context(old.mask, dict(old.more))

    assert_same(Sharing, part)


class Gate(layer.Layer):
    def __init__(self, state: dict[str, int]) -> None:
        super().__init__()
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        return x * 3.0 if self.state["on"] else x


class Gated(Net):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"gate": {"on": 0}}, [[0], [1]]
        self.gate = Gate(self.state[0]["gate"])
        self.first = self.state[1][0]

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.out(x)) * (1.0 + self.first[0])

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().train_one_batch(x, y)
        self.state[0]["gate"]["on"] = 1 - self.state[0]["gate"]["on"]
        self.state[1][0][0] = (self.state[1][0][0] + 1) % 2
        return loss


def test_a_dict_in_a_dict_and_a_list_in_a_list_stay_those_of_a_layer() -> None:
    net = assert_same(Gated)
    assert net.gate.state is net.state[0]["gate"] and net.first is net.state[1][0]


class Counting(Net):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().train_one_batch(x, y) * self.context.more.get("weight", 1.0)
        self.context.mask = loss + 0.0
        return loss


def test_a_dataclass_that_the_script_keeps_is_the_models() -> None:
    contexts: list[Context] = []

    def make() -> Counting:
        contexts.append(Context())
        return Counting(contexts[-1])

    def change(net: Counting, number: int) -> None:
        contexts[-1 if net.context is contexts[-1] else 0].more["weight"] = 1.0 if number < 4 else 0.5

    net = assert_same(make, change)
    assert net.context is contexts[1]
    np.testing.assert_allclose(to_numpy(contexts[1].mask), to_numpy(contexts[0].mask), rtol=1e-5)


class MakesShared(Net):
    """Sets two attributes to one new dict in each step, and changes one of them in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.one: dict[str, Any] = {}
        self.other: dict[str, Any] = {}

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        self.one["weight"] = 2.0
        loss = super().train_one_batch(x, y) * self.other.get("weight", 1.0)
        self.one = self.other = {"loss": loss * 1.0}
        return loss


def test_a_dict_that_a_step_makes_for_two_attributes_is_one_after_a_replay() -> None:
    net = assert_same(MakesShared)
    assert net.one is net.other


class BecomesOne(Net):
    """Has two equal dicts, of which a step makes one, by which nothing else changes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = {"n": 0.0}, {"n": 0.0}

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        self.one["n"] = 1.0
        loss = super().train_one_batch(x, y) * (1.0 + self.other["n"])
        self.one["n"] = 0.0
        self.other = self.one
        return loss


class HandsOn(Net):
    """Hands a list on to another attribute, and begins a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.previous: list[float] = []
        self.current: list[float] = []

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().train_one_batch(x, y) * (1.0 + len(self.previous))
        self.current.append(1.0)
        self.previous, self.current = self.current, []
        return loss


class Swaps(Net):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = {"weight": 1.0}, {"weight": 1.0}

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().train_one_batch(x, y) * self.front["weight"]
        self.front, self.back = self.back, self.front
        return loss


class Resets(Net):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[float] = []

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        self.log = list(self.log)
        return super().train_one_batch(x, y)


@pytest.mark.parametrize("kind", [BecomesOne, HandsOn, Swaps, Resets])
def test_which_of_equal_lists_and_dicts_an_attribute_holds_counts(kind: type[Net]) -> None:
    found: list[list[int]] = []
    for use_graph in (False, True):
        net = kind()
        known: list[object] = []  # all that were ever there, in the order of their coming

        def note(number: int, net: Net = net, known: list[object] = known) -> None:
            for value in (value for value in vars(net).values() if type(value) in (list, dict)):
                if not any(value is each for each in known):
                    known.append(value)
                found[-1].append([value is each for each in known].index(True))

        found.append([])
        expected = losses(compiled(net, use_graph), note)
        if not use_graph:
            eager = expected
    np.testing.assert_allclose(expected, eager, rtol=1e-5)
    assert found[0] == found[1]
    assert any(info.num_kernels for info in net.graph_info())


def test_a_dict_that_is_changed_between_steps_counts_where_steps_swap_two() -> None:
    kept: dict[int, dict[str, float]] = {}

    def change(net: Swaps, number: int) -> None:
        kept.setdefault(id(net), net.front)
        kept[id(net)]["weight"] = 1.0 if number < 4 else 2.0

    assert_same(Swaps, change)


class Meter(dict):
    def __setitem__(self, key: str, value: float) -> None:
        super().__setitem__(key, self.get(key, 0.0) + value)


class Metered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.state = [Meter(n=1.0), 0]

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().train_one_batch(x, y) * self.state[0]["n"]
        self.state[1] = 1 - self.state[1]
        return loss


def test_a_dict_whose_items_are_set_otherwise_is_not_copied() -> None:
    expected = losses(compiled(Metered(), False))
    net = compiled(Metered(), True)
    np.testing.assert_allclose(losses(net), expected, rtol=1e-5)
    assert net.state[0] == {"n": 1.0}


class TakesOptions(Net):
    def train_one_batch(self, x: Tensor, y: Tensor, options: dict[str, float]) -> Tensor:
        if not hasattr(self, "kept"):
            self.kept = {"options": options}
        self.kept["options"]["n"] += 1.0
        return super().train_one_batch(x, y) * options["n"] * self.kept["options"]["n"]


@pytest.mark.parametrize("is_own", [False, True])
def test_a_dict_of_the_arguments_that_the_model_holds_is_the_callers(is_own: bool) -> None:
    found = []
    for use_graph in (False, True):
        net, options = compiled(TakesOptions(), use_graph), {"n": 1.0}
        if is_own:
            net.kept = {"options": options}
        found.append([to_numpy(net(*batch(number), options)).item() for number in range(4)])
        assert net.kept["options"] is options and options["n"] == 5.0
    autograd.training = False
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


# ---- parameters ----------------------------------------------------------------------------------------


class Returns(Net):
    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        loss = self.loss(self.forward(x), y)
        return loss, list(autograd.backward(loss))


def test_parameters_that_a_step_returns_are_the_models() -> None:
    found = []
    for use_graph in (False, True):
        sgd = opt.SGD(lr=0.05, momentum=0.9)
        net = compiled(Returns(), use_graph, sgd)
        for number in range(STEPS):
            _, pairs = net(*batch(number))
            assert {id(param) for param, _ in pairs} == set(map(id, net.get_params().values()))
            for param, grad in pairs:
                sgd.update(param, grad)
            sgd.step()
        found.append(
            {name: np.asarray(value) for name, value in {**net.get_params(), **sgd.get_states()}.items()}
        )
    autograd.training = False
    assert found[0].keys() == found[1].keys()
    assert "it returns a parameter" in net.graph_info()[0].break_reason


class Scale(layer.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Keyed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.behind = {Scale(): 1.0}

    def forward(self, x: Tensor) -> Tensor:
        x = self.out(x)
        for scale, weight in self.behind.items():
            x = scale(x) * weight
        return x


def test_a_layer_that_is_a_key_of_a_dict_is_looked_at() -> None:
    def change(net: Keyed, number: int) -> None:
        next(iter(net.behind)).factor = 1.0 if number < 3 else 0.1

    assert_same(Keyed, change)


# ---- inputs and optimizers -----------------------------------------------------------------------------


class Reads(Net):
    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().train_one_batch(x, y)
        to_numpy(loss).item()
        return loss


@pytest.mark.parametrize("use_graph", [False, True])
def test_a_step_that_runs_eagerly_leaves_what_another_models_backward_reads(use_graph: bool) -> None:
    peer, net = compiled(Net(), False), compiled(Reads(), use_graph)
    x, y = batch()
    autograd.training = True
    loss = peer.loss(peer.forward(x), y)
    net(x, y)
    assert len(list(autograd.backward(loss))) == 2
    autograd.training = False


def test_an_input_of_a_failed_step_keeps_its_operator() -> None:
    net = compiled(Net(), True)
    x, y = batch()
    autograd.training = True
    result = net(x, y)
    weighted = x * result
    for _ in range(3):
        with pytest.raises(GraphError):
            net(weighted, y)
    autograd.training = False


class Pair(namedtuple("Pair", "x y")):
    def __new__(cls, both: tuple[Tensor, Tensor]) -> Pair:
        return super().__new__(cls, *both)


class TakesPair(Net):
    def train_one_batch(self, pair: Pair) -> Pair:
        loss = super().train_one_batch(*pair)
        return Pair((loss, loss * 2.0))


def test_a_namedtuple_may_have_a_constructor_of_its_own() -> None:
    net = compiled(TakesPair(), True)
    for number in range(3):
        result = net(Pair(batch(number)))
        assert isinstance(result, Pair) and to_numpy(result.y) == 2 * to_numpy(result.x)
    autograd.training = False


@dataclass
class PlainRule(opt.Optimizer):
    rate: float = 0.1
    is_recordable = True

    def __post_init__(self) -> None:
        super().__init__(self.rate)

    def update_all(self, pairs: Pairs) -> None:
        for param, grad in pairs:
            param -= grad * self.rate


def test_an_optimizer_may_be_a_dataclass() -> None:
    expected = losses(compiled(Net(), False, PlainRule(0.05)))
    np.testing.assert_allclose(losses(compiled(Net(), True, PlainRule(0.05))), expected, rtol=1e-5)
