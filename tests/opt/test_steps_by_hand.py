# SPDX-License-Identifier: Apache-2.0
"""Steps made of ``all_reduce``, ``update`` and ``step``: the ranks are compared as in a call of DistOpt."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import CommError, OptionError
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first

SIZES = [2, 3]
NO_ERROR = "no error"
SUMS = {
    "all_reduce": lambda sgd, grad: sgd.all_reduce(grad),
    "all_reduce_half": lambda sgd, grad: sgd.all_reduce_half(grad),
    "fused_all_reduce": lambda sgd, grad: sgd.fused_all_reduce([grad]),
    "fused_all_reduce_half": lambda sgd, grad: sgd.fused_all_reduce_half([grad]),
    "sparsification": lambda sgd, grad: sgd.sparsification(grad, None, 0.5, True),
    "fused_sparsification": lambda sgd, grad: sgd.fused_sparsification([grad], None, 0.5, True),
}


class Net(model.Model):
    """One layer, trained by hand."""

    def __init__(self, send: str) -> None:
        super().__init__()
        self.linear = layer.Linear(3)
        self.send = send

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        for param, grad in autograd.backward(loss):
            SUMS[self.send](self.optimizer, grad)
            self.optimizer.update(param, grad)
        self.optimizer.step()
        return loss


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([step, rank])
    return tuple(Tensor(data=rng.standard_normal(shape)) for shape in ((4, 5), (4, 3)))


def compiled(communicator: Communicator, use_graph: bool, send: str = "all_reduce", **options: Any) -> Net:
    net = Net(send)
    net.set_optimizer(opt.DistOpt(opt.SGD(0.1, momentum=0.9), communicator=communicator, **options))
    net.compile([batch(0, 0)[0]], use_graph=use_graph)
    return net


def steps_made(net: Net, rank: int, steps: range) -> tuple[int, str]:
    """The step at which a rank was found to differ, and the error."""
    for step in steps:
        try:
            net(*batch(step, rank))
        except CommError as error:
            return step, str(error)
    return steps.stop, NO_ERROR


def loads(communicator: Communicator, use_graph: bool, send: str, fault: str, folder: str) -> Any:
    rank, options = communicator.rank, {"dist_option": "partialUpdate"} if fault == "may differ" else {}
    net = compiled(communicator, use_graph, send, **options)
    for step in range(4):
        net(*batch(step, rank))
        net.save_states(Path(folder) / f"{step}-{rank}.zip")
    if fault != "one rank" or rank == 1:
        net.load_states(Path(folder) / f"{2 if fault == 'another step' and rank == 1 else 3}-{rank}.zip")
    if fault in ("another value", "may differ") and rank == 1:
        net.linear.W.array[0, 0] += 1e-3
    found = steps_made(net, rank, range(4, 7))
    return *found, to_numpy(net.linear.b).tobytes(), [info.break_reason for info in net.graph_info()]


LOADS = {
    "one rank": "the ranks disagree",
    "another step": "the number of steps made is 4 on rank 0 but 3 on rank 1",
    "another value": "linear.W is",
    "may differ": NO_ERROR,
    "none": NO_ERROR,
}


@pytest.mark.parametrize("size", SIZES)
@slow_but_first("use_graph", [True, False], ids=["recorded", "eager"])
@pytest.mark.parametrize("fault", LOADS)
def test_after_loading_a_step_by_hand_compares_the_ranks(
    fault: str, use_graph: bool, size: int, tmp_path: Path
) -> None:
    ranks = run_ranks(loads, size, use_graph, "all_reduce", fault, str(tmp_path))
    for step, text, _, breaks in ranks:
        assert LOADS[fault] in text and step == (7 if LOADS[fault] == NO_ERROR else 4), text
        assert not any(breaks)
    if fault == "none":
        assert len({bits for _, _, bits, _ in ranks}) == 1


@pytest.mark.parametrize("send", SUMS)
def test_each_collective_that_sums_by_hand_compares_the_ranks(send: str, tmp_path: Path) -> None:
    for step, text, _, _ in run_ranks(loads, 3, False, send, "another value", str(tmp_path)):
        assert "linear.W is" in text and step == 4


def drifts(
    communicator: Communicator, use_graph: bool, fault: str, check_every: int | None
) -> tuple[int, str]:
    net, rank = compiled(communicator, use_graph, check_every=check_every), communicator.rank
    for step in range(9):
        if step == 4 and rank == 1 and fault == "lr":
            net.optimizer.lr = 0.5
        elif step == 4 and rank == 1 and fault == "bit":
            net.linear.W.array[0, 0] += 1e-3
        found = steps_made(net, rank, range(step, step + 1))
        if found[1] != NO_ERROR:
            return found
    return 9, NO_ERROR


@pytest.mark.parametrize("size", SIZES)
@slow_but_first("use_graph", [True, False], ids=["recorded", "eager"])
@pytest.mark.parametrize(("fault", "name"), [("lr", "lr is"), ("bit", "linear.W is")])
def test_check_every_counts_steps_made_by_hand(fault: str, name: str, use_graph: bool, size: int) -> None:
    for step, text in run_ranks(drifts, size, use_graph, fault, 3):
        assert step == 5 and name in text and "rank 1" in text
    assert run_ranks(drifts, size, use_graph, "none", 3) == [(9, NO_ERROR)] * size
    assert run_ranks(drifts, size, use_graph, fault, None) == [(9, NO_ERROR)] * size


def drifts_without_a_model(communicator: Communicator) -> str:
    """Two layers whose parameters have the same names, and one of them changes on a rank."""
    autograd.training = True
    sgd = opt.DistOpt(opt.SGD(0.1), communicator=communicator, check_every=2)
    left, right = (layer.Linear(3, bias=False) for _ in range(2))
    x, y = batch(0, communicator.rank)
    for layer_ in (left, right):
        layer_(x)
        sgd.broadcast([layer_.W])
    for step in range(4):
        if step == 2 and communicator.rank == 1:
            right.W.array[0, 0] += 1e-3
        for param, grad in autograd.backward(autograd.mse_loss(autograd.add(left(x), right(x)), y)):
            sgd.all_reduce(grad)
            sgd.update(param, grad)
        try:
            sgd.step()
        except CommError as error:
            return f"step {step}: {error}"
    return NO_ERROR


def test_check_every_compares_parameters_that_are_in_no_model() -> None:
    for text in run_ranks(drifts_without_a_model, 3):
        assert text.startswith("step 3: ") and "parameters and optimizer states: W" in text


# ---- attributes that are set between steps ---------------------------------------------------------------


def steps_without_a_model(communicator: Communicator, case: str) -> tuple[list[str], list[list[float]]]:
    """What a rank was told in steps by hand of parameters that no Model has, of one name; and their values."""
    rank = communicator.rank
    values = [rank + 1.0 if case == "other values" else 1.0, 2.0]
    params = [Tensor(data=np.full(2, value), requires_grad=True, stores_grad=True) for value in values]
    dist_option = "partialUpdate" if case == "may differ" else "fp32"
    sgd = opt.DistOpt(opt.SGD(0.1), communicator=communicator, dist_option=dist_option)
    if case == "may differ":
        params[0].set_value(rank)
    if case == "broadcast":
        params[0].set_value(rank)
        sgd.broadcast(params)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            order = params if rank != 1 else params[::-1]  # by gradients that are means already
            sgd.update_all([(param, Tensor(data=np.full(2, 1.0))) for param in order])
            sgd.step()
    return [str(each.message) for each in found], [to_numpy(param).tolist() for param in params]


@pytest.mark.parametrize("case", ["other values", "other order", "broadcast", "may differ"])
def test_the_first_step_by_hand_warns_of_other_values_and_changes_none(case: str) -> None:
    for rank, (texts, values) in enumerate(run_ranks(steps_without_a_model, 3, case)):
        first = {"other values": rank + 1.0, "may differ": rank, "broadcast": 0.0}.get(case, 1.0)
        np.testing.assert_allclose(values, [[first - 0.3] * 2, [1.7] * 2], rtol=1e-6)
        told = [
            text for text in texts if "each rank trains by itself" not in text
        ]  # they are equal on all here
        assert ["different values" in text for text in told] == [True] * (case == "other values"), texts


UPDATES = {
    "update": lambda sgd, param, grad: sgd.update(param, grad),
    "apply": lambda sgd, param, grad: sgd.apply(param.name, param, grad),
    "update_all": lambda sgd, param, grad: sgd.update_all([(param, grad)]),
}


class ByHand(Net):
    """Updates in one of UPDATES, by sums over the ranks or by this rank's gradients."""

    def __init__(self, way: str, sums: bool) -> None:
        super().__init__("all_reduce")
        self.way, self.sums = way, sums

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        for param, grad in autograd.backward(loss):
            if self.sums:
                self.optimizer.all_reduce(grad)
            UPDATES[self.way](self.optimizer, param, grad)
        self.optimizer.step()
        return loss


