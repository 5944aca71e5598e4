# SPDX-License-Identifier: Apache-2.0
"""Ranks whose steps differ: an error that names what differs, on every rank, with every dist_option."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.shm import ShmCommunicator
from singa_lite.errors import CommError, NonFiniteError, OptionError
from singa_lite.sync import find_schemes
from singa_lite.sync.text import read_dist_option
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first

# of six steps one at least must send something
OPTIONS = ["localSGD:2" if name == "localSGD" else name for name in sorted(find_schemes())]
CASES = [(dist_option, use_graph) for dist_option in OPTIONS for use_graph in (False, True)]


def run_cases(world: World, function: Any) -> dict[tuple[str, bool], Exception | None]:
    """The error of each of CASES, on a communicator of its own: a start takes longer than a case."""
    found: dict[tuple[str, bool], Exception | None] = {}
    for number, case in enumerate(CASES):
        own = replace(world, rendezvous_id=f"{world.rendezvous_id}-{number}", transport="shm")
        communicator = ShmCommunicator(own, 200)
        found[case] = None
        try:
            function(communicator, *case)
        except Exception as error:
            found[case] = error
            communicator.abort(f"{type(error).__name__}: {error}")  # as at the end of a script
        communicator.close()
        autograd.training = False
    return found


@functools.cache
def errors_of(function: Any, size: int) -> list[dict[tuple[str, bool], Exception | None]]:
    return run_ranks(run_cases, size, function, transport="none")


class Branches(model.Model):
    """Two weights of one shape, of which a step uses the one called ``branch``."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (layer.Linear(4, bias=False) for _ in range(2))
        self.branch = "left"

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)  # both are initialised
        return left if self.branch == "left" else right

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def other_branch(communicator: Any, dist_option: str, use_graph: bool) -> None:
    net = Branches()
    net.set_optimizer(opt.DistOpt(opt.SGD(0.1), communicator=communicator, dist_option=dist_option))
    x, y = (Tensor(data=np.full((3, 4), communicator.rank + 1.0)) for _ in range(2))
    net.compile([x], is_train=True, use_graph=use_graph)
    for step in range(6):
        if step == 3 and communicator.rank == 1:
            net.branch = "right"
        net(x, y)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("dist_option", OPTIONS)
def test_ranks_that_step_other_parameters_of_equal_size_get_an_error(
    dist_option: str, use_graph: bool, size: int
) -> None:
    errors = [found[dist_option, use_graph] for found in errors_of(other_branch, size)]
    for error in errors:
        assert isinstance(error, CommError), error
    assert any("left.W" in str(error) and "right.W" in str(error) for error in errors), errors


def other_model(communicator: Any, dist_option: str, use_graph: bool) -> None:
    if dist_option == "hierarchical" and communicator.timeout_s > 20:
        return  # it takes that long, see below
    nets = []
    x, y = (Tensor(data=np.full((3, 4), communicator.rank + 1.0)) for _ in range(2))
    for _ in range(2):
        net = Branches()
        net.set_optimizer(opt.DistOpt(opt.SGD(0.1), communicator=communicator, dist_option=dist_option))
        net.compile([x], is_train=True, use_graph=use_graph)
        nets.append(net)
    for step in range(6):
        for net in reversed(nets) if step >= 3 and communicator.rank == 1 else nets:
            net(x, y)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("dist_option", [name for name in OPTIONS if name != "hierarchical"])
def test_ranks_that_train_models_of_one_class_in_another_order_get_an_error(
    dist_option: str, use_graph: bool, size: int
) -> None:
    errors = [found[dist_option, use_graph] for found in errors_of(other_model, size)]
    for error in errors:
        assert isinstance(error, CommError), error
    assert any("DistOpt 2" in str(error) for error in errors), errors


@pytest.mark.slow
def test_hierarchical_whose_communicators_are_each_dist_opts_own_gives_that_error_after_the_time_out() -> (
    None
):
    errors = run_ranks(other_model, 2, "hierarchical", True, communicator_timeout_s=5, return_exceptions=True)
    assert all(isinstance(error, CommError) and "waited 5 s" in str(error) for error in errors), errors


