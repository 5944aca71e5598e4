# SPDX-License-Identifier: Apache-2.0
"""What a step reads in a roundabout way: private attributes, code in containers and arguments, classes, properties."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import random
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.tensor import Tensor, from_numpy, to_numpy

STEPS = 5
SCALE = 1.0


class Config:
    scale = 1.0


def scaled_loss(prediction: Tensor, target: Tensor) -> Tensor:
    return autograd.mse_loss(prediction, target) * SCALE


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = layer.Linear(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def scale(self) -> float:
        return 1.0

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y) * self.scale()
        self.optimizer(loss)
        return loss


def batch() -> tuple[Tensor, Tensor]:
    return from_numpy(np.ones((2, 3), np.float32)), from_numpy(np.ones((2, 1), np.float32))


def losses_of(
    make: Callable[[], Net], use_graph: bool, change: Callable[[Any, int], None], extra: tuple[Any, ...] = ()
) -> tuple[list[float], Net]:
    net = make()
    net.set_optimizer(opt.DistOpt(opt.SGD(0.01)))
    net.compile([batch()[0]], use_graph=use_graph)
    net.linear.W.set_value(0.5)
    found = []
    for step in range(STEPS):
        change(net, step)
        found.append(to_numpy(net(*batch(), *extra)).item())
    autograd.training = False
    return found, net


def assert_alike(make: Callable[[], Net], change: Any = lambda net, step: None, extra: Any = tuple) -> Net:
    (eager, _), (recorded, net) = (losses_of(make, use_graph, change, extra()) for use_graph in (False, True))
    np.testing.assert_allclose(recorded, eager, rtol=1e-5)
    assert len(set(eager)) == STEPS
    return net


# ---- attributes with private names -----------------------------------------------------------------


class Private(Net):
    """``_it`` and ``__it`` hold what ``make`` gives, of which ``read`` gives a number."""

    make: Callable[[], Any]
    read: Callable[[Any], float]

    def __init__(self) -> None:
        super().__init__()
        self._it = type(self).make()
        self.__it = type(self).make()


class ReadsPrivate(Private):
    def scale(self) -> float:
        return type(self).read(self._it)


class ReadsMangled(Private):
    def scale(self) -> float:
        return type(self).read(self._Private__it)  # type: ignore[attr-defined]


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def next(self) -> float:
        self.count += 1
        return float(self.count)


class Lazy:
    """Its count is made by the first call."""

    def next(self) -> float:
        self.count = getattr(self, "count", 0) + 1
        return float(self.count)


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "generator": (lambda: np.random.default_rng(0), lambda it: 1 + it.random()),
    "random": (lambda: random.Random(0), lambda it: 1 + it.random()),
    "iterator": (lambda: iter(range(1, 100)), lambda it: float(next(it))),
    "deque": (lambda: collections.deque([1.0]), lambda it: (it.append(it[-1] + 1), it[-1])[1]),
    "set": (lambda: {0}, lambda it: (it.add(len(it)), float(len(it)))[1]),
    "array": (lambda: np.zeros(1), lambda it: (np.add(it, 1, out=it), 1 + float(it[0]))[1]),
    "object": (Counter, Counter.next),
    "in a list": (lambda: [Counter()], lambda it: it[0].next()),
    "in a dict": (lambda: {"a": Counter()}, lambda it: it["a"].next()),
    "made": (Lazy, Lazy.next),
}


@pytest.mark.parametrize("kind", [ReadsPrivate, ReadsMangled])
@pytest.mark.parametrize("name", HOLDERS)
def test_an_attribute_with_a_private_name_is_looked_into(name: str, kind: Any) -> None:
    make, read = HOLDERS[name]
    net = assert_alike(type(kind.__name__, (kind,), {"make": staticmethod(make), "read": staticmethod(read)}))
    assert net.graph_info()[0].break_reason is not None


# ---- code that attributes and arguments hold -------------------------------------------------------


@dataclasses.dataclass
class Losses:
    mse: Any = scaled_loss


@dataclasses.dataclass
class Batch:
    x: Tensor
    y: Tensor

    def loss(self, prediction: Tensor) -> Tensor:
        return autograd.mse_loss(prediction, self.y) * SCALE


class Pair(collections.namedtuple("Pair", "x y")):
    factor = 1.0

    def loss(self, prediction: Tensor) -> Tensor:
        return autograd.mse_loss(prediction, self.y) * self.factor


class Held(Net):
    """Calls a loss that ``held`` holds."""

    pick: Callable[[Any], Any]
    held: Any = None

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = type(self).pick(self.held)(self.forward(x), y)
        self.optimizer(loss)
        return loss


class InList(Held):
    def __init__(self) -> None:
        super().__init__()
        self.held = [scaled_loss]

    pick = staticmethod(lambda held: held[0])


class InDict(Held):
    def __init__(self) -> None:
        super().__init__()
        self.held = {"mse": (scaled_loss,)}

    pick = staticmethod(lambda held: held["mse"][0])


class InDataclass(Held):
    def __init__(self) -> None:
        super().__init__()
        self.held = Losses()

    pick = staticmethod(lambda held: held.mse)


class ReadsClass(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config

    def scale(self) -> float:
        return self.config.scale


class ReadsSchedule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = opt.Constant(1.0)

    def scale(self) -> float:
        return self.schedule.init_value


class ReadsSpars(Net):
    def scale(self) -> float:
        return self.optimizer.spars


class ReadsClassOfPackage(Net):
    def scale(self) -> float:
        return self.linear.gain


class HasKeywordDefault(Net):
    def scale(self, *, factor: float = 1.0) -> float:
        return factor


class CallsMethodOfPackage(Net):
    def scale(self) -> float:
        return self.linear.scaled()


def first_of(alpha: float, beta: float) -> float:
    return alpha


class LoopsOverKeywords(Net):
    """Names attributes by a tuple that Python shares with the keywords of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments = SimpleNamespace(alpha=1.0, beta=1.0)

    def scale(self) -> float:
        product = 1.0
        for name in ("alpha", "beta"):
            product *= getattr(self.arguments, name)
        return product * first_of(alpha=1.0, beta=2.0)


