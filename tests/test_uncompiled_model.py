# SPDX-License-Identifier: Apache-2.0
"""Training a model that was not compiled gives what the compiled model gives, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.device import get_default_device
from singa_lite.errors import CommError, GraphError, OptionError, ShapeError
from singa_lite.sync import find_schemes
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first

STEPS = 6


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.conv = layer.Conv2d(3, 3, bias=False)
        self.norm = layer.BatchNorm2d()
        self.relu = layer.ReLU()
        self.flatten = layer.Flatten()
        self.linear = layer.Linear(4)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.flatten(self.relu(self.norm(self.conv(x)))))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss)
        return out, loss


class OwnAttribute(Net):
    """As SINGA's transformer: what trains is in an attribute of the user's own."""

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        out = self.forward(x)
        loss = self.loss(out, y)
        self.sgd(loss)
        return out, loss


class Frozen(Net):
    """What is trained is chosen by name."""

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer.update_all(
            [(param, grad) for param, grad in autograd.backward(loss) if param.name.startswith("linear")]
        )
        self.optimizer.step()
        return out, loss


class TwoLosses(Net):
    """The layers behind the second loss have no parameters yet when the first is."""

    def __init__(self) -> None:
        super().__init__()
        self.other = layer.Linear(4)

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        results = super().train_one_batch(x, y)
        self.optimizer(self.loss(self.other(self.flatten(x)), y))
        return results

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not autograd.training:  # while it is compiled
            self.other(self.flatten(x))
        return out


class MomentumByName(opt.Optimizer):
    """As SINGA's users write one: momentum by the parameter's name."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.momenta: dict[str, Any] = {}

    def apply(self, name: str, value: Tensor, grad: Tensor) -> None:
        self.momenta[name] = self.momenta.get(name, 0) * 0.9 + to_numpy(grad)
        value -= Tensor(data=self.momenta[name] * np.float32(0.1))

    def get_states(self) -> dict[str, np.ndarray]:
        return super().get_states() | {f"momentum of {name}": each for name, each in self.momenta.items()}

    def set_states(self, states: dict[str, np.ndarray]) -> None:
        own = {name: value for name, value in states.items() if name.startswith("momentum of ")}
        super().set_states({name: value for name, value in states.items() if name not in own})
        self.momenta = {name.removeprefix("momentum of "): value for name, value in own.items()}