def average(sgd: Any, param: Tensor, call: str) -> None:
    """Make a collective of ``param`` by one of SINGA's calls."""
    gradient = Tensor(data=np.ones(2))
    if call in ("all_reduce", "all_reduce_half"):
        getattr(sgd, call)(gradient)
    elif call in ("broadcast", "fused_all_reduce", "fused_all_reduce_half"):
        getattr(sgd, call)([param if call == "broadcast" else gradient])
    elif call == "synchronize":
        net = layer.Linear(1)
        net.w = param
        sgd.synchronize(net)
    elif call == "sparsification":
        sgd.sparsification(gradient, None, 0.5, True)
    else:
        with autograd.record():
            sgd(autograd.mse_loss(param, Tensor(data=np.zeros(2))))


CALLS = ["all_reduce", "all_reduce_half", "broadcast", "fused_all_reduce", "fused_all_reduce_half"]
CALLS += ["synchronize", "sparsification", "__call__"]


def in_another_order(communicator: Any, call: str) -> str:
    params = [Tensor(data=np.ones(2), stores_grad=True, name="w") for _ in range(2)]
    every = [opt.DistOpt(opt.SGD(0.1), communicator=communicator) for _ in params]
    for number in [0, 1, 0, 1] + ([1, 0] if communicator.rank == 1 else [0, 1]):
        average(every[number], params[number], call)
    return "no error"


def run_calls(world: World) -> list[str]:
    found = []
    for number, call in enumerate(CALLS):
        own = replace(world, rendezvous_id=f"{world.rendezvous_id}-{number}", transport="shm")
        communicator = ShmCommunicator(own, 200)
        try:
            found.append(in_another_order(communicator, call))
        except CommError as error:
            found.append(str(error))
            communicator.abort("it differs")
        communicator.close()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_calls_of_two_dist_opts_in_another_order_are_an_error(size: int) -> None:
    for found in run_ranks(run_calls, size, transport="none"):
        assert all("the ranks disagree" in text and "DistOpt 2" in text for text in found), found


def names_of(communicator: Any) -> list[list[str]]:
    """The names of one collective of four DistOpts, of which rank 1 prepares the second and third in another order.

    One fails to compare, on all ranks; the last one has no Model: its first call compares.
    """
    params = [Tensor(data=np.ones(2), stores_grad=True, name="w") for _ in range(4)]
    every = [opt.DistOpt(opt.SGD(0.1), communicator=communicator) for _ in params]
    with pytest.raises(CommError):
        every[0].prepare({str(communicator.rank): params[0]}, {})
    order = [2, 1, 0] if communicator.rank == 1 else [1, 2, 0]
    for number in (*order, *order):
        every[number].prepare({"w": params[number]}, {})
    sent, all_reduce = list[str](), communicator.all_reduce

    def noted(*arguments: Any, **options: Any) -> Any:
        sent.append(options["name"])
        return all_reduce(*arguments, **options)

    communicator.all_reduce = noted
    for number in (*order, 3, 3):
        average(every[number], params[number], "__call__")
    return sent


@pytest.mark.parametrize("size", [2, 3])
def test_dist_opts_are_numbered_in_the_order_of_their_first_collectives(size: int) -> None:
    numbered = [f"DistOpt {number} fp32: w" for number in (2, 3, 4, 4)]
    for names in run_ranks(names_of, size):
        assert names == ["fp32: w", *numbered]


class Hidden(opt.DecayScheduler):
    def __init__(self, rates: list[float]) -> None:
        super().__init__(0.0)
        self.rates = rates

    def call(self, step: int) -> float:
        return self.rates[0]


def other_precision(communicator: Any, use_graph: bool) -> None:
    net = Branches()
    net.set_optimizer(opt.DistOpt(opt.SGD(0.1), communicator=communicator))
    x, y = (Tensor(data=np.full((3, 4), communicator.rank + 1.0)) for _ in range(2))
    net.compile([x], use_graph=use_graph, precision="bf16" if communicator.rank == 1 else "fp32")
    net(x, y)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
def test_ranks_of_different_precisions_get_an_error(use_graph: bool, size: int) -> None:
    for error in run_ranks(other_precision, size, use_graph, return_exceptions=True):
        assert isinstance(error, CommError) and "the precision is fp32 on rank 0 but bf16 on" in str(error)


