# SPDX-License-Identifier: Apache-2.0
"""powerSGD against its equations in float64, step by step on every transport, and where it must be the mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite.comm.base import Communicator, World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.work import ring_bytes
from singa_lite.errors import OptionError
from singa_lite.sync import find_schemes
from singa_lite.sync.power_sgd import MAX_RANK, Factor, matrix_shape
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks
from tests.sync.by_hand import SHAPES, STEPS, WORLDS, Case, bits, gradients, run_cases
from tests.sync.make_scheme import begin, make_scheme

CASES = {
    "rank 1": Case({"rank": 1, "rate": 1.0}),
    "rank 2": Case({"rank": 2, "rate": 0.0}),
    "no feedback": Case({"rank": 1, "rate": 1.0, "feedback": False}),
    "dense": Case({"rank": 1, "rate": 1e9}),
}
MATRICES = {"a": (3, 5), "c": (7, 4)}


def are_sent_as_factors(case: Case) -> list[str]:
    rank, rate = case.options["rank"], case.options["rate"]
    return [name for name, (m, n) in MATRICES.items() if min(rank, m, n) * (m + n) * rate < m * n]


class Reference:
    """Ranks of powerSGD in float64, from its equations; Q is (columns, rank) here."""

    def __init__(self, case: Case, size: int) -> None:
        self.case, self.size = case, size
        self.error = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(size)]
        rank = case.options["rank"]
        tensors = {name: Tensor(SHAPES[name], name=name) for name in are_sent_as_factors(case)}
        self.q = {
            name: Factor().start(tensor)[:rank].T.astype(np.float32).astype(np.float64)
            for name, tensor in tensors.items()
        }

    def step(self, step: int) -> dict[str, np.ndarray]:
        found = {}
        for name, shape in SHAPES.items():
            came_in = [gradients(rank, step)[name].astype(np.float64) for rank in range(self.size)]
            if name not in self.q:
                found[name] = np.mean(came_in, axis=0)
                continue
            ms = [(g + self.error[rank][name]).reshape(matrix_shape(shape)) for rank, g in enumerate(came_in)]
            p, _ = np.linalg.qr(np.mean([m @ self.q[name] for m in ms], axis=0))
            qs = [m.T @ p for m in ms]
            for rank, m in enumerate(ms):
                if self.case.options.get("feedback", True):
                    self.error[rank][name] = (m - p @ qs[rank].T).reshape(shape)
            self.q[name] = np.mean(qs, axis=0)
            found[name] = (p @ self.q[name].T).reshape(shape)
        return found


def bytes_of(case: Case, size: int) -> int:
    """What a rank puts on a ring in a step, by the closed formula."""
    factors = are_sent_as_factors(case)
    ranks = {name: min(case.options["rank"], *MATRICES[name]) for name in factors}
    dense = sum(int(np.prod(shape)) for name, shape in SHAPES.items() if name not in factors)
    p = dense + sum(ranks[name] * MATRICES[name][0] for name in factors)
    q = sum(ranks[name] * MATRICES[name][1] for name in factors)
    return ring_bytes("all_reduce", 4 * p, size) + ring_bytes("all_reduce", 4 * q, size)


@pytest.mark.parametrize(("transport", "size"), WORLDS)
def test_eight_steps_are_those_of_the_equations(transport: str, size: int) -> None:
    ranks = run_ranks(run_cases, size, "powerSGD", CASES, transport=transport)
    for label, case in CASES.items():
        reference = Reference(case, size)
        before = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(size)]
        for step in range(STEPS):
            expected = reference.step(step)
            for rank, of_rank in enumerate(ranks):
                mine, note = of_rank[label][step], f"{label}, step {step}, rank {rank}"
                assert bits(mine.result) == bits(ranks[0][label][step].result), note
                assert mine.bytes_sent == bytes_of(case, size), note
                for name in SHAPES:
                    # the error is large beside what is sent, so an element of the product may cancel
                    np.testing.assert_allclose(
                        mine.result[name], expected[name], rtol=1e-5, atol=2e-5, err_msg=f"{note}, {name}"
                    )
                    error = mine.states[f"{name}:error"]
                    np.testing.assert_allclose(
                        error, reference.error[rank][name], rtol=1e-5, atol=2e-5, err_msg=f"{note}, {name}"
                    )
            check_that_nothing_is_lost(case, [of_rank[label][step] for of_rank in ranks], step, before)


def check_that_nothing_is_lost(case: Case, ranks: list[Any], step: int, before: list[dict[str, Any]]) -> None:
    """Sent + kept = came in, added over the ranks; ``before`` is what was kept, and the next step's then."""
    size = len(ranks)
    for name in SHAPES if case.options.get("feedback", True) else ():
        kept = [of_rank.states[f"{name}:error"].astype(np.float64) for of_rank in ranks]
        came_in = sum(gradients(rank, step)[name] + before[rank][name] for rank in range(size))
        sent = size * ranks[0].result[name].astype(np.float64)
        np.testing.assert_allclose(sent + sum(kept), came_in, rtol=1e-5, atol=1e-5)
        for rank in range(size):
            before[rank][name] = kept[rank]


