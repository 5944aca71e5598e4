# SPDX-License-Identifier: Apache-2.0
"""Steps that depend on what a replay does not run: recorded ones give what eager ones give, or a typed error."""

from __future__ import annotations

import gc
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, device, layer, model, opt
from singa_lite.errors import GraphError
from singa_lite.tensor import Tensor, from_numpy, to_numpy

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
Y = np.arange(4, dtype=np.float32).reshape(4, 1)
STEPS = 6
HALF = STEPS // 2


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = layer.Linear(1)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return autograd.mse_loss(self.forward(x), y)

    def learn(self, x: Tensor, y: Tensor, factor: Any = 1.0) -> Tensor:
        loss = self.loss(x, y) * factor
        self.optimizer(loss)
        return loss


def call_of(net: Net, step: int) -> Any:
    return net(from_numpy(X), from_numpy(Y))


def run(
    step_of: Callable[..., Any],
    use_graph: bool,
    before: Callable[[int, Net], None] = lambda step, net: None,
    call: Callable[[Net, int], Any] = call_of,
    make_optimizer: Callable[[], opt.Optimizer] = lambda: opt.SGD(0.1),
) -> tuple[list[float], list[str | None]]:
    """What ``STEPS`` calls give of a net whose step is ``step_of``, and why any ran eagerly."""
    device.get_default_device().SetRandSeed(3)
    np.random.seed(1)
    net = type("Stepping", (Net,), {"train_one_batch": step_of})()
    net.set_optimizer(make_optimizer())
    net.compile([from_numpy(X)], use_graph=use_graph)
    net.set_params({name: np.full(param.shape, 0.1, np.float32) for name, param in net.get_params().items()})
    values = []
    for step in range(STEPS):
        before(step, net)
        values.append(float(np.ravel(to_numpy(call(net, step)))[0]))
    return values, [found.break_reason for found in net.graph_info()]


def assert_as_eager(step_of: Callable[..., Any], reason: str | None = None, **how: Any) -> None:
    """Both modes give the same; recorded steps are replayed, or ``reason`` is a part of why they are not."""
    expected, _ = run(step_of, False, **how)
    values, reasons = run(step_of, True, **how)
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    assert len(set(np.round(expected, 6))) > 1  # or all steps would be alike anyway
    if reason is None:
        assert reasons and not any(reasons), reasons
    else:
        assert any(reason in (found or "") for found in reasons), reasons


# ---- what a step finds ---------------------------------------------------------------------------------

CONFIG = types.ModuleType("project.config")
PROJECT = types.ModuleType("project")
PROJECT.config = CONFIG  # type: ignore[attr-defined]
CONFIG.factor = lambda: CONFIG.FACTOR  # type: ignore[attr-defined]


PRIORS: list[Tensor] = []