def other_precision_later(communicator: Any, use_graph: bool) -> None:
    net = Branches()
    net.set_optimizer(opt.DistOpt(opt.SGD(0.1), communicator=communicator))
    x, y = (Tensor(data=np.full((3, 4), communicator.rank + 1.0)) for _ in range(2))
    for step in range(6):
        if step in (0, 3):
            other = step == 3 and communicator.rank == 1
            net.compile([x], use_graph=use_graph, precision="bf16" if other else "fp32")
        net(x, y)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
def test_a_rank_that_goes_on_in_another_precision_is_an_error(use_graph: bool, size: int) -> None:
    for error in run_ranks(other_precision_later, size, use_graph, return_exceptions=True):
        assert isinstance(error, CommError) and "in bf16" in str(error), error


def other_rate(communicator: Any) -> None:
    w = Tensor(data=np.ones(2), stores_grad=True, name="w")
    rate = 0.2 if communicator.rank == 1 else 0.1
    opt.DistOpt(opt.SGD(Hidden([rate])), communicator=communicator).prepare({"w": w}, {})


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_whose_schedules_give_other_rates_get_an_error(size: int) -> None:
    for error in run_ranks(other_rate, size, return_exceptions=True):
        assert isinstance(error, CommError) and "their optimizers: lr is" in str(error), error


def clipped(name: str, value: Tensor, grad: Tensor) -> None:
    value -= grad.clone() * 0.5


def own_function(communicator: Any) -> None:
    sgd = opt.SGD(0.1)
    if communicator.rank == 1:
        sgd.apply = clipped  # type: ignore[method-assign]
    param = Tensor(data=[1.0], stores_grad=True, name="w")
    with pytest.raises(
        CommError, match="their optimizers: apply is not there on rank 0 but clipped on rank 1"
    ):
        opt.DistOpt(sgd, communicator=communicator).prepare({"w": param}, {})


@pytest.mark.parametrize("size", [2, 3])
def test_a_function_that_one_rank_sets_instead_of_a_method_is_an_error(size: int) -> None:
    run_ranks(own_function, size)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_dist_opt_is_not_copied(duplicate: Any) -> None:
    net = Branches()
    net.set_optimizer(opt.DistOpt(opt.SGD(0.1), communicator=LocalCommunicator(World())))
    with pytest.raises(OptionError, match=r"cannot be copied.*model\.optimizer = None"):
        duplicate(net.optimizer)
    if duplicate is copy.deepcopy:
        with pytest.raises(OptionError, match="cannot be copied"):
            copy.deepcopy(net)


def other_layer(communicator: Any, dist_option: str, use_graph: bool) -> None:
    """Steps on two layers that are in no Model, whose weights are both called W."""
    autograd.training = True
    sgd = opt.DistOpt(opt.SGD(0.1), communicator=communicator, dist_option=dist_option)
    left, right = (layer.Linear(4, bias=False) for _ in range(2))
    x, y = (Tensor(data=np.full((3, 4), 1.0)) for _ in range(2))
    sgd(autograd.mse_loss(autograd.add(left(x), right(x)), y))
    assert left.W.name == right.W.name

    class Net(model.Model):
        def forward(self, x: Tensor) -> Tensor:
            return x

        def train_one_batch(self, x: Tensor, y: Tensor, is_left: bool) -> Tensor:
            loss = autograd.mse_loss((left if is_left else right)(x), y)
            sgd(loss)
            return loss

    net = Net()
    net.compile([x], is_train=True, use_graph=use_graph)
    for step in range(6):
        net(x, y, step < 3 or communicator.rank == 0)
    if use_graph:
        assert [info.break_reason for info in net.graph_info()] == [None, None]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("dist_option", OPTIONS)
def test_parameters_of_one_name_in_no_model_are_not_averaged_with_each_other(
    dist_option: str, use_graph: bool, size: int
) -> None:
    errors = [found[dist_option, use_graph] for found in errors_of(other_layer, size)]
    for error in errors:
        assert isinstance(error, CommError), error
    assert any("W'" in str(error) and "W#1'" in str(error) for error in errors), errors


class Failing(opt.DecayScheduler):
    """Is read between the exchange and the update, and raises then if told to."""

    fails = False

    def call(self, step: int) -> float:
        if self.fails:
            raise ArithmeticError("no rate")
        return 0.1


