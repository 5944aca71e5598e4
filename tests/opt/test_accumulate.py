# SPDX-License-Identifier: Apache-2.0
"""DistOpt(accumulate=n): n calls make one update, by every dist_option, eagerly and recorded."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import CheckpointError, CommError, OptionError
from singa_lite.sync import find_schemes
from singa_lite.tensor import Tensor, to_numpy
from tests.opt.every_scheme import (
    ACTIVE,
    EXACT,
    MeanOfTwo,
    Net,
    batch,
    check_that_none_is_missing,
    everything,
    made,
    no_breaks,
    trained,
    two_ranks_a_host,
    values,
)
from tests.ranks import run_ranks

UPDATES = 5


def alone() -> LocalCommunicator:
    return LocalCommunicator(World())


def test_every_scheme_is_tested_here() -> None:
    check_that_none_is_missing()


@pytest.mark.parametrize(
    "given",
    [
        {"accumulate": np.int64(2)},
        {"microbatches": np.int64(2)},
        {"clip_norm": np.float32(1)},
        {"clip_norm": Fraction(1, 2)},
    ],
)
def test_arguments_may_be_numpys_numbers(given: dict[str, Any]) -> None:
    net = made(alone(), False, dist_option="fp32", **given)
    assert (
        net.optimizer.settings()
        == made(alone(), False, dist_option="fp32", **plain(given)).optimizer.settings()
    )


def plain(given: dict[str, Any]) -> dict[str, Any]:
    return {name: float(value) if name == "clip_norm" else int(value) for name, value in given.items()}


def four_of_16_or_64(communicator: Any) -> None:
    with two_ranks_a_host(communicator):
        for text in EXACT.values():
            nets = [
                made(communicator, use_graph, dist_option=text, accumulate=n)
                for n, use_graph in ((1, False), (4, False), (4, True))
            ]
            for update in range(10):
                x, y = (to_numpy(part) for part in batch(communicator.rank, update, 64))
                nets[0](Tensor(data=x), Tensor(data=y))
                for net in nets[1:]:
                    for part in range(0, 64, 16):
                        net(Tensor(data=x[part : part + 16]), Tensor(data=y[part : part + 16]))
                whole, *others = map(values, nets)
                for other in others:
                    for name, value in whole.items():
                        np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=1e-6, err_msg=text)
            assert [net.optimizer.opt.step_counter for net in nets] == [10, 10, 10]
            assert everything(nets[1]) == everything(nets[2]), text
    autograd.training = False


@pytest.mark.parametrize("size", [1, 3])
def test_four_batches_of_16_equal_one_of_64(size: int) -> None:
    run_ranks(four_of_16_or_64, size, transport="local" if size == 1 else "shm")


def two_or_mean_of_two(communicator: Any) -> dict[str, dict[str, bytes]]:
    """Bits of each scheme where two calls accumulate, the same as of one call by the mean of both losses."""
    rank, found = communicator.rank, {}
    with two_ranks_a_host(communicator):
        for name, text in ACTIVE.items():
            whole = made(communicator, False, MeanOfTwo, dist_option=text)
            nets = [made(communicator, use, dist_option=text, accumulate=2) for use in (False, True)]
            for update in range(UPDATES):
                whole(*batch(rank, 2 * update), *batch(rank, 2 * update + 1))
                before = everything(nets[0])
                for net in nets:
                    trained(net, rank, 2 * update, 2 * update + 1)
                assert {key: everything(nets[0])[key] for key in before} == before, text
                for net in nets:
                    trained(net, rank, 2 * update + 1, 2 * update + 2)
                assert everything(nets[0]) == everything(whole), (text, update)
                assert everything(nets[1]) == everything(whole), (text, update)
            assert no_breaks(nets[1]) <= 5, text
            if text == "fp32":
                assert no_breaks(nets[1]) == 2  # one that adds, one that updates
            found[name] = everything(whole)
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_two_calls_have_the_bits_of_one_by_the_mean_of_both(size: int) -> None:
    ranks = run_ranks(two_or_mean_of_two, size, transport="local" if size == 1 else "shm")
    for name in ACTIVE:
        for of_rank in ranks:
            if find_schemes()[name].keeps_equal:
                assert {k: v for k, v in of_rank[name].items() if "sync/" not in k} == {
                    k: v for k, v in ranks[0][name].items() if "sync/" not in k
                }, name


def resume_mid_sum(communicator: Any) -> None:
    rank = communicator.rank
    with two_ranks_a_host(communicator):
        for text in ACTIVE.values():
            for use_graph in (False, True):
                whole, second = (
                    made(communicator, use_graph, dist_option=text, accumulate=3) for _ in range(2)
                )
                trained(second, rank, 50, 51)  # what is in its sum is forgotten
                trained(whole, rank, 0, 8)  # two updates, and two batches of the third
                states = whole.optimizer.get_states()
                assert int(states["accumulate/calls"]) == 2
                second.set_params(values(whole))
                second.optimizer.set_states(states)
                assert everything(second) == everything(whole), text
                for net in (whole, second):
                    trained(net, rank, 8, 13)
                assert everything(second) == everything(whole), text


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_resumed_within_a_sum_goes_on_bit_for_bit(size: int) -> None:
    run_ranks(resume_mid_sum, size, transport="local" if size == 1 else "shm")


def test_a_sum_that_was_loaded_in_another_order_fits_the_record_of_its_update() -> None:
    whole, second = (
        made(LocalCommunicator(World()), True, dist_option="fp32", accumulate=2) for _ in range(2)
    )
    trained(whole, 0, 0, 3)
    states = whole.optimizer.get_states()
    assert len(states) > 3  # two sums at least
    second.set_params(values(whole))
    second.optimizer.set_states(dict(reversed(states.items())))
    for net in (whole, second):
        trained(net, 0, 3, 9)
    assert len(second.graph_info()) == len(whole.graph_info()) == 2
    assert everything(second) == everything(whole)


def test_states_without_a_sum_begin_a_new_one() -> None:
    first, second = (made(alone(), False, accumulate=3) for _ in range(2))
    start, states = values(first), first.optimizer.get_states()
    trained(first, 0, 10, 12)
    first.set_params(start)
    first.optimizer.set_states(states)
    for net in (first, second):
        trained(net, 0, 0, 3)
    assert everything(first) == everything(second)


def sent(communicator: Any) -> None:
    with two_ranks_a_host(communicator):
        for text in ("fp32", "sparseTopK:0.3", "localSGD:2", "hierarchical:fp32"):
            for use_graph in (False, True):
                net, total, payload = made(communicator, use_graph, dist_option=text, accumulate=3), 0, 0
                for call in range(15):
                    trained(net, communicator.rank, call, call + 1)
                    total += net.optimizer.bytes_sent if call % 3 == 2 else 0
                    payload += net.optimizer.bytes_payload if call % 3 == 2 else 0
                    assert net.optimizer.total_bytes_sent == total, (text, call)
                    assert net.optimizer.total_bytes_payload == payload, (text, call)
                assert payload > 0 < total != payload
                net.optimizer.set_states(net.optimizer.get_states())
                assert net.optimizer.total_bytes_sent == total


def test_total_bytes_are_those_of_all_updates() -> None:
    run_ranks(sent, 3)


class Heads(Net):
    """Parameters of which only one is used by each batch, and one by none of some updates."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = [Tensor(data=np.full((6, 3), 0.1 + i), stores_grad=True, name=f"h{i}") for i in range(3)]
        self.used = [0, 1]

    def train_one_batch(self, x: Tensor, y: Tensor, *used: int) -> Tensor:
        out = autograd.tanh(self.first(x))
        loss = self.loss(autograd.matmul(out, self.heads[used[0]]), y)
        for head in used[1:]:
            loss = loss + self.loss(autograd.matmul(out, self.heads[head]), y)
        self.optimizer(loss)
        return loss