class Kind(enum.Enum):
    GLOBAL = "global"

    def scale(self) -> float:
        return SCALE


class Name(str):
    def scale(self) -> float:
        return SCALE


class Chooses(Net):
    """Calls a method of what is as fixed as a number, and whose class it does not name."""

    def __init__(self, chosen: Any) -> None:
        super().__init__()
        self.chosen = [chosen]

    def scale(self) -> float:
        return self.chosen[0].scale()


class Meta(type):
    scale = 1.0


class OfMeta(metaclass=Meta):
    pass


class ReadsMetaclass(Net):
    def scale(self) -> float:
        return OfMeta.scale


class HasArray(Net):
    """Depends on the shape or the dtype of an array, of which only that changes."""

    def __init__(self, array: np.ndarray, changes: Any, read: Any) -> None:
        super().__init__()
        self.it, self.changes, self.read = array, changes, read

    def scale(self) -> float:
        return float(self.read(self.it))


def small() -> HasArray:
    shapes = [(24,), (12, 2), (8, 3), (6, 4), (4, 6)]
    return HasArray(np.ones(24, np.float32), ("shape", shapes), len)


def large() -> HasArray:
    shapes = [(2**22 >> step, 1 << step) for step in range(STEPS)]
    return HasArray(np.ones(2**22, np.float32), ("shape", shapes), lambda array: len(array) / 2**22)


def of_dtypes() -> HasArray:
    dtypes = [np.dtype([("a" * (step + 1), np.float32)]) for step in range(STEPS)]
    return HasArray(np.ones(4, np.float32), ("dtype", dtypes), lambda array: len(array.dtype.names[0]))


def change_scales(net: Any, step: int) -> None:
    global SCALE
    if isinstance(net, HasArray):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy 2.5 would rather have a new view
            setattr(net.it, net.changes[0], net.changes[1][step])
    SCALE = Meta.scale = Config.scale = Pair.factor = layer.Linear.gain = 1.0 + step  # type: ignore[attr-defined]
    HasKeywordDefault.scale.__kwdefaults__["factor"] = 1.0 + step
    net.optimizer.spars = 0.1 + 0.1 * step
    layer.Linear.scaled = lambda self, scale=1.0 + step: scale  # type: ignore[attr-defined]
    if isinstance(net, LoopsOverKeywords):
        net.arguments.alpha = 1.0 + step
    if isinstance(net, ReadsSchedule):
        net.schedule.init_value = 1.0 + step