def cut_short(communicator: Any, dist_option: str, use_graph: bool, ranks: tuple[int, ...]) -> None:
    rate = Failing(0.1)
    net = Branches()
    net.set_optimizer(opt.DistOpt(opt.SGD(rate), communicator=communicator, dist_option=dist_option))
    x, y = (Tensor(data=np.full((3, 4), communicator.rank + 1.0)) for _ in range(2))
    net.compile([x], is_train=True, use_graph=use_graph)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(7):
            rate.fails = step == 3 and communicator.rank in ranks
            try:
                net(x, y)
            except ArithmeticError:
                assert rate.fails
            else:
                assert not rate.fails
    # int8's with ef=1
    keeps_arrays = bool(read_dist_option(dist_option).scheme.slots) and dist_option != "int8"
    texts = [str(warning.message).partition(" keeps")[0] for warning in caught]
    assert texts == [f"DistOpt: an exception ended the update of step 3. What {dist_option}"] * keeps_arrays


def checked_often(communicator: Any, dist_option: str, use_graph: bool) -> str:
    """The error where a rank's learning rate changes; a warning would be one, too."""
    net, x = Branches(), Tensor(data=np.full((3, 4), communicator.rank + 1.0))
    sgd = opt.DistOpt(opt.SGD(0.1), communicator=communicator, dist_option=dist_option, check_every=2)
    net.set_optimizer(sgd)
    net.compile([x], is_train=True, use_graph=use_graph)
    for step in range(6):
        if step == 4 and communicator.rank == 1:
            sgd.lr = 0.5
        try:
            net(x, x)
        except CommError as error:
            return f"step {step}: {error}"
    return "no error"


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@slow_but_first("dist_option", OPTIONS, count=3)
def test_a_comparison_now_and_then_speaks_of_no_exception_where_there_was_none(
    dist_option: str, use_graph: bool
) -> None:
    for text in run_ranks(checked_often, 2, dist_option, use_graph):
        assert text.startswith("step 5: ") and "lr is" in text and "exception" not in text


def loads_on_rank_0(communicator: Any, use_graph: bool) -> str:
    rate = Failing(0.1)
    net, x = Branches(), Tensor(data=np.full((3, 4), communicator.rank + 1.0))
    net.set_optimizer(sgd := opt.DistOpt(opt.SGD(rate), communicator=communicator))
    net.compile([x], is_train=True, use_graph=use_graph)
    for _ in range(3):
        net(x, x)
    saved = sgd.get_states()
    rate.fails = True
    with pytest.raises(ArithmeticError):
        net(x, x)
    rate.fails = False
    if communicator.rank == 0:
        sgd.set_states(saved)
    try:
        net(x, x)
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
def test_one_rank_may_load_what_all_have_after_an_exception(use_graph: bool) -> None:
    assert run_ranks(loads_on_rank_0, 2, use_graph) == [""] * 2


def sets_another_optimizer(communicator: Any, use_graph: bool, kind: str) -> str:
    net, x = Branches(), Tensor(data=np.full((3, 4), communicator.rank + 1.0))
    net.set_optimizer(sgd := opt.DistOpt(opt.SGD(0.1), communicator=communicator))
    if communicator.rank == 2:
        sgd.opt = opt.SGD(0.1)  # compile compares it
    net.compile([x], is_train=True, use_graph=use_graph)
    first = sgd.opt
    for _ in range(3):
        net(x, x)
    if kind == "back on one rank":
        sgd.opt = opt.SGD(0.1)
        for _ in range(3):
            net(x, x)
        if communicator.rank == 1:
            sgd.opt = first
    elif kind != "one rank" or communicator.rank == 1:
        sgd.opt = opt.SGD(0.1 * (communicator.rank + 1 if kind == "other rates" else 1))
    try:
        for _ in range(3):
            net(x, x)
    except CommError as error:
        return str(error)
    return str(sgd.opt.step_counter)


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("equal", "^3$"),
        ("other rates", r"lr.*0\.1.*0\.2"),
        ("one rank", "their optimizers"),
        ("back on one rank", "their optimizers"),
    ],
)
def test_ranks_compare_an_optimizer_that_is_set_between_steps(kind: str, text: str, use_graph: bool) -> None:
    for found in run_ranks(sets_another_optimizer, 3, use_graph, kind):
        assert re.search(text, found, re.DOTALL), found