# the heads that each call uses, two calls an update; some end alike and have begun with others
USED = [
    (0,),
    (1, 2),
    (1,),
    (0,),
    (2,),
    (0,),
    (1,),
    (0,),
    (2,),
    (0,),
    (1, 2),
    (0,),
    (0,),
    (0,),
    (0,),
    (1, 2),
    (2,),
    (0,),
]


def use_heads(communicator: Any) -> list[dict[str, bytes]]:
    nets = [
        made(communicator, use_graph, Heads, dist_option="sparseTopK:0.3", accumulate=2)
        for use_graph in (False, True)
    ]
    for number, used in enumerate(USED):
        for net in nets:
            before = [to_numpy(head) for head in net.heads]
            net(*batch(communicator.rank, number), *used)
            changed = {i for i in range(3) if to_numpy(net.heads[i]).tobytes() != before[i].tobytes()}
            assert changed == ({*USED[number - 1], *used} if number % 2 else set())
    autograd.training = False
    assert everything(nets[0]) == everything(nets[1])
    assert no_breaks(nets[1]) > 2
    return [everything(net) for net in nets]


def test_a_parameter_that_a_batch_does_not_use_counts_as_zeros_for_it() -> None:
    run_ranks(use_heads, 2)
    net = made(alone(), False, Heads, sgd=opt.SGD(0.5), accumulate=2)
    x, y = batch(0, 0)
    other = made(alone(), False, Heads, sgd=opt.SGD(0.25))
    other(x, y, 0)
    for head in (0, 1):
        net(x, y, head)
    autograd.training = False
    np.testing.assert_allclose(to_numpy(net.heads[0]), to_numpy(other.heads[0]), rtol=1e-6)


