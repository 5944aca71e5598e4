# SPDX-License-Identifier: Apache-2.0
"""DistOpt(check_finite=): a gradient that is not finite on one rank raises, or leaves the update out, on all."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, checkpoint, opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.device import get_default_device
from singa_lite.errors import CommError, GraphError, NonFiniteError, OptionError
from singa_lite.sync.finite import WARN_AFTER
from singa_lite.tensor import Tensor, to_numpy
from tests.opt import every_scheme
from tests.opt.every_scheme import (
    ACTIVE,
    Net,
    batch,
    check_that_none_is_missing,
    no_breaks,
    two_ranks_a_host,
)
from tests.ranks import run_ranks

BAD_STEP = 3


def made(communicator: Any, text: str, use_graph: bool, mode: str | None, **options: Any) -> Net:
    get_default_device().SetRandSeed(1)
    net = Net()
    sgd = opt.SGD(lr=0.1, momentum=0.9)
    net.set_optimizer(
        opt.DistOpt(sgd, communicator=communicator, dist_option=text, check_finite=mode, **options)
    )
    net.compile([batch(communicator.rank, 0)[0]], use_graph=use_graph)
    return net


def everything(net: Net) -> dict[str, bytes]:
    """All states but what check_finite counts."""
    return {k: v for k, v in every_scheme.everything(net).items() if not k.startswith("finite/")}


def spoilt(rank: int, step: int, value: float) -> tuple[Tensor, Tensor]:
    x, y = (to_numpy(part) for part in batch(rank, step))
    x[0, 0] = value
    return Tensor(data=x), Tensor(data=y)


def mixed(communicator: Any) -> str:
    """The error where ranks decide about other DistOpts of the same communicator."""
    nets = [made(communicator, "fp32", False, mode) for mode in ("skip", "skip")]
    for net in nets:
        net(*batch(communicator.rank, 0))
    try:
        nets[communicator.rank % 2](*spoilt(communicator.rank, 1, np.nan))
    except CommError as error:
        return str(error)
    return "no error"


def test_ranks_that_decide_about_other_dist_opts_get_an_error() -> None:
    for error in run_ranks(mixed, 2):
        assert "the ranks disagree" in error and "'DistOpt 2 whether gradients are finite" in error, error


def raised(communicator: Any, use_graph: bool) -> dict[str, tuple[str, bool, bool]]:
    """By scheme: the error of a step with NaN on rank 1, whether nothing changed, and whether training goes on."""
    rank, found = communicator.rank, {}
    with two_ranks_a_host(communicator):
        for name, text in ACTIVE.items():
            net, twin = (
                made(communicator, text, use_graph, "raise"),
                made(communicator, text, use_graph, None),
            )
            for step in range(BAD_STEP):
                net(*batch(rank, step))
                twin(*batch(rank, step))
            same, before, error = everything(net) == everything(twin), everything(net), ""
            try:
                net(*(spoilt(rank, BAD_STEP, np.nan) if rank == 1 else batch(rank, BAD_STEP)))
            except NonFiniteError as caught:
                error = str(caught)
            kept = everything(net) == before
            net(*batch(rank, BAD_STEP))
            twin(*batch(rank, BAD_STEP))
            found[name] = error, kept and same, use_graph or everything(net) == everything(twin)
    autograd.training = False
    return found


@pytest.mark.parametrize("use_graph", [False, True])
def test_raise_names_parameter_and_rank_on_all_and_changes_nothing(use_graph: bool) -> None:
    check_that_none_is_missing()
    for found in run_ranks(raised, 3, use_graph):
        assert set(found) == set(ACTIVE)
        for name, (error, kept, goes_on) in found.items():
            assert "on rank 1 (" in error and f"at step {BAD_STEP}" in error, (name, error)
            assert "on rank 0" not in error and kept and goes_on, name


def skipped(communicator: Any, use_graph: bool, value: float) -> dict[str, tuple[int, int, bool, bool]]:
    """By scheme: updates left out, updates made, and whether bits are those of a run without the bad step."""
    rank, found = communicator.rank, {}
    with two_ranks_a_host(communicator):
        for name, text in ACTIVE.items():
            net, twin = (made(communicator, text, use_graph, "skip") for _ in range(2))
            for step in range(6):
                if step == BAD_STEP:
                    net(*(spoilt(rank, step, value) if rank == 2 else batch(rank, step)))
                net(*batch(rank, step))
                twin(*batch(rank, step))
            mine, theirs = everything(net), everything(twin)
            differs = [key for key, value in theirs.items() if mine[key] != value]
            states = {name: to_numpy(value) for name, value in net.get_params().items()}
            finite = all(np.isfinite(value).all() for value in states.values())
            if use_graph:
                no_breaks(net)
            found[name] = net.optimizer.num_skipped, net.optimizer.step_counter, not differs, finite
    autograd.training = False
    return found


@pytest.mark.parametrize(("use_graph", "value"), [(False, np.inf), (True, np.nan)])
def test_skip_leaves_the_update_out_on_all_ranks(use_graph: bool, value: float) -> None:
    for found in run_ranks(skipped, 3, use_graph, value):
        assert found == dict.fromkeys(ACTIVE, (1, 6, True, True))


def with_sums(communicator: Any) -> list[Any]:
    """A bad batch within a sum of two drops both; without the option NaN spreads."""
    rank = communicator.rank
    net, plain = (
        made(communicator, "fp32", False, "skip", accumulate=2),
        made(communicator, "fp32", False, None),
    )
    net(*batch(rank, 0))
    net(*batch(rank, 1))
    good = everything(net)
    net(*(spoilt(rank, 2, np.nan) if rank == 0 else batch(rank, 2)))
    net(*batch(rank, 3))
    now = everything(net)
    kept = [key for key, value in good.items() if now[key] != value]
    net(*batch(rank, 4))
    net(*batch(rank, 5))
    plain(*(spoilt(rank, 0, np.nan) if rank == 0 else batch(rank, 0)))
    autograd.training = False
    spread = any(np.isnan(to_numpy(value)).any() for value in plain.get_params().values())
    return [[key.rsplit("/")[-1] for key in kept], net.optimizer.step_counter, spread]


def test_a_bad_batch_within_a_sum_drops_the_sum() -> None:
    for kept, steps, spread in run_ranks(with_sums, 2):
        assert kept == [] and steps == 2 and spread


class Half(Net):
    """Parameters and activations in float16."""


def raised_with_sums(communicator: Any, use_graph: bool, options: dict[str, Any]) -> tuple[list[int], bool]:
    """The calls that raise after a NaN in the first of three calls an update, and whether the rest is finite."""
    net, rank, raises = made(communicator, "fp32", use_graph, "raise", **options), communicator.rank, []
    for call in range(18):
        try:
            net(*(spoilt(rank, call, np.nan) if rank == 1 and call == 9 else batch(rank, call)))
        except NonFiniteError:
            raises.append(call)
    autograd.training = False
    states = [
        np.frombuffer(value, np.float32) for name, value in everything(net).items() if name.endswith("W")
    ]
    return raises, net.optimizer.step_counter == 5 and all(np.isfinite(value).all() for value in states)


@pytest.mark.parametrize("use_graph", [False, True])
def test_raise_begins_a_sum_again_that_has_seen_a_bad_call(use_graph: bool) -> None:
    assert run_ranks(raised_with_sums, 3, use_graph, {"accumulate": 3}) == [([11], True)] * 3
    assert run_ranks(raised_with_sums, 2, use_graph, {"microbatches": 6}) == [([11], True)] * 2


@pytest.mark.parametrize(("mode", "scale"), [(None, 1.0), ("raise", 1.0), ("skip", 2.0**15)])
def test_the_loss_is_scaled_where_updates_may_be_left_out(mode: str | None, scale: float) -> None:
    alone = LocalCommunicator(World())
    assert opt.DistOpt(opt.SGD(lr=0.1), communicator=alone, check_finite=mode).loss_scale == scale


def halves(communicator: Any, use_graph: bool) -> list[float]:
    """The loss scale after steps of a float16 loss, and how many updates were left out."""
    rank = communicator.rank
    net = Half()
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.01), communicator=communicator, check_finite="skip"))
    x, y = (to_numpy(part) for part in batch(rank, 0))
    half = [
        Tensor(data=x.astype(np.float16)),
        Tensor(data=y.astype(np.float16) if y.dtype.kind == "f" else y),
    ]
    net.compile([half[0]], use_graph=use_graph)
    before = {name: to_numpy(value) for name, value in net.get_params().items()}
    large = [Tensor(data=(x * 200).astype(np.float16)), Tensor(data=(y * 100).astype(np.float16))]
    for _ in range(10):
        net(*large)
    skipped, scale = net.optimizer.num_skipped, net.optimizer.loss_scale
    changed = [name for name, value in net.get_params().items() if np.any(to_numpy(value) != before[name])]
    autograd.training = False
    assert all(value.dtype == np.float16 for value in before.values())
    finite = all(np.isfinite(to_numpy(value)).all() for value in net.get_params().values())
    if use_graph:  # though updates were left out while the first steps were recorded
        no_breaks(net)
    return [skipped, scale, float(bool(changed)), float(finite)]


@pytest.mark.parametrize("use_graph", [False, True])
def test_the_scale_of_a_float16_loss_falls_until_gradients_are_finite(use_graph: bool) -> None:
    results = run_ranks(halves, 2, use_graph)
    assert results[0] == results[1]
    skipped, scale, changed, finite = results[0]
    assert skipped >= 4 and scale == 2.0 ** (15 - skipped) and changed and finite


def scaled_replays(communicator: Any) -> list[Any]:
    """Scales of a float16 model's loss, some of whose gradients overflow, and its parameters, eagerly and recorded."""
    rank, found = communicator.rank, []
    for use_graph in (False, True):
        get_default_device().SetRandSeed(1)
        net = Half()
        sgd = opt.SGD(lr=0.01, momentum=0.9)
        net.set_optimizer(opt.DistOpt(sgd, communicator=communicator, check_finite="skip", accumulate=2))
        net.compile([Tensor(data=to_numpy(batch(rank, 0)[0]).astype(np.float16))], use_graph=use_graph)
        scales = []
        for call in range(30):
            x, y = (to_numpy(part).astype(np.float16) for part in batch(rank, call))
            if call in (6, 9) and rank == 1:  # in the first and in the second call of an update
                y *= np.float16(1000)
            if call >= 12:  # which overflow until the scale is small enough
                y *= np.float16(100)
            net(Tensor(data=x), Tensor(data=y))
            scales.append(net.optimizer.loss_scale)
        if use_graph:
            no_breaks(net)
        params = [to_numpy(value).astype(float) for value in net.get_params().values()]
        found.append((scales, net.optimizer.step_counter, params))
    autograd.training = False
    return found