def test_an_optimizer_that_cannot_be_prepared_is_not_set() -> None:
    class Bad(opt.SGD):
        def prepare(self, params: Any, buffers: Any) -> None:
            raise OptionError("not these")

    net, first = Branches(), opt.SGD(0.1)
    x = Tensor(data=np.ones((3, 4), np.float32))
    net.set_optimizer(sgd := opt.DistOpt(first, communicator=LocalCommunicator(World())))
    net.compile([x])
    with pytest.raises(OptionError, match="not these"):
        sgd.opt = Bad(0.1)
    assert sgd.opt is first
    with pytest.raises(AttributeError, match="'DistOpt' object has no attribute 'momentum'"):
        _ = sgd.momentum


def goes_on_with_another_optimizer(communicator: Any, use_graph: bool, folder: Path) -> list[bytes]:
    """Parameters after two steps from a checkpoint, saved by a run that has set the same optimizer, and its own."""
    found, path, x = (
        [],
        folder / f"{communicator.rank}.zip",
        Tensor(data=np.full((3, 4), communicator.rank + 1.0)),
    )
    for is_first in (True, False):
        net = Branches()
        net.set_optimizer(sgd := opt.DistOpt(opt.SGD(0.1), communicator=communicator))
        net.compile([x], is_train=True, use_graph=use_graph)
        sgd.opt = opt.SGD(0.1, momentum=0.9)
        if is_first:
            net(x, x)
            net.save_states(path)
        else:
            net.load_states(path)
        for _ in range(2):
            net(x, x)
        found.append(b"".join(to_numpy(value).tobytes() for value in net.get_params().values()))
    return found


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
def test_an_optimizer_that_is_set_before_the_first_step_takes_states(use_graph: bool, tmp_path: Path) -> None:
    for first, second in run_ranks(goes_on_with_another_optimizer, 2, use_graph, tmp_path):
        assert first == second


@pytest.mark.parametrize("then", ["call", "fp32", "by hand", "load"])
def test_what_a_scheme_keeps_of_an_update_that_an_exception_ended_is_warned_of_once(then: str) -> None:
    rate = Failing(0.1)
    net, x = Branches(), Tensor(data=np.ones((3, 4)))
    sgd = opt.DistOpt(opt.SGD(rate), communicator=LocalCommunicator(World()), dist_option="sparseTopK")
    net.set_optimizer(sgd)
    net.compile([x], is_train=True)
    net(x, x)
    saved = sgd.get_states()
    rate.fails = True
    with pytest.raises(ArithmeticError):
        net(x, x)
    rate.fails = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if then == "fp32":
            sgd.dist_option = "fp32"
        elif then == "by hand":
            sgd.step()
        elif then == "load":
            sgd.set_states(saved)
        net(x, x)
        net(x, x)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (then != "load") and all("What sparseTopK keeps of gradients" in t for t in texts)


class Interrupted(opt.SGD):
    """One update of rank 0 is interrupted when it is made, and before it is counted."""

    fails = False

    def _count_step(self) -> None:
        if self.fails:
            raise KeyboardInterrupt
        super()._count_step()


class InterruptedStep(opt.SGD):
    """The same in a method of the script."""

    fails = False

    def step(self) -> None:
        if self.fails:
            raise KeyboardInterrupt
        super().step()


def interrupted_on_one(communicator: Any, use_graph: bool, kind: Any) -> str:
    net, sgd = Branches(), kind(opt.ExponentialDecay(0.1, 1, 0.5))
    net.set_optimizer(opt.DistOpt(sgd, communicator=communicator))
    x, y = (Tensor(data=np.full((3, 4), communicator.rank + 1.0)) for _ in range(2))
    net.compile([x], is_train=True, use_graph=use_graph)
    for step in range(7):
        sgd.fails = step == 3 and communicator.rank == 0
        try:
            net(x, y)
        except KeyboardInterrupt:
            assert sgd.fails
        except CommError as error:
            return str(error)
    return f"no error, at step {net.optimizer.step_counter}"


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", [Interrupted, InterruptedStep])
def test_an_update_that_is_made_and_not_counted_on_one_rank_is_an_error(
    kind: Any, size: int, use_graph: bool
) -> None:
    for error in run_ranks(interrupted_on_one, size, use_graph, kind):
        assert "an exception ended a step" in error, error


