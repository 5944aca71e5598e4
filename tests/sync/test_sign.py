# SPDX-License-Identifier: Apache-2.0
"""sign against its equations in float64, step by step on every transport."""

from __future__ import annotations

import numpy as np
import pytest

from singa_lite import autograd, opt
from singa_lite.comm.base import Communicator, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import CheckpointError, DTypeError
from singa_lite.sync.base import Scheme
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks
from tests.sync.by_hand import (
    GROUPS,
    SHAPES,
    STEPS,
    WORLDS,
    Case,
    bits,
    gradients,
    new_scheme,
    run_cases,
    sizes,
)
from tests.sync.make_scheme import begin, make_scheme

LRS = (0.1, 0.1, 0.05, 0.0, 0.0, 0.2, 0.1)
CASES = {
    "usual": Case(),
    "rates that change": Case(lrs=LRS),
    "no rescaling": Case({"rescale": False}, lrs=LRS),
    "no residual": Case({"corr": False}, lrs=LRS),
}


class Reference:
    """Ranks of sign in float64, from its equations."""

    def __init__(self, case: Case, size: int) -> None:
        self.case = case
        self.kept = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(size)]
        self.lr: float | None = None

    def step(self, step: int) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
        """The mean of each tensor, and what came in on each rank."""
        lr = self.case.lr(step)
        ratio = self.lr / lr if lr and self.lr and self.case.options.get("rescale", True) else 1.0
        means, came_in = {name: np.zeros(shape) for name, shape in SHAPES.items()}, []
        for rank, kept in enumerate(self.kept):
            came_in.append({name: g + ratio * kept[name] for name, g in gradients(rank, step).items()})
            for name, p in came_in[-1].items():
                sent = np.abs(p).mean() * np.where(p >= 0, 1, -1)
                means[name] += sent / len(self.kept)
                if self.case.options.get("corr", True):
                    kept[name] = p - sent
        self.lr = lr or self.lr
        return means, came_in