class Settings:
    __match_args__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class Raising:
    """Its attributes come from a dict, and what is not there raises a KeyError."""

    def __init__(self) -> None:
        self.__dict__["values"] = {"factor": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.values[name]


class Tags(set):
    factor = 1.0


class Warm(opt.DecayScheduler):
    heat = 1.0

    def call(self, step: int) -> float:
        return 0.1

    def temperature(self) -> float:
        return self.heat


class Scaling(opt.SGD):
    scale = 1.0
    calls = 0

    def scaled(self, loss: Tensor) -> Tensor:
        self.calls += 1
        return loss * float(self.calls)


class Noise(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = layer.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x)


SETTINGS, RAISING, TAGS, WARM = Settings(), Raising(), Tags(), Warm(0.1)
HELD = [from_numpy(np.ones(1, np.float32))]
BY_OBJECT = weakref.WeakKeyDictionary({SETTINGS: 1.0})
LIVING, NUMBERS = weakref.WeakSet([SETTINGS]), {1}
factor_of = operator.attrgetter("factor")
noise = Noise()


def by_match(self: Net, x: Tensor, y: Tensor) -> Tensor:
    match SETTINGS:
        case Settings(factor=factor):
            return self.learn(x, y, factor)
    raise AssertionError


def by_position(self: Net, x: Tensor, y: Tensor) -> Tensor:
    match SETTINGS:
        case Settings(factor):
            return self.learn(x, y, factor)
    raise AssertionError


def by_name_of_a_loop(self: Net, x: Tensor, y: Tensor) -> Tensor:
    for name in ("factor", "missing"):
        y = y * getattr(SETTINGS, name, 1.0)
    return self.learn(x, y)


def by_parameter(self: Net, x: Tensor, y: Tensor) -> Tensor:
    loss = self.loss(x, y)
    for param, grad in autograd.backward(loss):
        self.optimizer.update(param, grad * getattr(param, "factor", 1.0))
    self.optimizer.step()
    return loss


def by_parameters_name(self: Net, x: Tensor, y: Tensor) -> Tensor:
    loss = self.loss(x, y)
    for param, grad in autograd.backward(loss):
        if param.name != "frozen":
            self.optimizer.update(param, grad)
    self.optimizer.step()
    return loss


def setting(target: Any, name: str = "factor") -> Callable[[int, Net], None]:
    """Before the later steps, set an attribute of ``target`` (None: of the weight) from 1 to 0."""

    def before(step: int, net: Net) -> None:
        setattr(net.fc.W if target is None else target, name, 1.0 if step < HALF else 0.0)

    return before


def renaming(step: int, net: Net) -> None:
    if step == HALF:
        net.fc.W.name = "frozen"


READS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "a module within a package": (
        lambda self, x, y: self.learn(x, y, PROJECT.config.FACTOR),
        {"before": setting(CONFIG, "FACTOR")},
    ),
    "a function of a module within a package": (
        lambda self, x, y: self.learn(x, y, PROJECT.config.factor()),
        {"before": setting(CONFIG, "FACTOR")},
    ),
    "a module as a default": (
        lambda self, x, y, config=CONFIG: self.learn(x, y, config.FACTOR),
        {"before": setting(CONFIG, "FACTOR")},
    ),
    "a pattern": (by_match, {"before": setting(SETTINGS)}),
    "a pattern by position": (by_position, {"before": setting(SETTINGS)}),
    "names in a loop": (by_name_of_a_loop, {"before": setting(SETTINGS)}),
    "attrgetter": (lambda self, x, y: self.learn(x, y, factor_of(SETTINGS)), {"before": setting(SETTINGS)}),
    "a subclass of set": (lambda self, x, y: self.learn(x, y, TAGS.factor), {"before": setting(TAGS)}),
    "the length of a weak set": (
        lambda self, x, y: self.learn(x, y, float(len(LIVING))),
        {"before": lambda step, net: (LIVING.add if step < HALF else LIVING.discard)(SETTINGS)},
    ),
    "an element of a set of another type": (
        lambda self, x, y: self.learn(x, y, 1.0 if isinstance(next(iter(NUMBERS)), bool) else 0.0),
        {"before": lambda step, net: (NUMBERS.clear(), NUMBERS.add(1 if step < HALF else True))},
    ),
    "weak keys": (
        lambda self, x, y: self.learn(x, y, BY_OBJECT[SETTINGS]),
        {"before": lambda step, net: BY_OBJECT.__setitem__(SETTINGS, 1.0 if step < HALF else 0.0)},
    ),
    "a parameter's attribute": (by_parameter, {"before": setting(None)}),
    "a parameter's name": (by_parameters_name, {"before": renaming}),
    "an attribute of a Tensor in a list": (
        lambda self, x, y: self.learn(x, y, HELD[0].factor),
        {"before": setting(HELD[0])},
    ),
    "a class attribute of an optimizer": (
        lambda self, x, y: self.learn(x, y, self.optimizer.scale),
        {"before": setting(Scaling, "scale"), "make_optimizer": lambda: Scaling(0.1)},
    ),
    "a method of a schedule": (
        lambda self, x, y: self.learn(x, y, WARM.temperature()),
        {"before": setting(WARM, "heat")},
    ),
    "the mode of another model": (
        lambda self, x, y: self.learn(noise(x), y),
        {
            "before": lambda step, net: (
                noise.eval() if step == HALF else noise.__init__() if step == 0 else None
            )
        },
    ),
    "the sign of a zero": (
        lambda self, x, y, zero: self.learn(x, y, float(np.copysign(1, zero))),
        {"call": lambda net, step: net(from_numpy(X), from_numpy(Y), 0.0 if step < HALF else -0.0)},
    ),
    "the sign of a zero in a complex number": (
        lambda self, x, y, number: self.learn(x, y, float(np.copysign(1, number.imag))),
        {
            "call": lambda net, step: net(
                from_numpy(X), from_numpy(Y), complex(1, -0.0 if step < HALF else 0.0)
            )
        },
    ),
    "the end of a range with the same elements": (
        lambda self, x, y, numbers: self.learn(x, y, float(numbers.stop)),
        {"call": lambda net, step: net(from_numpy(X), from_numpy(Y), range(0, 2 if step < HALF else 3, 3))},
    ),
    "an object whose __getattr__ raises": (lambda self, x, y: self.learn(x, y, RAISING.factor), {}),
}