@pytest.mark.parametrize("text", ["int8", "sparseTopK:0.3"])
def test_parameters_without_a_gradient_in_the_last_call_come_in_an_order_that_loading_keeps(
    text: str,
) -> None:
    whole, *others = (
        made(alone(), False, Heads, dist_option=text, accumulate=2, clip_norm=0.01) for _ in range(3)
    )
    whole(*batch(0, 0), 2, 1)
    states = whole.optimizer.get_states()
    for net, items in zip(others, (states.items(), reversed(states.items())), strict=True):
        net.set_params(values(whole))
        net.optimizer.set_states(dict(items))
    for number, used in enumerate([(0,), (1, 2), (0,)]):
        for net in (whole, *others):
            net(*batch(0, number), *used)
    autograd.training = False
    assert everything(others[0]) == everything(others[1]) == everything(whole)


class ThreeCalls(Net):
    """A recorded step of three calls: where accumulate is 2, of one or two updates."""

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        for scale in (1.0, 0.5, 2.0):
            loss = self.loss(self.forward(x * scale), y)
            self.optimizer(loss)
        return loss


@pytest.mark.parametrize("text", ["fp32", "sparseTopK:0.2", "localSGD:2"])
def test_several_calls_of_a_recorded_step_have_the_bits_of_eager_ones(text: str) -> None:
    nets = [
        made(alone(), use_graph, ThreeCalls, dist_option=text, accumulate=2) for use_graph in (False, True)
    ]
    for number in range(9):
        for net in nets:
            trained(net, 0, number, number + 1)
        assert everything(nets[0]) == everything(nets[1]), number
    assert no_breaks(nets[1]) <= 4


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_sums_are_float32_or_wider(dtype: str) -> None:
    param = Tensor(data=np.zeros(4), dtype=dtype, stores_grad=True, name="p")
    dist = opt.DistOpt(opt.SGD(1.0), communicator=alone(), accumulate=8)
    autograd.training = True
    grads = np.array([[60000.0, 1.0, 2048.0 if i == 0 else 0.75, 1e-3 * i] for i in range(8)]).astype(dtype)
    for grad in grads:
        dist(autograd.reduce_sum(param * Tensor(data=grad, dtype=dtype), keepdims=0))
    autograd.training = False
    expected = -grads.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(
        to_numpy(param), expected, rtol={"float16": 1e-3, "float32": 1e-6}.get(dtype, 1e-15)
    )
    assert to_numpy(param).dtype == dtype