def test_replays_read_the_scale_again_and_leave_updates_out() -> None:
    for eager, recorded in run_ranks(scaled_replays, 3):
        assert eager[:2] == recorded[:2] and eager[1] > 5
        scales = eager[0]
        assert scales[5:12] == [scales[5]] * 2 + [scales[5] / 2] * 2 + [scales[5] / 4] * 3
        assert scales[-6] == scales[-1] <= scales[11] / 4
        for a, b in zip(eager[2], recorded[2], strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-3)


def never_finite(communicator: Any, use_graph: bool) -> tuple[list[str], int]:
    """What is warned of while NaN comes for 40 steps, but for one batch, after which parameters hold a NaN."""
    net = made(communicator, "fp32", use_graph, "skip")
    net(*batch(communicator.rank, 0))
    states = net.optimizer.get_states()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(WARN_AFTER - 1):
            net(*spoilt(communicator.rank, step, np.nan))
        net(*batch(communicator.rank, 1))  # counts anew
        for step in range(WARN_AFTER - 1):
            net(*spoilt(communicator.rank, step, np.nan))
        net.optimizer.set_states(states)  # and again
        before = len(caught)
        net.second.W.copy_from_numpy(np.full(net.second.W.shape, np.nan, np.float32))
        for step in range(2 * WARN_AFTER):
            net(*batch(communicator.rank, step))
    autograd.training = False
    return [str(each.message) for each in caught if "in a row" in str(each.message)], before