def batch(step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(step)
    return Tensor(data=rng.standard_normal((8, 2, 6, 6))), Tensor(data=rng.integers(0, 4, 8))


def states_of(net: Net) -> dict[str, np.ndarray]:
    optimizer = net.optimizer or net.sgd
    return {name: to_numpy(value) for name, value in net.get_states().items()} | optimizer.get_states()


def alone(optimizer: opt.Optimizer, **options: Any) -> opt.DistOpt:
    return opt.DistOpt(optimizer, communicator=LocalCommunicator(World()), **options)


def decaying() -> opt.SGD:
    return opt.SGD(opt.ExponentialDecay(0.1, 1, 0.5, True), momentum=0.9)


OPTIMIZERS: dict[str, Callable[[], opt.Optimizer]] = {
    "SGD": lambda: opt.SGD(0.1, 0.9),
    "Adam": lambda: opt.Adam(0.01),
    "by name": MomentumByName,
    "accumulate": lambda: alone(opt.Adam(0.01), accumulate=2, clip_norm=1.0),
    **{
        name: lambda name=name: alone(decaying(), dist_option=name)  # type: ignore[misc]
        for name in sorted({scheme.names[0] for scheme in find_schemes().values()})
    },
}


@pytest.fixture(autouse=True)
def evaluation_afterwards() -> Iterator[None]:
    yield
    autograd.training = False


CLASSES = (Net, OwnAttribute, TwoLosses)


@slow_but_first(
    ("kind", "optimizer"),
    [
        *[(kind, "SGD") for kind in CLASSES],
        (Frozen, "SGD"),
        *[(kind, optimizer) for kind in CLASSES for optimizer in OPTIMIZERS if optimizer != "SGD"],
    ],
    count=4 + len(OPTIMIZERS),
)
def test_it_gives_the_bits_of_the_compiled_model(kind: type[Net], optimizer: str, tmp_path: Path) -> None:
    ends = []
    for compiles in (True, False):
        get_default_device().SetRandSeed(5)
        net = kind()
        if kind is OwnAttribute:
            net.sgd = OPTIMIZERS[optimizer]()
        else:
            net.set_optimizer(OPTIMIZERS[optimizer]())
        if compiles:
            net.compile([batch(0)[0]])
        net.train()
        losses = [to_numpy(net(*batch(step))[1]) for step in range(STEPS)]
        ends.append(states_of(net) | {"losses": np.array(losses)})
        net.save_states(tmp_path / f"{compiles}.zip")
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        assert value.tobytes() == ends[1][name].tobytes(), name


@pytest.mark.parametrize("optimizer", ["SGD", "int8", "randomK", "sign", "localSGD", "partialUpdate"])
def test_it_is_resumed_bit_for_bit_by_a_compiled_model(optimizer: str, tmp_path: Path) -> None:
    first, second = Net(), Net()
    for net in (first, second):
        net.set_optimizer(OPTIMIZERS[optimizer]())
    first.train()
    for step in range(3):
        first(*batch(step))
    first.save_states(tmp_path / "a.zip")
    second.compile([batch(0)[0]])
    second.load_states(tmp_path / "a.zip")
    for net in (first, second):
        for step in range(3, STEPS):
            net(*batch(step))
    ends = [states_of(net) for net in (first, second)]
    assert {name: value.tobytes() for name, value in ends[0].items()} == {
        name: value.tobytes() for name, value in ends[1].items()
    }


def test_steps_after_the_first_are_recorded() -> None:
    get_default_device().SetRandSeed(5)
    nets = Net(), Net()
    for net in nets:
        net.set_optimizer(opt.SGD(0.1, 0.9))
        net.train()
    nets[0].graph(True)
    nets[1].compile([batch(0)[0]])
    nets[0](*batch(0))
    nets[1].set_states({name: to_numpy(value) for name, value in nets[0].get_states().items()})
    nets[1].optimizer.set_states(nets[0].optimizer.get_states())
    for step in range(1, STEPS):
        losses = [to_numpy(net(*batch(step))[1]) for net in nets]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    assert [info.break_reason for info in nets[0].graph_info()] == [None]


def test_parameters_are_named_before_the_optimizer_has_them() -> None:
    class Watching(opt.SGD):
        names: tuple[str, ...] = ()

        def prepare(self, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
            super().prepare(params, buffers)
            self.names = (*params, *buffers)

        def update_all(self, pairs: Any) -> None:
            pairs = list(pairs)
            assert {param.name for param, _ in pairs} < set(self.names)
            super().update_all(pairs)

    net = Net()
    net.set_optimizer(Watching(0.1))
    net.train()
    net(*batch(0))
    assert net.optimizer.names[:2] == ("conv.W", "norm.scale")


def test_within_another_model_it_is_an_error() -> None:
    inner, (x, y) = Net(), batch(0)
    inner.set_optimizer(opt.SGD(0.1))
    inner.train()

    class Outer(model.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, y)

        train_one_batch = forward

    outer = Outer()
    outer.set_optimizer(opt.SGD(0.1))
    with pytest.raises(GraphError, match=r"Net: call compile\(\[inputs\]\) before"):
        outer.compile([x])
    outer.train()
    with pytest.raises(GraphError, match=r"Net: call compile\(\[inputs\]\) before"):
        outer(x)
    with autograd.no_grad(), pytest.raises(GraphError, match=r"Net: call compile\(\[inputs\]\) before"):
        inner(x, y)
    assert not inner.get_params() and inner.optimizer.step_counter == 0


def trains(communicator: Communicator) -> str:
    net = Net()
    net.set_optimizer(opt.DistOpt(opt.SGD(0.1), communicator=communicator))
    net.train()
    with pytest.raises(GraphError) as raised:
        net(*batch(communicator.rank))
    assert not net.get_params()
    return str(raised.value)


def test_where_ranks_must_begin_alike_it_is_an_error() -> None:
    assert all("Net: call compile([inputs]) before" in text for text in run_ranks(trains, 2))
    net = Net()
    net.set_optimizer(alone(opt.SGD(0.1), order="fixed", microbatches=2))
    net.train()
    with pytest.raises(GraphError, match=r"Net: call compile\(\[inputs\]\) before"):
        net(*batch(0))
    assert not net.get_params()


def test_an_optimizer_that_has_no_hash_trains_it() -> None:
    class Compared(opt.SGD):
        def __eq__(self, other: object) -> bool:
            return True

    net = Net()
    net.set_optimizer(Compared(0.1))
    net.train()
    net(*batch(0))
    assert net.optimizer.step_counter == 1


@pytest.mark.parametrize("fails_at", ["loss", "update"])
def test_a_step_that_fails_may_be_tried_again(fails_at: str, tmp_path: Path) -> None:
    class Failing(opt.SGD):
        fails = fails_at == "update"

        def update_all(self, pairs: Any) -> None:
            if self.fails:
                self.fails = False
                raise ZeroDivisionError
            super().update_all(pairs)

    get_default_device().SetRandSeed(5)
    net, other, (x, y) = Net(), Net(), batch(0)
    for each in (net, other):
        each.set_optimizer(Failing(0.1, 0.9))
        each.train()
    with pytest.raises(ShapeError if fails_at == "loss" else ZeroDivisionError):
        net(x, Tensor(data=np.zeros(3, np.int64)) if fails_at == "loss" else y)
    with pytest.raises(GraphError, match="has no parameters yet"):
        net.save_states(tmp_path / "unused.zip")
    other.optimizer.fails = False
    other.compile([x])
    other.set_params({name: to_numpy(param) for name, param in net.get_params().items()})
    net(x, y)
    other(x, y)
    assert net.optimizer.step_counter == 1
    mine, theirs = (
        {name: to_numpy(p).tobytes() for name, p in each.get_params().items()} for each in (net, other)
    )
    assert mine == theirs


def test_two_parameters_of_one_name_are_an_error_before_the_update() -> None:
    net, (x, y) = OwnAttribute(), batch(0)
    net.sgd = opt.SGD(0.1)
    setattr(net, "linear.W", Tensor((1,), requires_grad=True, stores_grad=True))
    net.train()
    for _ in range(2):
        with pytest.raises(GraphError, match=r"two of its parameters or buffers are called 'linear.W'"):
            net(x, y)
    assert net.sgd.step_counter == 0


def begins_with_momentum(communicator: Communicator, used_by: str) -> Any:
    """The error, or the states, with a DistOpt around an optimizer that each rank has used on its own data."""
    get_default_device().SetRandSeed(5)
    sgd, net = opt.SGD(0.1, 0.9), Net()
    net.set_optimizer(sgd)
    net.compile([batch(0)[0]])
    if used_by == "all" or communicator.rank == 0:
        net(*batch(communicator.rank))
    dist = opt.DistOpt(sgd, communicator=communicator)
    with pytest.raises(OptionError, match="is inside a DistOpt of 3 ranks"):
        net(*batch(1))
    net.set_optimizer(dist)
    try:
        net(*batch(2 + communicator.rank))
    except CommError as error:
        return str(error)
    return {name: value.tobytes() for name, value in states_of(net).items() if "running" not in name}


def test_an_optimizer_that_all_ranks_have_used_before_it_is_wrapped_goes_on_as_rank_0s() -> None:
    first, *others = run_ranks(begins_with_momentum, 3, "all")
    assert any("momentum" in name for name in first) and all(each == first for each in others)


def test_an_optimizer_that_one_rank_has_used_before_it_is_wrapped_is_an_error() -> None:
    for text in run_ranks(begins_with_momentum, 3, "rank 0"):
        assert (
            "the ranks differ in their optimizers: the number of steps made is 1 on rank 0 but 0" in text
        ), text


def drops_its_dist_opt(communicator: Communicator) -> int:
    sgd, net = opt.SGD(0.1), Net()
    net.set_optimizer(opt.DistOpt(sgd, communicator=communicator))
    net.compile([batch(0)[0]])
    net(*batch(communicator.rank))
    net.optimizer = None  # nobody else holds it
    net.set_optimizer(sgd)
    net(*batch(communicator.rank))
    return sgd.step_counter


def test_what_a_dist_opt_wrapped_that_is_gone_trains_alone() -> None:
    assert run_ranks(drops_its_dist_opt, 2) == [2, 2]