def told_of_sums(
    communicator: Communicator,
    way: str,
    has_model: bool,
    use_graph: bool,
    sums: bool,
    dist_option: str = "fp32",
) -> tuple[int, bytes]:
    """In how many steps a rank was told that its gradients are not summed; and the weights."""
    net = ByHand(way, sums)
    sgd = opt.DistOpt(opt.SGD(0.1, momentum=0.9), communicator=communicator, dist_option=dist_option)
    if has_model:
        net.set_optimizer(sgd)
    net.compile([batch(0, 0)[0]], use_graph=use_graph)
    if not has_model:
        sgd.broadcast(net.get_params())
        net.optimizer, autograd.training = sgd, True
    told = 0
    for step in range(4):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            (net if has_model else net.train_one_batch)(*batch(step, communicator.rank))
        told += any("each rank trains by itself" in str(each.message) for each in found)
    return told, to_numpy(net.linear.W).tobytes()


@slow_but_first("way", UPDATES)
@pytest.mark.parametrize(
    ("has_model", "use_graph", "num_told"),
    [(True, False, 1), (True, True, 1), (False, False, 3)],
    ids=["eager", "recorded", "without a model"],
)
def test_updates_by_gradients_that_are_not_summed_are_warned_of(
    has_model: bool, use_graph: bool, num_told: int, way: str
) -> None:
    """In the first step of a Model, whose end compares values, and so sends; without one from the second step on."""
    alone = run_ranks(told_of_sums, 3, way, has_model, use_graph, False)
    assert [told for told, _ in alone] == [num_told] * 3
    assert len({weights for _, weights in alone}) == 3
    summed = run_ranks(told_of_sums, 3, way, has_model, use_graph, True)
    assert summed == [(0, summed[0][1])] * 3
    differing = run_ranks(told_of_sums, 3, way, has_model, use_graph, False, "partialUpdate")
    assert [told for told, _ in differing] == [0] * 3
    assert run_ranks(told_of_sums, 1, way, has_model, use_graph, False, transport="local")[0][0] == 0


