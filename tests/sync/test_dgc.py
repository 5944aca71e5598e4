# SPDX-License-Identifier: Apache-2.0
"""dgc against its equations in float64, step by step on every transport, and against SGD where both are the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import CheckpointError, DTypeError, OptionError
from singa_lite.sync import find_schemes
from singa_lite.sync.base import StepContext
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks
from tests.sync.by_hand import (
    GROUPS,
    STEPS,
    WORLDS,
    Case,
    bits,
    gradients,
    joined,
    new_scheme,
    run_cases,
    sizes,
    sparse_bytes,
)
from tests.sync.make_scheme import begin, make_scheme
from tests.sync.training import Net, made, steps, values

CASES = {
    "usual": Case({"density": 0.1}),
    "Nesterov": Case({"density": 0.1}, is_nesterov=True),
    "no mask": Case({"density": 0.1, "mask": False}),
    "no momentum": Case({"density": 0.1, "momentum": False}),
    "clipped": Case({"density": 0.1, "clip": 3.0}, momentum=0.5),
    "hardly clipped": Case({"density": 0.1, "clip": 1e4}),
    "warm-up": Case({"density": 0.01, "warmup": 6}, first_step=100),
    "warm-up without a ladder": Case({"density": 0.5, "warmup": 6}),
}
# of 6 steps three rungs are above 0.01
DENSITIES = {"warm-up": [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.01, 0.01]}


def densities(label: str) -> list[float]:
    return DENSITIES.get(label, [CASES[label].options["density"]] * STEPS)


class Reference:
    """Ranks of dgc in float64, from its equations."""

    def __init__(self, case: Case, size: int) -> None:
        self.case, self.size = case, size
        self.u = [[np.zeros(n) for n in sizes()] for _ in range(size)]
        self.v = [[np.zeros(n) for n in sizes()] for _ in range(size)]

    def gradients(self, rank: int, step: int) -> list[np.ndarray]:
        found = [joined(gradients(rank, step), group).astype(np.float64) for group in GROUPS]
        clip = self.case.options.get("clip")
        if clip is not None:
            norm = math.sqrt(sum((g**2).sum() for g in found))
            found = [g * min(1.0, clip / math.sqrt(self.size) / norm) for g in found]
        return found

    def step(self, step: int, density: float) -> list[tuple[np.ndarray, list[np.ndarray]]]:
        """The mean of each group, and what each rank has sent of it, as indices."""
        m = self.case.momentum
        sent: list[list[np.ndarray]] = [[] for _ in GROUPS]
        means = [np.zeros(n) for n in sizes()]
        for rank in range(self.size):
            for number, g in enumerate(self.gradients(rank, step)):
                u, v = self.u[rank][number], self.v[rank][number]
                if self.case.options.get("momentum", True):
                    u *= m
                    u += g
                    v += g + m * u if self.case.is_nesterov else u
                else:
                    v += g
                chosen = np.sort(np.argsort(-np.abs(v), kind="stable")[: math.ceil(density * len(v))])
                means[number][chosen] += v[chosen] / self.size
                v[chosen] = 0
                if self.case.options.get("mask", True):
                    u[chosen] = 0
                sent[number].append(chosen)
        return list(zip(means, sent, strict=True))


@pytest.mark.parametrize(("transport", "size"), WORLDS)
def test_eight_steps_are_those_of_the_equations(transport: str, size: int) -> None:
    ranks = run_ranks(run_cases, size, "dgc", CASES, transport=transport)
    for label, case in CASES.items():
        reference = Reference(case, size)
        kept = [np.zeros((size, n)) for n in sizes()]  # before the step, as the ranks have it
        for step, density in enumerate(densities(label)):
            expected = reference.step(step, density)
            for rank, of_rank in enumerate(ranks):
                mine = of_rank[label][step]
                assert bits(mine.result) == bits(ranks[0][label][step].result)
                assert mine.bytes_sent == (size - 1) * sum(
                    sparse_bytes(n, math.ceil(density * n)) for n in sizes()
                )
                for number, group in enumerate(GROUPS):
                    note = f"{label}, step {step}, rank {rank}, group {number}"
                    mean, sent = expected[number]
                    np.testing.assert_allclose(
                        joined(mine.result, group), mean, rtol=1e-5, atol=1e-6, err_msg=note
                    )
                    residual = joined(mine.states, group, ":residual")
                    np.testing.assert_array_equal(np.flatnonzero(residual == 0), sent[rank], note)
                    np.testing.assert_allclose(
                        residual, reference.v[rank][number], rtol=1e-5, atol=1e-5, err_msg=note
                    )
                    if case.options.get("momentum", True):
                        velocity = joined(mine.states, group, ":velocity")
                        np.testing.assert_allclose(
                            velocity, reference.u[rank][number], rtol=1e-5, atol=1e-5, err_msg=note
                        )
            check_that_nothing_is_lost(label, ranks, reference, step, kept)


def check_that_nothing_is_lost(
    label: str, ranks: list[Any], reference: Reference, step: int, kept: list[np.ndarray]
) -> None:
    """Sent + kept = came in, over all ranks: what v had, and what was added to it; ``kept`` is the next step's."""
    case, size = CASES[label], len(ranks)
    for number, group in enumerate(GROUPS):
        states = [of_rank[label][step].states for of_rank in ranks]
        now = np.array([joined(each, group, ":residual") for each in states], np.float64)
        sent = size * joined(ranks[0][label][step].result, group).astype(np.float64)
        if not case.options.get("momentum", True):
            came_in = kept[number] + [reference.gradients(rank, step)[number] for rank in range(size)]
            np.testing.assert_allclose(sent + now.sum(axis=0), came_in.sum(axis=0), rtol=1e-5, atol=1e-5)
        kept[number] = now


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{}, {"mask": False}, {"momentum": False}, {"clip": 1.0}])
def test_what_is_not_finite_is_sent_and_forgotten(bad: float, options: dict[str, Any]) -> None:
    scheme = make_scheme("dgc", LocalCommunicator(World()), 1 << 30, 1 << 30)
    param = Tensor((50,), name="p")
    grad = np.linspace(1, 2, 50).astype(np.float32)
    grad[[3, 4, 5, 6]] = bad  # more than the two that are sent
    begin(scheme, density=0.04, **options)
    scheme.add_gradient(param, Tensor(data=grad))
    [(_, mean)] = scheme.finish()
    assert np.count_nonzero(~np.isfinite(to_numpy(mean))) == 2
    scheme.end([param])
    states = scheme.state_dict({param: "p"})
    assert all(np.isfinite(value).all() for value in states.values())
    assert (states["p:residual"][10:] == grad[10:]).all() or "clip" in options
    begin(scheme, 1, density=0.04, **options)
    scheme.add_gradient(param, Tensor(data=np.ones(50, np.float32)))
    [(_, mean)] = scheme.finish()
    assert np.isfinite(to_numpy(mean)).all() and to_numpy(mean).any()