@pytest.mark.parametrize("use_graph", [False, True])
def test_updates_that_are_left_out_for_ever_are_warned_of_once_by_rank_0(use_graph: bool) -> None:
    (first, early), *others = run_ranks(never_finite, 3, use_graph)
    assert early == 0 and len(first) == 1 and "17 updates in a row" in first[0], (early, first)
    assert "'second.b' on rank 0 (" in first[0] and "on rank 2 (" in first[0]
    assert [texts for texts, _ in others] == [[], []]


class OneOfTwo(Net):
    """Uses one of two layers, or both."""

    used = "both"

    def forward(self, x: Tensor) -> Tensor:
        hidden = autograd.tanh(self.first(x))
        return self.second(hidden) if self.used == "both" else autograd.matmul(hidden, self.second.W)


def other_parameters(communicator: Any) -> str:
    net = OneOfTwo()
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1), communicator=communicator, check_finite="raise"))
    net.compile([batch(0, 0)[0]], use_graph=False)
    net(*batch(communicator.rank, 0))
    net.used = "one" if communicator.rank == 1 else "both"  # without second.b, which comes first
    x, y = batch(communicator.rank, 1)
    with pytest.raises(NonFiniteError) as caught:
        net(*((x, Tensor(data=np.full(y.shape, np.inf))) if communicator.rank == 1 else (x, y)))
    autograd.training = False
    return str(caught.value)