class WritesUpdate(opt.SGD):
    """Halves the gradient in SINGA's older method."""

    def update(self, param: Tensor, grad: Tensor) -> None:
        super().update(param, grad * 0.5)


def test_an_update_by_hand_runs_that_of_the_wrapped_optimizer() -> None:
    param = Tensor(data=np.ones(2), stores_grad=True, name="w")
    opt.DistOpt(WritesUpdate(0.1)).update(param, Tensor(data=np.ones(2)))
    np.testing.assert_allclose(to_numpy(param), 0.95, rtol=1e-6)


def steps_of_the_optimizer_inside(communicator: Communicator, ways: str) -> list[str]:
    sgd = opt.DistOpt(opt.SGD(0.1), communicator=communicator)
    param, found, first = Tensor(data=np.ones(2), stores_grad=True, name="w"), [], sgd.get_states()
    for number, way in enumerate(ways):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            sgd.update(param, Tensor(data=np.ones(2)))
        found += [f"{number}" for warning in seen if "without DistOpt.step()" in str(warning.message)]
        if way == "l":
            sgd.set_states(first)
        elif way != "-":  # another parameter's update follows
            (sgd.opt if way == "i" else sgd).step()
    return found


def test_a_step_of_the_optimizer_inside_is_warned_of() -> None:
    """By the next update, as that step compares nothing."""
    assert run_ranks(steps_of_the_optimizer_inside, 3, "d-di-did-ld") == [["4", "7"]] * 3
    assert run_ranks(steps_of_the_optimizer_inside, 1, "iii", transport="local") == [[]]