@pytest.fixture(autouse=True)
def changed_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer.Linear, "gain", 1.0, raising=False)
    monkeypatch.setattr(layer.Linear, "scaled", lambda self: 1.0, raising=False)


@pytest.mark.parametrize(
    "kind",
    [
        *(InList, InDict, InDataclass, ReadsClass, ReadsSchedule, ReadsSpars, ReadsClassOfPackage),
        *(HasKeywordDefault, CallsMethodOfPackage, LoopsOverKeywords),
        *(
            partial(Chooses, Kind.GLOBAL),
            partial(Chooses, Name("a name")),
            ReadsMetaclass,
            small,
            large,
            of_dtypes,
        ),
    ],
)
def test_code_that_an_attribute_leads_to_is_followed(kind: Any) -> None:
    net = assert_alike(kind, change_scales)
    assert all(info.break_reason is None for info in net.graph_info())


class Registering(type):
    known: ClassVar[list[type]] = []

    def __init__(cls, *arguments: Any) -> None:
        super().__init__(*arguments)
        Registering.known.append(cls)


class Registered(metaclass=Registering):
    scale = 1.0


class Unused(Registered):
    def draw(self) -> float:
        return float(np.random.default_rng().random())


class HoldsRegistered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.held = Registered()

    def scale(self) -> float:
        return self.held.scale


def test_a_metaclass_that_knows_other_classes_does_not_have_them_read() -> None:
    _, net = losses_of(HoldsRegistered, True, lambda net, step: None)
    assert [info.break_reason for info in net.graph_info()] == [None]


class TakesFunction(Net):
    def train_one_batch(self, x: Tensor, y: Tensor, function: Any) -> Tensor:  # type: ignore[override]
        loss = function(self.forward(x), y)
        self.optimizer(loss)
        return loss


class TakesClass(Net):
    def train_one_batch(self, x: Tensor, y: Tensor, kind: Any) -> Tensor:  # type: ignore[override]
        loss = autograd.mse_loss(self.forward(x), y) * kind.scale
        self.optimizer(loss)
        return loss


class TakesKind(Net):
    def train_one_batch(self, x: Tensor, y: Tensor, kind: Any) -> Tensor:  # type: ignore[override]
        loss = autograd.mse_loss(self.forward(x), y) * kind.scale()
        self.optimizer(loss)
        return loss


class TakesBatch(Net):
    def train_one_batch(self, x: Tensor, y: Tensor, both: Any) -> Tensor:  # type: ignore[override]
        loss = both.loss(self.forward(both.x))
        self.optimizer(loss)
        return loss


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (TakesFunction, lambda: (scaled_loss,)),
        (TakesClass, lambda: (Config,)),
        (TakesBatch, lambda: (Batch(*batch()),)),
        (TakesBatch, lambda: (Pair(*batch()),)),
        (TakesKind, lambda: (Kind.GLOBAL,)),
    ],
    ids=["function", "class", "dataclass", "namedtuple", "enum"],
)
def test_code_of_arguments_is_followed(kind: Any, extra: Any) -> None:
    assert_alike(kind, change_scales, extra)


class CountsOnPackage(Net):
    def scale(self) -> float:
        layer.Linear.calls = getattr(layer.Linear, "calls", 0) + 1  # type: ignore[attr-defined]
        return float(layer.Linear.calls)  # type: ignore[attr-defined]


def test_an_attribute_that_a_step_makes_on_a_class_of_this_package_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer.Linear, "calls", 0, raising=False)
    for use_graph in (False, True):
        del layer.Linear.calls  # type: ignore[attr-defined]
        found, _ = losses_of(CountsOnPackage, use_graph, lambda net, step: None)
        assert layer.Linear.calls == STEPS and len(set(found)) == STEPS  # type: ignore[attr-defined]


class Reports(Net):
    """Has methods that the step does not call, of which one reads counters of DistOpt and one a file."""

    def __init__(self) -> None:
        super().__init__()
        self._file = io.StringIO("a line\n")

    def progress(self) -> str:
        return f"{self.optimizer.step_counter} {self.optimizer.lr_value} {self.optimizer.bytes_sent}"

    def line(self) -> str:
        return self._file.readline()


def test_methods_that_the_step_does_not_call_may_read_counters_and_files() -> None:
    net = assert_alike(Reports)
    assert [info.break_reason for info in net.graph_info()] == [None]