@pytest.mark.parametrize(("transport", "size"), WORLDS)
def test_eight_steps_are_those_of_the_equations(transport: str, size: int) -> None:
    ranks = run_ranks(run_cases, size, "sign", CASES, transport=transport)
    per_group = [-(-n // 8) + 4 * len(group) for n, group in zip(sizes(), GROUPS, strict=True)]
    for label, case in CASES.items():
        reference = Reference(case, size)
        for step in range(STEPS):
            means, came_in = reference.step(step)
            for rank, of_rank in enumerate(ranks):
                mine = of_rank[label][step]
                assert bits(mine.result) == bits(ranks[0][label][step].result)
                assert mine.bytes_sent == (size - 1) * sum(per_group)
                for name in SHAPES:
                    note = f"{label}, step {step}, rank {rank}, {name}"
                    np.testing.assert_allclose(
                        mine.result[name], means[name], rtol=1e-5, atol=1e-6, err_msg=note
                    )
                    residual = mine.states[f"{name}:residual"].astype(np.float64)
                    np.testing.assert_allclose(
                        residual, reference.kept[rank][name], rtol=1e-5, atol=3e-6, err_msg=note
                    )
            for name in SHAPES if case.options.get("corr", True) else ():
                kept = sum(
                    of_rank[label][step].states[f"{name}:residual"].astype(np.float64) for of_rank in ranks
                )
                sent = size * ranks[0][label][step].result[name].astype(np.float64)
                np.testing.assert_allclose(
                    sent + kept, sum(each[name] for each in came_in), rtol=1e-5, atol=1e-5
                )


def step_on(scheme: Scheme, param: Tensor, values: list[float], number: int = 0) -> list[float]:
    begin(scheme, number)
    scheme.add_gradient(param, Tensor(data=np.array(values, np.float32)))
    [(_, mean)] = scheme.finish()
    result: list[float] = to_numpy(mean).tolist()
    scheme.end([param])
    return result


def test_zero_counts_as_plus() -> None:
    scheme = make_scheme("sign", LocalCommunicator(World()), 1 << 30, 1 << 30)
    assert step_on(scheme, Tensor((4,), name="p"), [0.0, -0.0, 3.0, -1.0]) == [1.0, 1.0, 1.0, -1.0]


def nan_on_one_rank(communicator: LocalCommunicator, bad: float) -> list[list[float]]:
    """What a step with ``bad`` on rank 1 gives, the residual after it, and the next step."""
    scheme, param = make_scheme("sign", communicator, 1 << 30, 1 << 30), Tensor((9,), name="p")
    first = step_on(scheme, param, [bad if communicator.rank == 1 else 2.0, *[1.0] * 8])
    residual = scheme.state_dict({param: "p"})["p:residual"].tolist()
    return [first, residual, step_on(scheme, param, [1.0] * 9, 1)]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_all_ranks_and_is_forgotten(bad: float) -> None:
    for first, residual, second in run_ranks(nan_on_one_rank, 3, bad):
        assert not np.isfinite(first).any()
        assert np.isfinite(residual).all() and np.isfinite(second).all()


TURNS = [
    (0,),
    (1,),
    (0, 1),
    (1,),
    (1,),
    (0,),
    (2, 1),
    (0,),
    (1, 2),
]  # parameters that each step has gradients of


def take_turns(communicator: Communicator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each parameter, in float64: what all steps were to subtract, and what they did with what is kept."""
    sgd = opt.SGD(opt.ExponentialDecay(0.5, 1, 0.6))
    dist = opt.DistOpt(sgd, communicator=communicator, dist_option="sign", threshold=20)
    params = [Tensor(data=np.zeros(size), stores_grad=True, name=f"p{size}") for size in (30, 7, 5)]
    dist.prepare({param.name: param for param in params}, {})
    due, rates = [np.zeros(param.shape) for param in params], [0.0] * len(params)
    autograd.training = True
    for step, used in enumerate(TURNS):
        loss = None
        for number in used:
            grad = np.random.default_rng([communicator.rank, step, number]).standard_normal(
                params[number].shape
            )
            part = autograd.reduce_sum(params[number] * Tensor(data=grad), keepdims=0)
            loss = part if loss is None else loss + part
            rates[number] = 0.5 * 0.6**step
            due[number] += rates[number] * grad
        dist(loss)
    autograd.training = False
    kept = [dist.get_states()[f"sync/sign/{param.name}:residual"] for param in params]
    owed = [rate * residual.astype(np.float64) for rate, residual in zip(rates, kept, strict=True)]
    return [(d - o, -to_numpy(param)) for d, o, param in zip(due, owed, params, strict=True)]


@pytest.mark.parametrize("size", [1, 3])
def test_where_parameters_take_turns_each_residual_follows_its_own_rate(size: int) -> None:
    ranks = run_ranks(take_turns, size, transport="local" if size == 1 else "shm")
    for of_param in zip(*ranks, strict=True):
        expected = np.mean([given for given, _ in of_param], axis=0)
        for _, moved in of_param:
            np.testing.assert_allclose(moved, expected, rtol=1e-5, atol=1e-5)


def test_float16_and_other_counters_are_refused() -> None:
    scheme = new_scheme("sign", LocalCommunicator(World()), Case())
    begin(scheme)
    scheme.add_gradient(Tensor((3,), dtype="float16", name="p"), Tensor((3,), dtype="float16"))
    with pytest.raises(DTypeError, match="sign: p is float16"):
        list(scheme.finish())
    with pytest.raises(CheckpointError, match=r"sign: .*are not its counters"):
        scheme.load_state_dict({"counter/steps": np.array(1)}, {})


def test_a_residual_that_rests_keeps_the_learning_rate_of_the_step_that_left_it() -> None:
    param = Tensor((4,), stores_grad=True, name="p")
    sgd = opt.DistOpt(opt.SGD(1.0), dist_option="sign", communicator=LocalCommunicator(World()))
    grad = np.array([1.0, 0.2, -0.3, 4.0], np.float32)
    kept = grad - np.abs(grad).mean() * np.sign(grad)
    autograd.training = True
    for lr, corr in ((1.0, True), (0.1, False), (0.1, True)):
        sgd.lr, before = lr, to_numpy(param)
        sgd(autograd.reduce_sum(autograd.mul(param, Tensor(data=grad))), corr=corr)
    autograd.training = False
    came_in = grad + kept * 10
    expected = np.where(came_in >= 0, 1, -1) * np.abs(came_in).mean()
    np.testing.assert_allclose((before - to_numpy(param)) / 0.1, expected, rtol=1e-4)