class Called(Net):
    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = autograd.mse_loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def updates_one_more_by_hand(communicator: Communicator) -> list[str]:
    net, extra = Called("all_reduce"), Tensor(data=np.ones(2), stores_grad=True, name="extra")
    sgd = opt.DistOpt(opt.SGD(0.1), communicator=communicator)
    net.set_optimizer(sgd)
    net.compile([batch(0, 0)[0]], use_graph=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(5):
            grad = Tensor(data=np.ones(2))
            sgd.all_reduce(grad)
            sgd.update(extra, grad)
            net(*batch(step, communicator.rank))
    return [str(warning.message) for warning in seen]


def test_a_recorded_call_ends_the_step_of_an_update_by_hand_before_it() -> None:
    assert run_ranks(updates_one_more_by_hand, 3) == [[]] * 3


def sets_an_attribute(communicator: Communicator, use_graph: bool, kind: type[Net], name: str) -> Any:
    net = kind("all_reduce")
    sgd = opt.DistOpt(opt.SGD(0.1, momentum=0.9), communicator=communicator)
    net.set_optimizer(sgd)
    net.compile([batch(0, 0)[0]], use_graph=use_graph)
    net.linear.W.copy_from_numpy(np.full((5, 3), 0.5, np.float32))
    first, payloads = sgd.opt, []
    for step in range(9):
        if name == "opt":
            sgd.opt = first if step < 3 or step > 5 else opt.SGD(0.02) if step == 3 else sgd.opt
        else:
            sgd.dist_option = "fp16" if 3 <= step < 6 else "fp32"
        net(*batch(step, communicator.rank))
        payloads.append(sgd.bytes_payload)
    values = [to_numpy(param) for param in net.get_params().values()]
    return values, payloads, first.step_counter, len(net.graph_info())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("kind", "name"),
    [(Called, "opt"), (Called, "dist_option"), (Net, "opt")],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_a_recorded_step_sees_attributes_of_dist_opt_that_are_set(
    kind: type[Net], name: str, size: int
) -> None:
    eager, recorded = (
        run_ranks(sets_an_attribute, size, use_graph, kind, name) for use_graph in (False, True)
    )
    for (values, payloads, count, _), (others, *same, num_records) in zip(eager, recorded, strict=True):
        for value, other in zip(values, others, strict=True):
            np.testing.assert_allclose(other, value, rtol=1e-5, atol=1e-6)
        # an optimizer that is set back is compared with the other ranks', so that step is not its old record's
        assert same == [payloads, count] and num_records == (3 if name == "opt" and size > 1 else 2)
    _, payloads, count, _ = eager[0]
    assert count == (6 if name == "opt" else 9)
    assert name == "opt" or payloads[4] < payloads[2] == payloads[8]


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("kind", [Called, Net], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("momentum", 0.5, "momentum was set on the DistOpt, where nothing reads it; set that of dist.opt"),
        ("accumulate", 4, "accumulate was set after the DistOpt was made, where nothing reads it"),
        ("clip_norm", 1e-3, "clip_norm was set after"),
        ("check_finite", "raise", "check_finite was set after"),
        ("clip_value", 0.1, "clip_value was set after"),
    ],
)
def test_an_attribute_that_no_step_would_read_is_refused(
    name: str, value: Any, text: str, kind: type[Net], use_graph: bool
) -> None:
    net = kind("all_reduce")
    sgd = opt.DistOpt(opt.SGD(0.1, momentum=0.9), communicator=LocalCommunicator(World()))
    net.set_optimizer(sgd)
    net.compile([batch(0, 0)[0]], use_graph=use_graph)
    sgd.dist_option = "fp16"
    for step in range(3):
        sgd.mine = step  # of the script
        net(*batch(step, 0))
    if kind is Called:
        sgd.dist_option = "fp32"
    before = {name: to_numpy(param) for name, param in net.get_params().items()}
    with pytest.raises(OptionError, match="opt must be an Optimizer, not int"):
        sgd.opt = 5
    setattr(sgd, name, value)
    with pytest.raises(OptionError, match=text):
        net(*batch(3, 0))
    assert all(np.array_equal(to_numpy(param), before[name]) for name, param in net.get_params().items())
    delattr(sgd, name)
    net(*batch(3, 0))
    assert sgd.step_counter == 4


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize(("name", "value"), [("threshold", 7), ("bucket_bytes", 4096)])
def test_sizes_of_groups_and_messages_are_refused_once_a_scheme_has_run(
    name: str, value: int, use_graph: bool
) -> None:
    net = Called("all_reduce")
    sgd = opt.DistOpt(opt.SGD(0.1), communicator=LocalCommunicator(World()), threshold=50)
    setattr(sgd, name, value)  # before the first step it counts
    net.set_optimizer(sgd)
    net.compile([batch(0, 0)[0]], use_graph=use_graph)
    for step in range(3):
        net(*batch(step, 0))
    for other in (2 * value, 50):  # 50: the constructor's threshold
        setattr(sgd, name, other)
        with pytest.raises(OptionError, match=f"runs with {name} {value}, not {other}"):
            net(*batch(3, 0))
    setattr(sgd, name, value)
    net(*batch(3, 0))
    assert sgd.step_counter == 4