def test_float16_is_refused() -> None:
    scheme = make_scheme("dgc", LocalCommunicator(World()), 1 << 30, 1 << 30)
    begin(scheme)
    scheme.add_gradient(Tensor((3,), dtype="float16", name="p"), Tensor((3,), dtype="float16"))
    with pytest.raises(DTypeError, match="dgc: p is float16, in which sums over many steps lose too much"):
        list(scheme.finish())


def test_counters_of_another_scheme_are_refused() -> None:
    scheme = new_scheme("dgc", LocalCommunicator(World()), Case())
    with pytest.raises(CheckpointError, match=r"dgc: .'next chunk of 1'. are not its counters"):
        scheme.load_state_dict({"counter/next chunk of 1": np.array(1)}, {})


# ---- within DistOpt ------------------------------------------------------------------------------------------------


SGDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.05},
    "Nesterov": {"momentum": 0.9, "weight_decay": 0.05, "nesterov": True},
}


def twenty_steps(communicator: Any) -> dict[str, list[dict[str, np.ndarray]]]:
    """fp32, and what must be the same: from the start, and from step 7 on; eagerly and recorded."""
    found: dict[str, list[dict[str, np.ndarray]]] = {}
    for label, sgd in SGDS.items():
        found[label] = []
        for option, use_graph, first in (
            ("fp32", False, 0),
            ("dgc:1:mask=0", False, 0),
            ("dgc:1:mask=0", True, 0),
            ("dgc:1:mask=0", True, 7),
            ("dgc:1:momentum=0", True, 0),
        ):
            net = made(communicator, use_graph, **sgd)
            steps(net, communicator.rank, 0, first)
            steps(net, communicator.rank, first, 20, option)
            found[label].append(values(net))
            breaks = [info.break_reason for info in net.graph_info()]
            assert breaks == [None] * len(breaks), breaks
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_of_a_velocity_without_masking_is_momentum_sgd(size: int) -> None:
    ranks = run_ranks(twenty_steps, size, transport="local" if size == 1 else "shm")
    for label in SGDS:
        expected = ranks[0][label][0]
        for of_rank in ranks:
            for number, found in enumerate(of_rank[label]):
                assert bits(found) == bits(ranks[0][label][number])
                for name, value in found.items():
                    np.testing.assert_allclose(
                        value, expected[name], rtol=1e-5, atol=1e-6, err_msg=f"{label} {number}"
                    )


def warm_up(communicator: Any) -> tuple[list[int], int]:
    """Bytes of each step of a recorded warm-up, and how often it was recorded."""
    net = made(communicator, True, "dgc:0.01:warmup=8", momentum=0.9)
    sent = []
    for step in range(12):
        steps(net, communicator.rank, step, step + 1)
        sent.append(net.optimizer.bytes_sent)
    return sent, len(net.graph_info())


def test_a_recorded_warm_up_has_one_record_a_rung() -> None:
    lengths = [30, 18 + 3, 6]  # at a threshold of 20
    shares = [0.25] * 2 + [0.0625] * 3 + [0.015625] * 3 + [0.01] * 4
    for sent, num_records in run_ranks(warm_up, 2):
        assert sent == [sum(sparse_bytes(n, math.ceil(share * n)) for n in lengths) for share in shares]
        assert num_records == 4