def cut_short_on_one(communicator: Any, dist_option: str, use_graph: bool) -> None:
    # whose next sum is over another communicator: only the time-out ends it
    if dist_option != "hierarchical":
        cut_short(communicator, dist_option, use_graph, (1,))


def cut_short_on_all(communicator: Any, dist_option: str, use_graph: bool) -> None:
    cut_short(communicator, dist_option, use_graph, (0, 1, 2))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("dist_option", [name for name in OPTIONS if name != "hierarchical"])
def test_a_rank_that_an_exception_keeps_from_an_update_does_not_go_on_without_it(
    dist_option: str, use_graph: bool, size: int
) -> None:
    for error in [found[dist_option, use_graph] for found in errors_of(cut_short_on_one, size)]:
        assert isinstance(error, CommError) and "an exception ended a step" in str(error), error


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("dist_option", OPTIONS)
def test_ranks_that_all_are_kept_from_an_update_go_on(dist_option: str, use_graph: bool, size: int) -> None:
    assert [found[dist_option, use_graph] for found in errors_of(cut_short_on_all, size)] == [None] * size


def sums_of_other_shapes(communicator: Any) -> list[str]:
    """The error of each of SINGA's sums where this rank's arrays have as many elements in another shape."""
    shape, found = (2, 3) if communicator.rank else (3, 2), []
    calls = {
        "all_reduce": lambda sgd, array: sgd.all_reduce(array),
        "all_reduce_half": lambda sgd, array: sgd.all_reduce_half(array),
        "fused_all_reduce": lambda sgd, array: sgd.fused_all_reduce([array, array.copy()]),
        "fused_all_reduce_half": lambda sgd, array: sgd.fused_all_reduce_half([array, array.copy()]),
        "sparsification": lambda sgd, array: sgd.sparsification(array, None, 0.5, True),
        "fused_sparsification": lambda sgd, array: sgd.fused_sparsification(
            [array, array.copy()], None, 0.5, True
        ),
    }
    for call in calls.values():
        group = communicator.new_group(list(range(communicator.size)))
        try:
            call(opt.DistOpt(opt.SGD(0.1), communicator=group), np.ones(shape, np.float32))
            found.append("no error")
        except CommError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_arrays_of_one_size_and_other_shapes_are_an_error(size: int) -> None:
    for found in run_ranks(sums_of_other_shapes, size):
        assert all("[2, 3]" in text and "[3, 2]" in text for text in found), found


class OwnOrder(model.Model):
    """Two layers of one shape and a norm, made in another order on another rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        made = {"first": layer.Linear(4), "norm": layer.BatchNorm2d(), "second": layer.Linear(4)}
        for name in [*made] if rank == 0 else [*made][::-1]:
            setattr(self, name, made[name])

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def own_order(communicator: Any, dist_option: str, use_graph: bool) -> None:
    net = OwnOrder(communicator.rank)
    net.set_optimizer(
        opt.DistOpt(opt.SGD(0.1, momentum=0.9), communicator=communicator, dist_option=dist_option)
    )
    rng = np.random.default_rng(communicator.rank)
    batches = [
        (Tensor(data=rng.standard_normal((6, 4))), Tensor(data=rng.standard_normal((6, 4)))) for _ in range(6)
    ]
    net.compile([batches[0][0]], is_train=True, use_graph=use_graph)
    for x, y in batches:
        net(x, y)
    net.optimizer.synchronize(net)
    values = {name: to_numpy(tensor).tolist() for name, tensor in sorted(net.get_states().items())}
    everyone = communicator.all_gather_object(values)
    assert all(theirs == everyone[0] for theirs in everyone), everyone
    net.optimizer.broadcast(dict(net.get_params()))
    assert {name: to_numpy(tensor).tolist() for name, tensor in sorted(net.get_states().items())} == values


@pytest.mark.parametrize(("dist_option", "use_graph"), CASES)
def test_ranks_may_make_their_layers_in_other_orders(dist_option: str, use_graph: bool) -> None:
    for errors in errors_of(own_order, 3):
        assert errors[dist_option, use_graph] is None, errors[dist_option, use_graph]


def other_names(communicator: Any, call: str) -> str:
    """The error where rank 1 has other names, of which the text order differs too."""
    names = ("9", "10") if communicator.rank == 0 else ("1", "2")
    dist = opt.DistOpt(opt.SGD(0.1), communicator=communicator)
    holder = layer.Layer()
    for name in names:
        setattr(holder, f"layer_{name}", layer.Linear(2))
        getattr(holder, f"layer_{name}")(Tensor(data=np.ones((1, 2))))
    try:
        dist.broadcast(holder.get_params()) if call == "broadcast" else dist.synchronize(holder)
    except CommError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("call", ["broadcast", "synchronize"])
def test_ranks_with_other_names_are_an_error_of_calls_that_go_by_name(call: str) -> None:
    for text in run_ranks(other_names, 3, call):
        assert re.search(rf"{'parameters' if call == 'broadcast' else call} of 4 names, hash", text), text


class Parts(layer.Layer):
    """Layers of one shape in a dict, which ranks use in other orders; none of them knows its name in a model."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.parts = {name: layer.Linear(4) for name in names}

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = [part(x * (1.0 + "abc".index(name))) for name, part in self.parts.items()]
        for y in rest:
            first = first + y
        return first