@pytest.mark.parametrize("what", READS)
def test_a_step_reads_anew(what, monkeypatch):
    for module in (PROJECT, CONFIG):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    step_of, how = READS[what]
    assert_as_eager(step_of, **how)


# ---- which Tensors they are ----------------------------------------------------------------------------

NONE = from_numpy(np.zeros(1, np.float32))
WEIGHTS: dict[Tensor, float] = {}


def is_a_sentinel(self: Net, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return self.learn(x, y) if weight is NONE else self.learn(x, y, weight)


def is_a_key(self: Net, x: Tensor, y: Tensor) -> Tensor:
    return self.learn(x, y, WEIGHTS.get(x, 1.0))


def keeps_an_input(self: Net, x: Tensor, y: Tensor) -> Tensor:
    before, self.kept = x if self.kept is None else self.kept, x
    return self.learn(before, y)


def keeps_what_it_has_not_seen(self: Net, x: Tensor, y: Tensor) -> Tensor:
    factor = 1.0
    if x is not self.kept:
        self.kept, factor = x, 3.0
    return self.learn(x, y, factor)


def with_a_key(net: Net, step: int) -> Tensor:
    x = from_numpy(X)
    WEIGHTS.clear()
    WEIGHTS[x] = 3.0
    return net(x, from_numpy(Y))


class OneBatch:
    """Calls a net with the same Tensor, filled anew before each step."""

    def __init__(self) -> None:
        self.x = from_numpy(X)

    def __call__(self, net: Net, step: int) -> Tensor:
        self.x.copy_from_numpy(X * (step + 1))
        return net(self.x, from_numpy(Y))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_sentinel_is_known(is_first):
    def with_or_without(net: Net, step: int) -> Tensor:
        weight = NONE if (step < HALF) is is_first else from_numpy(np.full(1, 2.0, np.float32))
        return net(from_numpy(X), from_numpy(Y), weight)

    # the record of a step without the sentinel is kept
    assert_as_eager(is_a_sentinel, call=with_or_without)


def test_a_key_is_known():
    assert_as_eager(is_a_key, "compares identities", call=with_a_key)


@pytest.mark.parametrize("step_of", [keeps_an_input, keeps_what_it_has_not_seen])
def test_an_input_that_is_kept_is_the_callers(step_of):
    expected, _ = run(step_of, False, call=OneBatch(), make_optimizer=lambda: opt.SGD(0.001))
    values, reasons = run(step_of, True, call=OneBatch(), make_optimizer=lambda: opt.SGD(0.001))
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    assert "it keeps an input in Stepping.kept" in str(reasons)


def views_a_parameter(self: Net, x: Tensor, y: Tensor) -> Tensor:
    with autograd.no_grad():
        self.kept = self.fc.W.reshape((-1,))
    return self.learn(x, y)


def decay_through_the_view(net: Net, step: int) -> Tensor:
    loss = call_of(net, step)
    net.kept *= 0.5
    return loss


def test_a_view_that_is_kept_shares_memory():
    assert_as_eager(
        views_a_parameter, "it sets kept to a view of another tensor", call=decay_through_the_view
    )


def keeps_a_gradient(self: Net, x: Tensor, y: Tensor) -> Tensor:
    loss = self.loss(x, y)
    loss.backward()
    seen = loss if self.kept is None else self.kept * 1.0
    self.kept = self.fc.W.grad
    for param in self.get_params().values():
        self.optimizer.update(param, param.grad)
        param.mark_grad_stale()
    self.optimizer.step()
    return seen


def test_what_else_holds_a_tensor_sees_the_first_step_too():
    assert_as_eager(keeps_a_gradient, "kept neither in its result nor")


def leaves_a_cycle(self: Net, x: Tensor, y: Tensor) -> Tensor:
    """An error that holds its own traceback holds this call's Tensors, until garbage is collected."""
    held: list[BaseException] = []
    try:
        raise ValueError
    except ValueError as error:
        held.append(error)
    return self.learn(x, y)


def test_tensors_that_only_garbage_holds_do_not_make_a_step_eager():
    gc.disable()
    try:
        assert_as_eager(leaves_a_cycle, None)
    finally:
        gc.enable()


def gives_a_parameter(self: Net, x: Tensor, y: Tensor) -> Tensor:
    self.learn(x, y)
    return self.fc.W


def test_a_parameter_in_the_first_result_goes_on_changing():
    results: list[Tensor] = []

    def first(net: Net, step: int) -> Tensor:
        results.append(call_of(net, step))
        return results[-STEPS:][0] if step else results[-1]

    expected, _ = run(gives_a_parameter, False, call=lambda net, step: first(net, step))
    results.clear()
    values, _ = run(gives_a_parameter, True, call=lambda net, step: first(net, step))
    np.testing.assert_allclose(values, expected, rtol=1e-5)


# ---- what a step does ----------------------------------------------------------------------------------


def goes_on_after_an_error(self: Net, x: Tensor, y: Tensor) -> Tensor:
    loss = self.loss(x, y)
    try:
        self.optimizer(loss)
    except ArithmeticError:
        return self.loss(x, x.clone()[:, :1] * 0.0)
    return loss


def test_an_error_that_a_step_catches_is_for_that_step_alone():
    def with_a_bad_batch(net: Net, step: int) -> Tensor:
        return net(from_numpy(X), from_numpy(np.full_like(Y, np.inf) if step == 0 else Y))

    assert_as_eager(
        goes_on_after_an_error,
        call=with_a_bad_batch,
        make_optimizer=lambda: opt.DistOpt(opt.SGD(0.1), check_finite="raise"),
    )


def only_with_gradients(self: Net, x: Tensor, y: Tensor) -> Tensor:
    loss = self.loss(x, y)
    if loss.creator is not None:
        self.optimizer(loss)
    return loss


def test_without_gradients_nothing_is_trained():
    def every_other(net: Net, step: int) -> Tensor:
        if step % 2 == 0:
            return call_of(net, step)
        with autograd.no_grad():
            return call_of(net, step)

    assert_as_eager(only_with_gradients, call=every_other)


def counts_in_the_optimizer(self: Net, x: Tensor, y: Tensor) -> Tensor:
    loss = self.optimizer.scaled(self.loss(x, y))
    self.optimizer(loss)
    return loss


def test_a_method_that_an_optimizer_adds_is_followed():
    assert_as_eager(counts_in_the_optimizer, "it changes", make_optimizer=lambda: Scaling(0.01))


class Phased(opt.SGD):
    """Scales updates by what the step sets."""

    phase = 1.0

    def update_all(self, pairs: Any) -> None:
        super().update_all([(param, grad * self.phase) for param, grad in pairs])


def two_phases(self: Net, x: Tensor, y: Tensor) -> Tensor:
    self.optimizer.phase = 2.0
    self.learn(x, y)
    self.optimizer.phase = 0.5
    return self.learn(x, y)


def test_each_update_of_a_step_sees_what_the_step_has_set_before_it():
    assert_as_eager(two_phases, "it changes _optimizer.phase", make_optimizer=lambda: Phased(0.1))


@pytest.mark.parametrize("where", ["attribute", "global variable"])
def test_what_was_recorded_before_the_step_has_one_gradient(where: str) -> None:
    def adds(self: Net, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(x, y) + autograd.reduce_sum(self.kept if where == "attribute" else PRIORS[0])
        self.optimizer(loss)
        return loss

    def record_first(step: int, net: Net) -> None:
        if step == 0:
            autograd.training = True
            encoder = Tensor((3,), stores_grad=True)
            PRIORS[:] = [encoder * 2.0]
            net.kept = PRIORS[0] if where == "attribute" else None

    for use_graph in (False, True):
        with pytest.raises(GraphError, match="used up"):
            run(adds, use_graph, record_first)
        autograd.training = False


def seeds(self: Net, x: Tensor, y: Tensor) -> Tensor:
    np.random.seed(7)
    return self.learn(x, y, float(np.random.rand()))


def test_a_step_that_seeds_leaves_the_state_behind_it():
    def draw(net: Net, step: int) -> Tensor:
        if step == 1:  # the state before the step is that behind it
            np.random.seed(7)
            np.random.rand()
        call_of(net, step)
        return from_numpy(np.float32([np.random.rand() * (step + 1)]))

    assert_as_eager(seeds, "numbers from seed", call=draw)


def ends_training(self: Net, x: Tensor, y: Tensor) -> Tensor:
    loss = self.learn(x, y)
    autograd.training = False
    return loss


def test_a_step_that_ends_training_does_so_each_time():
    def drop(net: Net, step: int) -> Tensor:
        loss = call_of(net, step)
        return loss * (1.0 + float(autograd.training))

    assert_as_eager(ends_training, "changes autograd.training", call=drop)


def test_no_gradient_flows_silently_past_a_result():
    def only_the_loss(self: Net, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(x, y)

    def with_a_penalty(net: Net, step: int) -> Tensor:
        loss = call_of(net, step)
        net.optimizer(loss + autograd.mse_loss(net.fc.W, from_numpy(np.ones((3, 1), np.float32))))
        return loss

    def without(net: Net, step: int) -> Tensor:
        loss = call_of(net, step).clone()
        net.optimizer(loss + autograd.mse_loss(net.fc.W, from_numpy(np.ones((3, 1), np.float32))))
        return loss

    with pytest.raises(GraphError, match="result of a recorded step, through which no gradient flows"):
        run(only_the_loss, True, call=with_a_penalty)
    run(only_the_loss, True, call=without)


def test_results_may_be_summed_changed_and_carried():
    """No graph grows behind a sum of results; they are the caller's own, and what is carried is recorded too."""

    def step_of(self: Net, x: Tensor, y: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        loss = autograd.mse_loss(self.forward(x) + carried.clone(), y)
        self.optimizer(loss)
        return loss, loss * 0.5

    found = {}
    for use_graph in (False, True):
        net = type("Stepping", (Net,), {"train_one_batch": step_of})()
        net.set_optimizer(opt.SGD(0.1))
        net.compile([from_numpy(X)], use_graph=use_graph)
        net.set_params(
            {name: np.full(each.shape, 0.1, np.float32) for name, each in net.get_params().items()}
        )
        carried, total, values = from_numpy(np.zeros((), np.float32)), None, []
        for _ in range(STEPS):
            loss, carried = net(from_numpy(X), from_numpy(Y), carried)
            total = loss if total is None else total + loss
            values.append(loss.item())
        found[use_graph] = [*values, total.item()]
    np.testing.assert_allclose(found[True], found[False], rtol=1e-5)
    assert all(each.break_reason is None for each in net.graph_info())
    assert total.creator is not None and not total.creator.sources
    total += loss
    assert total.creator is None


def test_two_threads_call_one_model():
    net = type("Stepping", (Net,), {"train_one_batch": lambda self, x: self.forward(x) * 1.0})()
    net.set_optimizer(opt.SGD(0.1))
    net.compile([from_numpy(X)], use_graph=True)
    wrong: list[int] = []

    def call(factor: int) -> None:
        x = np.full((256, 3), factor, np.float32)
        expected = None
        for step in range(300):
            found = to_numpy(net(from_numpy(x)))
            if step == 0:
                expected = found
            elif not np.array_equal(found, expected):
                wrong.append(step)

    threads = [threading.Thread(target=call, args=(factor,)) for factor in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
