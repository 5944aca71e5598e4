# SPDX-License-Identifier: Apache-2.0
"""randomK against its equations in float64, step by step on every transport."""

from __future__ import annotations

import math
import warnings
import zlib

import numpy as np
import pytest

from singa_lite.backend.cpu.random import permuted
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.work import ring_bytes
from singa_lite.errors import DTypeError
from singa_lite.sync.base import Scheme
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
)
from tests.sync.make_scheme import begin, make_scheme

CASES = {
    "usual": Case({"density": 0.2}, first_step=1000),
    "no residual": Case({"density": 0.07, "corr": False}),
    "all": Case({"density": 1.0}),
}


@pytest.mark.parametrize(("transport", "size"), WORLDS)
def test_eight_steps_are_those_of_the_equations(transport: str, size: int) -> None:
    ranks = run_ranks(run_cases, size, "randomK", CASES, transport=transport)
    for label, case in CASES.items():
        keeps = case.options.get("corr", True)
        residuals = [[np.zeros(n) for n in sizes()] for _ in range(size)]
        for step in range(STEPS):
            counts = [math.ceil(case.options["density"] * n) for n in sizes()]
            for number, (group, n, k) in enumerate(zip(GROUPS, sizes(), counts, strict=True)):
                seed = zlib.crc32(", ".join(group).encode())
                chosen = permuted(np.arange(k), n, seed, case.first_step + step).astype(np.int64)
                assert len(set(chosen.tolist())) == k
                came_in = [
                    joined(gradients(rank, step), group) + residuals[rank][number] for rank in range(size)
                ]
                mean = np.zeros(n)
                mean[chosen] = np.mean(came_in, axis=0)[chosen]
                for rank, of_rank in enumerate(ranks):
                    mine, note = of_rank[label][step], f"{label}, step {step}, rank {rank}, group {number}"
                    result = joined(mine.result, group)
                    np.testing.assert_allclose(result, mean, rtol=1e-5, atol=1e-6, err_msg=note)
                    np.testing.assert_array_equal(np.flatnonzero(result), np.sort(chosen), note)
                    if keeps:
                        residuals[rank][number] = np.where(np.isin(np.arange(n), chosen), 0, came_in[rank])
                    residual = joined(mine.states, group, ":residual")
                    np.testing.assert_allclose(
                        residual, residuals[rank][number], rtol=1e-5, atol=1e-5, err_msg=note
                    )
                if keeps:
                    kept = sum(
                        joined(each[label][step].states, group, ":residual").astype(float) for each in ranks
                    )
                    sent = size * joined(ranks[0][label][step].result, group).astype(float)
                    np.testing.assert_allclose(sent + kept, np.sum(came_in, axis=0), rtol=1e-5, atol=1e-5)
            for of_rank in ranks:
                assert bits(of_rank[label][step].result) == bits(ranks[0][label][step].result)
                assert of_rank[label][step].bytes_sent == sum(
                    ring_bytes("all_reduce", 4 * k, size) for k in counts
                )


def step_on(scheme: Scheme, param: Tensor, values: list[float], number: int) -> list[float]:
    begin(scheme, number, density=0.1)
    scheme.add_gradient(param, Tensor(data=np.array(values, np.float32)))
    [(_, mean)] = scheme.finish()
    result: list[float] = to_numpy(mean).tolist()
    scheme.end([param])
    return result


def one_bad_element(communicator: LocalCommunicator, bad: float) -> list[list[float]]:
    """Ten steps with ``bad`` on rank 1 at one place in the first, which mostly is not chosen."""
    scheme, param = make_scheme("randomK", communicator, 1 << 30, 1 << 30), Tensor((20,), name="p")
    first = step_on(scheme, param, [bad if communicator.rank == 1 else 2.0, *[1.0] * 19], 0)
    return [first, *(step_on(scheme, param, [1.0] * 20, number) for number in range(1, 10))]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_all_ranks_in_its_step_alone(bad: float) -> None:
    for first, *others in run_ranks(one_bad_element, 3, bad):
        assert np.count_nonzero(~np.isfinite(first)) == 2 and np.isfinite(others).all()


def test_float16_is_refused() -> None:
    scheme = new_scheme("randomK", LocalCommunicator(World()), Case())
    begin(scheme)
    scheme.add_gradient(Tensor((3,), dtype="float16", name="p"), Tensor((3,), dtype="float16"))
    with pytest.raises(DTypeError, match="randomK: p is float16"):
        list(scheme.finish())


def test_a_share_at_which_it_may_diverge_is_warned_of_once() -> None:
    scheme = new_scheme("randomK", LocalCommunicator(World()), Case())
    with pytest.warns(
        UserWarning, match=r"randomK: density = 0.04 has an element wait for 25 steps"
    ) as caught:
        begin(scheme, density=0.04)
    assert caught[0].filename == begin.__code__.co_filename
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin(scheme, density=0.04)
        begin(new_scheme("randomK", LocalCommunicator(World()), Case()), density=0.05)