def test_the_name_is_right_where_ranks_have_gradients_of_other_parameters() -> None:
    texts = run_ranks(other_parameters, 3)
    assert len(set(texts)) == 1 and "'second.W' on rank 1 (18 of 18 elements)" in texts[0], texts


class After(Net):
    """Computes behind the update."""

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        super().train_one_batch(x, y)
        return autograd.reduce_sum(y)


def test_what_comes_behind_an_update_that_is_left_out_is_replayed() -> None:
    net = After()
    sgd = opt.SGD(lr=0.1)
    net.set_optimizer(opt.DistOpt(sgd, communicator=LocalCommunicator(World()), check_finite="skip"))
    net.compile([batch(0, 0)[0]], use_graph=True)
    for step in range(6):
        x, y = spoilt(0, step, np.nan) if step in (2, 3) else batch(0, step)
        np.testing.assert_allclose(net(x, y).item(), to_numpy(y).sum(), rtol=1e-5)
    autograd.training = False
    assert (net.optimizer.num_skipped, sgd.step_counter, no_breaks(net)) == (2, 4, 1)


class Twice(Net):
    """Makes two updates a step."""

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        super().train_one_batch(x, y)
        return super().train_one_batch(x[1:], y[1:])  # of spoilt() finite


class Reads(Net):
    """A step whose result depends on what was left out before."""

    name = "num_skipped"

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        number = getattr(self.optimizer, self.name)
        return super().train_one_batch(x, y) * float(number)


class Scaled(Reads):
    name = "loss_scale"


def trained(
    kind: type[Net], use_graph: bool, bad: tuple[int, ...], text: str = "fp32"
) -> tuple[Net, list[float]]:
    get_default_device().SetRandSeed(1)
    net = kind()
    sgd = opt.SGD(lr=0.1, momentum=0.9)
    net.set_optimizer(
        opt.DistOpt(sgd, communicator=LocalCommunicator(World()), dist_option=text, check_finite="skip")
    )
    net.compile([batch(0, 0)[0]], use_graph=use_graph)
    results = []
    for step in range(8):
        loss = net(*(spoilt(0, step, np.nan) if step in bad else batch(0, step)))
        results.append(float(to_numpy(loss).sum()))
    autograd.training = False
    return net, results


@pytest.mark.parametrize("text", ["fp32", "partialUpdate", "localSGD:2:start=1"])
def test_a_step_with_two_updates_that_may_be_left_out_runs_eagerly(text: str) -> None:
    nets = [trained(Twice, use_graph, (4, 5), text)[0] for use_graph in (False, True)]
    assert everything(nets[0]) == everything(nets[1]) and nets[1].optimizer.num_skipped == 2
    [info] = nets[1].graph_info()
    assert "two parts of it may be left out" in info.break_reason


@pytest.mark.parametrize("kind", [Reads, Scaled])
def test_a_step_that_reads_what_an_update_left_out_changes_runs_eagerly(kind: type[Reads]) -> None:
    (_, eager), (net, recorded) = (trained(kind, use_graph, (2, 4)) for use_graph in (False, True))
    np.testing.assert_array_equal(eager, recorded)
    [info] = net.graph_info()
    assert f"it reads {kind.name}" in info.break_reason