def named_by_broadcast(communicator: Any) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """The warnings of the first call, rank 0's values after broadcast, and all after it."""
    net = Parts("abc" if communicator.rank == 0 else "cab")
    dist = opt.DistOpt(opt.SGD(0.0), communicator=communicator)
    net(Tensor(data=np.ones((2, 4))))
    dist.broadcast(net.get_params())
    before = {name: to_numpy(param).tolist() for name, param in sorted(net.get_params().items())}
    autograd.training = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(CommError):  # of the buckets, whose parameters come in another order
            dist(autograd.mse_loss(net(Tensor(data=np.ones((2, 4)))), Tensor(data=np.ones((2, 4)))))
    after = {name: to_numpy(param).tolist() for name, param in sorted(net.get_params().items())}
    return [str(each.message) for each in caught], before, after


def test_names_given_to_broadcast_are_those_of_the_parameters() -> None:
    for texts, before, after in run_ranks(named_by_broadcast, 3):
        assert not texts and before == after


def rest_of_a_sum(communicator: Any, use_graph: bool) -> dict[str, Any]:
    """Parameters whose gradients come in the first call of a sum alone, made in another order on another rank."""

    class Net(OwnOrder):
        def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
            loss = autograd.mse_loss(self.forward(x) if y.shape[0] == 6 else self.first(x), y)
            self.optimizer(loss)
            return loss

    net = Net(communicator.rank)
    net.set_optimizer(opt.DistOpt(opt.SGD(0.1), communicator=communicator, accumulate=2))
    rng = np.random.default_rng(communicator.rank)
    net.compile([Tensor(data=np.ones((6, 4)))], is_train=True, use_graph=use_graph)
    for call in range(6):
        x = Tensor(data=rng.standard_normal((6 - call % 2, 4)))
        net(x, x)
    return {name: to_numpy(param).tolist() for name, param in sorted(net.get_params().items())}


@pytest.mark.parametrize("use_graph", [False, True])
def test_sums_without_a_last_gradient_are_sent_in_one_order(use_graph: bool) -> None:
    first, *others = run_ranks(rest_of_a_sum, 3, use_graph)
    assert all(other == first for other in others)


def names_a_culprit(communicator: Any) -> str:
    net = OwnOrder(communicator.rank)
    net.set_optimizer(opt.DistOpt(opt.SGD(0.1), communicator=communicator, check_finite="raise"))
    x = np.ones((6, 4), np.float32)
    net.compile([Tensor(data=x)], is_train=True)
    if communicator.rank == 1:
        net.second.b.array[0] = np.inf
    try:
        net(Tensor(data=x), Tensor(data=np.zeros((6, 4))))
    except NonFiniteError as error:
        return str(error)
    return ""


def test_the_parameter_that_is_not_finite_is_named_alike_on_all_ranks() -> None:
    texts = run_ranks(names_a_culprit, 3)
    names = {re.findall(r"'((?:first|norm|second)\.\w+)'", text)[0] for text in texts}
    assert len(names) == 1, texts