def begun_again(communicator: Any) -> list[list[int]]:
    """Bytes of each update, eager and recorded, of a warm-up that begins again as its states are taken back."""
    found = []
    for use_graph in (False, True):
        net = made(communicator, use_graph, "dgc:0.01:warmup=4", accumulate=2, momentum=0.9)
        before, sent = net.optimizer.get_states(), list[int]()
        for step in range(28):
            if step == 14:
                net.optimizer.set_states(before)
            steps(net, communicator.rank, step, step + 1)
            sent += [net.optimizer.bytes_sent] if step % 2 else []
        found.append(sent)
    return found


def test_a_warm_up_begins_again_where_states_from_before_it_are_set() -> None:
    for eager, recorded in run_ranks(begun_again, 2):
        assert eager[:7] == eager[7:] and len(set(eager)) > 2
        assert recorded == eager


def other_momentum(communicator: Any, use_graph: bool) -> None:
    net = made(communicator, use_graph, "dgc:0.1", accumulate=2, momentum=0.9)
    other = made(communicator, False, "dgc:0.1:momentum=0", momentum=0.9)
    steps(net, communicator.rank, 0, 4)
    steps(other, communicator.rank, 0, 2)
    net.optimizer.set_states(other.optimizer.get_states())
    steps(net, communicator.rank, 4, 6)


@pytest.mark.parametrize("use_graph", [False, True])
def test_states_of_a_dgc_without_momentum_are_noticed(use_graph: bool) -> None:
    for error in run_ranks(other_momentum, 2, use_graph, return_exceptions=True):
        assert isinstance(error, OptionError) and "momentum = True, but it began with False" in str(error)


def test_a_warm_up_of_an_epoch_of_ten_sends_93_times_less() -> None:
    net, size = alone(), 431080
    scheme = find_schemes()["dgc"](net.optimizer.communicator, 1, 1, net.optimizer)
    options = type(scheme).Options(warmup=469)
    scheme._first = 0
    shares = [scheme._density_at(StepContext(options, step, net.optimizer)) for step in range(4690)]
    sent = sum(sparse_bytes(size, math.ceil(share * size)) for share in shares)
    assert [shares.count(share) for share in (0.25, 0.0625, 0.015625, 0.004)] == [117, 117, 117, 118]
    assert 4690 * 4 * size / sent >= 93


def alone(**sgd: Any) -> Net:
    return made(LocalCommunicator(World()), False, **sgd)


def test_velocities_that_were_not_sent_are_not_left_behind() -> None:
    net = alone(momentum=0.9)
    steps(net, 0, 0, 1, "dgc:0.1")
    before = bits(values(net))
    with pytest.raises(OptionError, match="dgc keeps velocities that have not been sent"):
        steps(net, 0, 1, 2, "fp32")
    with pytest.raises(OptionError, match="dgc: momentum = False, but it began with True"):
        steps(net, 0, 1, 2, "dgc:0.1:momentum=0")
    param = next(iter(net.get_params().values()))
    for update in (net.optimizer.update, lambda p, g: net.optimizer.update_all([(p, g)])):
        with pytest.raises(OptionError, match="dgc keeps velocities"):
            update(param, Tensor(param.shape))
    assert bits(values(net)) == before
    other = alone(momentum=0.9)
    other.optimizer.set_states(net.optimizer.get_states())
    with pytest.raises(OptionError, match="dgc keeps velocities"):
        steps(other, 0, 1, 2, "fp32")
    steps(other, 0, 1, 2, "dgc:0.1")


def test_a_counter_behind_its_first_step_begins_the_warm_up_again() -> None:
    scheme = find_schemes()["dgc"](LocalCommunicator(World()), 1, 1 << 20, None)
    scheme.set_counters({"first step": 60, "has momentum": 1})  # type: ignore[attr-defined]
    options = find_schemes()["dgc"].Options(density=0.002, warmup=4)  # type: ignore[call-arg]
    steps_done = [scheme.step_key(StepContext(options, step, None)) for step in (60, 0, 59, 64)]  # type: ignore[arg-type]
    assert steps_done == [0.25, 0.25, 0.25, 0.002]


def one_nan(communicator: Any) -> list[bool]:
    """After a batch with a NaN on rank 1: whether a parameter is NaN, and whether all that dgc keeps is finite."""
    net = made(communicator, False, "dgc:0.1", momentum=0.9)
    steps(net, communicator.rank, 0, 1)
    x = np.ones((4, 5))
    x[0, 0] = np.nan if communicator.rank == 1 else 1
    net(Tensor(data=x), Tensor(data=np.ones((4, 3))))
    autograd.training = False
    states = net.optimizer.get_states()
    finite = [np.isfinite(value).all() for name, value in states.items() if name.startswith("sync/")]
    return [any(np.isnan(value).any() for value in values(net).values()), bool(finite and all(finite))]


def test_a_nan_reaches_all_ranks_in_its_step() -> None:
    assert run_ranks(one_nan, 3) == [[True, True]] * 3