def test_nan_in_one_batch_reaches_its_update_and_no_other() -> None:
    param = Tensor(data=np.zeros(2), stores_grad=True, name="p")
    dist = opt.DistOpt(opt.SGD(1.0), communicator=alone(), accumulate=2)
    autograd.training = True
    seen = []
    for grad in ([np.nan, 1.0], [1.0, 1.0], [1.0, 1.0], [3.0, 1.0]):
        dist(autograd.reduce_sum(param * Tensor(data=grad), keepdims=0))
        seen.append(to_numpy(param))
        if np.isnan(seen[-1]).any():
            param.copy_from_numpy(np.zeros(2, np.float32))
    autograd.training = False
    np.testing.assert_array_equal(seen, [[0, 0], [np.nan, -1], [0, 0], [-2, -1]])


class Breaks(Exception):
    """What a step of a test raises."""


def test_a_call_that_failed_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nets = [made(alone(), False, accumulate=2) for _ in range(2)]
    backward = autograd.backward

    def failing(loss: Tensor) -> Any:
        for number, pair in enumerate(backward(loss)):
            if number == 2:
                raise Breaks
            yield pair

    for number in range(6):
        with monkeypatch.context() as patch:
            patch.setattr(autograd, "backward", failing)
            with pytest.raises(Breaks):
                trained(nets[1], 0, number, number + 1)
        for net in nets:
            trained(net, 0, number, number + 1)
        assert everything(nets[0]) == everything(nets[1]), number


@pytest.mark.parametrize("accumulate", [0, -1, 2.0, "2", None, True])
def test_wrong_numbers_of_batches_are_refused(accumulate: Any) -> None:
    with pytest.raises(OptionError, match="accumulate"):
        opt.DistOpt(communicator=alone(), accumulate=accumulate)


def test_states_of_another_sum_are_refused_and_change_nothing() -> None:
    net = made(alone(), False, accumulate=3)
    trained(net, 0, 0, 5)
    states = net.optimizer.get_states()
    some = next(key for key in states if key.startswith("accumulate/sum/"))
    wrong = [
        {**states, "accumulate/calls": np.array(3)},
        {**states, "accumulate/batches": np.array(2)},
        {**states, some: np.zeros(77, np.float32)},
        {**states, some: states[some].astype(np.float64)},
        {**states, "accumulate/sum/nobody": states[some]},
    ]
    before = everything(net)
    for each in wrong:
        with pytest.raises(CheckpointError):
            net.optimizer.set_states(each)
        assert everything(net) == before
    for other in (made(alone(), False), made(alone(), False, accumulate=4)):
        with pytest.raises(
            CheckpointError, match=r"calls that make an update, but here \d do; .* same accumulate"
        ):
            other.optimizer.set_states(states)


def other_number(communicator: Any) -> None:
    made(communicator, False, accumulate=2 + communicator.rank // 2)


def other_call(communicator: Any) -> None:
    net = made(communicator, False, accumulate=3)
    trained(net, communicator.rank, 0, 1)
    first = net.optimizer.get_states()
    trained(net, communicator.rank, 1, 2)
    net.optimizer.set_states(net.optimizer.get_states() if communicator.rank == 2 else first)
    trained(net, communicator.rank, 2, 3)


@pytest.mark.parametrize(("function", "text"), [(other_number, "accumulate"), (other_call, "unfinished sum")])
def test_ranks_that_differ_are_an_error_on_all(function: Any, text: str) -> None:
    for error in run_ranks(function, 3, return_exceptions=True):
        assert isinstance(error, CommError)
        assert f"{text} is" in str(error) and "rank 0" in str(error) and "rank 2" in str(error), error