def steps_of(
    communicator: Communicator, shape: tuple[int, int], grads: list[np.ndarray], options: dict[str, Any]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The result, and Q, of each step of one matrix; a rank has its own share of each gradient."""
    scheme = make_scheme("powerSGD", communicator, 1 << 30, 1 << 30)
    param, log = Tensor(shape, name="w"), []
    for step, grad in enumerate(grads):
        begin(scheme, step, **{"rate": 0.0, **options})
        share = 2 * (communicator.rank + 1) / (communicator.size + 1)  # 1 in the mean
        scheme.add_gradient(param, Tensor(data=(grad * share).astype(np.float32)))
        [(_, mean)] = scheme.finish()
        log.append((to_numpy(mean), scheme.state_dict({param: "w"})["w:q"]))
        scheme.end([param])
    return log


def of_rank_one(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.outer(rng.standard_normal(12), rng.standard_normal(9)).astype(np.float32)


@pytest.mark.parametrize("size", [1, 3])
def test_a_gradient_of_rank_one_comes_back_and_rank_four_is_used_again_two_steps_later(size: int) -> None:
    rng = np.random.default_rng(3)
    full = (rng.standard_normal((12, 4)) @ rng.standard_normal((4, 9))).astype(np.float32)
    grads = [of_rank_one(1), of_rank_one(1), full, full, np.zeros((12, 9), np.float32), full, full]
    transport = "local" if size == 1 else "shm"
    for log in run_ranks(steps_of, size, (12, 9), grads, {"rank": 4, "feedback": False}, transport=transport):
        results = [result for result, _ in log]
        np.testing.assert_allclose(results[0], grads[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(results[1], grads[1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(results[3], full, rtol=1e-4, atol=1e-4)
        assert not results[4].any()
        np.testing.assert_allclose(results[6], full, rtol=1e-4, atol=1e-4)
        assert all(np.isfinite(q).all() and (np.abs(q[:4]).max(axis=1) > 0).all() for _, q in log)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_full_rank_is_the_mean(size: int) -> None:
    grads = [np.random.default_rng(step).standard_normal((6, 11)).astype(np.float32) for step in range(4)]
    transport = "local" if size == 1 else "shm"
    for log in run_ranks(steps_of, size, (6, 11), grads, {"rank": 6}, transport=transport):
        for (result, _), grad in zip(log, grads, strict=True):
            np.testing.assert_allclose(result, grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-15, 1e-9, 1e9, 1e15])
def test_gradients_may_be_tiny_or_huge(scale: float) -> None:
    grads = [np.random.default_rng(step).standard_normal((6, 11)).astype(np.float32) for step in range(4)]
    scaled = [(grad * scale).astype(np.float32) for grad in grads]
    [log] = run_ranks(steps_of, 1, (6, 11), scaled, {"rank": 6}, transport="local")
    for (result, _), grad in zip(log, grads, strict=True):
        np.testing.assert_allclose(result / scale, grad, rtol=1e-5, atol=1e-5)


def test_what_was_kept_is_sent_once_where_a_matrix_travels_as_it_is_from_now_on() -> None:
    scheme = make_scheme("powerSGD", LocalCommunicator(World()), 1 << 30, 1 << 30)
    param, came_in, sent = Tensor((8, 8), name="w"), np.zeros((8, 8)), np.zeros((8, 8))
    for step in range(5):
        begin(scheme, step, rank=1 if step < 2 else 32, rate=1.0)
        grad = np.random.default_rng(step).standard_normal((8, 8)).astype(np.float32)
        scheme.add_gradient(param, Tensor(data=grad))
        [(_, mean)] = scheme.finish()
        came_in, sent = came_in + grad, sent + to_numpy(mean)
        scheme.end([param])
        assert step < 2 or np.abs(came_in - sent).max() < 1e-4, step
    assert not scheme.state_dict({param: "w"})["w:error"].any()


def test_what_was_kept_stays_where_a_matrix_travels_as_it_is_without_feedback() -> None:
    scheme = make_scheme("powerSGD", LocalCommunicator(World()), 1 << 30, 1 << 30)
    param, missing = Tensor((8, 8), name="w"), np.zeros((8, 8))
    steps = [(1, 1.0, True), (1, 1000.0, False), (1, 1.0, False), (1, 1.0, True)]
    for step, (rank, rate, feedback) in enumerate(steps):
        begin(scheme, step, rank=rank, rate=rate, feedback=feedback)
        grad = np.random.default_rng(step).standard_normal((8, 8)).astype(np.float32)
        scheme.add_gradient(param, Tensor(data=grad))
        [(_, mean)] = scheme.finish()
        missing += (grad - to_numpy(mean)) * feedback
        scheme.end([param])
        np.testing.assert_allclose(scheme.state_dict({param: "w"})["w:error"], missing, atol=1e-5)


@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_all_and_is_forgotten(bad: float, warm_start: bool) -> None:
    rng = np.random.default_rng(5)
    grads = [rng.standard_normal((12, 9)).astype(np.float32) for _ in range(3)]
    grads[1][3, 4] = bad
    options = {"rank": 2, "warm_start": warm_start}
    for log in run_ranks(steps_of, 3, (12, 9), grads, options, transport="shm"):
        assert not np.isfinite(log[1][0]).all()
        assert np.isfinite(log[1][1]).all() and np.isfinite(log[2][1]).all()
        assert np.isfinite(log[2][0]).all() and log[2][0].any()


def test_cold_starts_differ_from_step_to_step_and_not_from_rank_to_rank() -> None:
    grads = [np.random.default_rng(0).standard_normal((12, 9)).astype(np.float32)] * 3
    options = {"rank": 2, "warm_start": False, "feedback": False}
    first, second = run_ranks(steps_of, 2, (12, 9), grads, options, transport="shm")
    assert [result.tobytes() for result, _ in first] == [result.tobytes() for result, _ in second]
    assert len({result.tobytes() for result, _ in first}) == 3


def test_ranks_begin_alike_where_one_calls_its_parameters_otherwise() -> None:
    first, second = (Factor().start(Tensor((12, 9), name=name)) for name in ("w", "probe.w"))
    np.testing.assert_array_equal(first, second)


def test_half_precision_travels_as_it_is() -> None:
    scheme = make_scheme("powerSGD", LocalCommunicator(World()), 1 << 30, 1 << 30)
    begin(scheme, rate=0.0)
    grad = np.arange(12, dtype=np.float16).reshape(3, 4)
    scheme.add_gradient(Tensor((3, 4), dtype="float16", name="p"), Tensor(data=grad))
    [(_, mean)] = scheme.finish()
    np.testing.assert_array_equal(to_numpy(mean), grad)


def test_the_cnn_of_mnist_sends_40_800_bytes_at_rank_4() -> None:
    shapes = [(20, 1, 5, 5), (20,), (50, 20, 5, 5), (50,), (800, 500), (500,), (500, 10), (10,)]
    communicator = LocalCommunicator(World())
    for rank, expected in ((1, 11_940), (2, 21_560), (4, 40_800)):
        scheme = make_scheme("powerSGD", communicator, 1 << 30, 1 << 30)
        before = communicator.traffic.copy()
        begin(scheme, rank=rank)
        for number, shape in enumerate(shapes):
            scheme.add_gradient(Tensor(shape, name=f"p{number}"), Tensor(shape))
        list(scheme.finish())
        # of 2 ranks each sends its payload
        assert communicator.traffic.since(before).bytes_payload == expected


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 1.5}, {"rank": MAX_RANK + 1}, {"rate": -1.0}])
def test_options_out_of_range_raise(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="powerSGD"):
        find_schemes()["powerSGD"].Options(**options)