@pytest.mark.parametrize("name", ["threshold", "bucket_bytes"])
@pytest.mark.parametrize("value", [-5, None, "x", 3.5])
def test_sizes_that_are_none_are_refused_before_the_first_step(name: str, value: Any) -> None:
    net = Called("all_reduce")
    sgd = opt.DistOpt(opt.SGD(0.1), communicator=LocalCommunicator(World()))
    setattr(sgd, name, value)
    net.set_optimizer(sgd)
    net.compile([batch(0, 0)[0]])
    with pytest.raises(OptionError, match=f"DistOpt: {name} = "):
        net(*batch(0, 0))


def test_a_threshold_of_a_call_holds_for_calls_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "training", True)
    param = Tensor(data=np.ones((3, 1), np.float32), stores_grad=True, name="p")
    sgd = opt.DistOpt(opt.SGD(0.1), communicator=LocalCommunicator(World()), threshold=50)
    sgd.threshold = 100
    for threshold in (7, None, 7):
        sgd(autograd.mse_loss(param * 2.0, Tensor(data=np.zeros((3, 1), np.float32))), threshold=threshold)
    with pytest.raises(OptionError, match="runs with threshold 7, not 100"):
        sgd(autograd.mse_loss(param * 2.0, Tensor(data=np.zeros((3, 1), np.float32))), threshold=100)


class Scaled(opt.DistOpt):
    """Has a number of its own by the name of one of the wrapped optimizer's."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.momentum = 0.5


class Noted(opt.SGD):
    """An optimizer with an attribute that is no argument of it."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.note = "mine"


@pytest.mark.parametrize(
    ("kind", "wrapped"), [(Scaled, opt.SGD), (opt.DistOpt, Noted)], ids=lambda kind: kind.__name__
)
def test_attributes_of_a_subclass_and_of_the_script_are_its_own(
    kind: type[opt.DistOpt], wrapped: type[opt.SGD]
) -> None:
    net = Called("all_reduce")
    sgd = kind(wrapped(0.1), communicator=LocalCommunicator(World()))
    sgd.note = "another"
    net.set_optimizer(sgd)
    net.compile([batch(0, 0)[0]], use_graph=True)
    for step in range(3):
        net(*batch(step, 0))
    assert [info.break_reason for info in net.graph_info()] == [None]


@pytest.mark.parametrize(
    "options", [{"check_finite": "raise"}, {"check_finite": "skip"}, {"order": "fixed", "microbatches": 2}]
)
@pytest.mark.parametrize("use_graph", [False, True])
def test_options_that_steps_by_hand_do_not_keep_are_refused(options: dict[str, Any], use_graph: bool) -> None:
    net = compiled(LocalCommunicator(World()), use_graph, **options)
    before = to_numpy(net.linear.W)
    with pytest.raises(OptionError, match=r"holds for calls, optimizer\(loss\), and not for updates by hand"):
        net(*batch(0, 0))
    for update in (net.optimizer.update_all, net.optimizer.update_velocity):
        with pytest.raises(OptionError, match="not for updates by hand"):
            update([(net.linear.W, Tensor(net.linear.W.shape))])
    autograd.training = False
    np.testing.assert_array_equal(to_numpy(net.linear.W), before)


def puts_aside(communicator: Communicator, half: bool) -> tuple[str, list[float]]:
    """The error of a step whose gradients nobody sends, and the parameter after a step that is right."""
    sgd = opt.DistOpt(opt.SGD(lr=1.0), communicator=communicator)
    fused = sgd.fused_all_reduce_half if half else sgd.fused_all_reduce
    param, text = Tensor(data=np.zeros(2), stores_grad=True, name="w"), ""
    grad = Tensor(data=np.full(2, communicator.rank + 1.0))
    fused([grad], send=False)
    try:
        sgd.step()
    except CommError as error:
        text = str(error)
    fused([grad], send=False)
    fused([], send=True)
    sgd.update(param, grad)
    sgd.step()
    return text, to_numpy(param).tolist()


@pytest.mark.parametrize("half", [False, True])
def test_gradients_that_were_put_aside_and_never_sent_are_an_error(half: bool) -> None:
    for text, values in run_ranks(puts_aside, 3, half):
        assert "1 arrays were put aside by send=False and never sent, so this rank" in text
        assert values == [-2.0, -2.0]  # by the mean of 1, 2, 3