@pytest.mark.parametrize("bad", [(6,), (6, 7), (7,)])
def test_a_run_that_leaves_out_the_update_behind_its_checkpoint_goes_on_with_the_same_bits(
    bad: tuple[int, ...], tmp_path: Any
) -> None:
    def go(net: Net, steps: range) -> dict[str, bytes]:
        for step in steps:
            net(*(spoilt(0, step, np.nan) if step in bad else batch(0, step)))
        return every_scheme.everything(net)

    nets = []
    for _ in range(2):
        get_default_device().SetRandSeed(1)
        nets.append(Net())
        communicator = LocalCommunicator(World())
        nets[-1].set_optimizer(
            opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), communicator=communicator, check_finite="skip")
        )
        nets[-1].compile([batch(0, 0)[0]], use_graph=True, precision="bf16")
    net, other = nets
    go(net, range(6))
    net.save_states(str(tmp_path / "net.zip"))
    other.load_states(str(tmp_path / "net.zip"))
    assert go(net, range(6, 12)) == go(other, range(6, 12))
    autograd.training = False


def test_a_part_that_did_not_end_breaks_the_graph(monkeypatch: Any) -> None:
    device = get_default_device()
    weight = Tensor(data=np.ones((5, 3), np.float32), requires_grad=True, stores_grad=True)
    weight.name = "w"
    sgd = opt.DistOpt(
        opt.SGD(lr=0.1), communicator=LocalCommunicator(World()), check_finite="skip", clip_norm=1.0
    )
    x = Tensor(data=np.ones((4, 5), np.float32))
    autograd.training = True
    sgd(autograd.reduce_mean(autograd.matmul(x, weight)))

    def fail(*_: Any) -> None:
        raise RuntimeError("told to fail")

    monkeypatch.setattr("singa_lite.opt.dist.clip_gradients", fail)
    device.EnableGraph(True)
    with pytest.raises(RuntimeError, match="told to fail"):
        sgd(autograd.reduce_mean(autograd.matmul(x, weight)))
    device.EnableGraph(False)
    with pytest.raises(GraphError, match="did not end"):
        device.RunGraph()
    device.ResetGraph()
    autograd.training = False


def small_gradients(communicator: Any) -> list[int]:
    """How many gradients of a float16 model are not zero, without and with a scale of the loss."""
    found = []
    for mode in (None, "skip"):
        net = made(communicator, "fp32", False, mode)
        weight = Tensor(data=np.full((4, 4), 1e-2, np.float16), requires_grad=True, stores_grad=True)
        autograd.training = True
        x, small = (
            Tensor(data=np.full((2, 4), 1e3, np.float16)),
            Tensor(data=np.full((2, 4), 1e-4, np.float16)),
        )
        # behind both factors a gradient is 1e-9, which float16 does not have; that of the weight is 3e-6
        y = autograd.mul(autograd.mul(autograd.matmul(x, weight), small), small)
        loss = autograd.reduce_mean(y)
        grads = dict(net.optimizer._backward(loss))
        found.append(int(np.count_nonzero(to_numpy(grads[weight]))))
    autograd.training = False
    return found


def test_a_scale_keeps_what_would_vanish_between_operators() -> None:
    without, scaled = run_ranks(small_gradients, 1, transport="local")[0]
    assert (without, scaled) == (0, 16)


def resumed(communicator: Any, folder: str) -> list[Any]:
    net = made(communicator, "fp32", False, "skip")
    for step in range(4):
        net(*(spoilt(communicator.rank, step, np.inf) if step == 1 else batch(communicator.rank, step)))
    checkpoint.save_job(folder, net)
    found = []
    for mode in ("skip", "raise", None):
        other = made(communicator, "fp32", False, mode)
        checkpoint.load_job(folder, other)
        found.append((other.optimizer.num_skipped, other.optimizer.loss_scale))
    autograd.training = False
    return found


def test_a_checkpoint_keeps_the_scale(tmp_path: Any) -> None:
    for found in run_ranks(resumed, 2, str(tmp_path)):
        assert found == [(1, 2.0**14), (1, 1.0), (0, 1.0)]


def test_another_word_is_refused() -> None:
    with pytest.raises(OptionError, match="check_finite = 'warn'"):
        opt.DistOpt(opt.SGD(lr=0.1), check_finite="warn")
