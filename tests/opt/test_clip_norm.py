# SPDX-License-Identifier: Apache-2.0
"""DistOpt(clip_norm=c): what is applied has at most that norm, by every dist_option, eagerly and recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, model, opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.errors import CommError, OptionError
from singa_lite.sync import find_schemes
from singa_lite.sync.clip import clip_gradients
from singa_lite.tensor import Tensor, to_numpy
from tests.opt.every_scheme import (
    ACTIVE,
    check_that_none_is_missing,
    everything,
    made,
    no_breaks,
    trained,
    two_ranks_a_host,
    values,
)
from tests.ranks import run_ranks

SHAPES = {"a": (3, 5), "b": (40,), "c": (7, 2, 2), "d": (1,)}
STEPS = 5
# what a rank applies must not depend on parameters: localSGD averages none here
BEFORE_UPDATE = {**ACTIVE, "localSGD": "localSGD:100"}


def alone() -> LocalCommunicator:
    return LocalCommunicator(World())


def gradients(rank: int, step: int, dtype: str = "float32", scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step, 7])
    return {
        name: (scale * (rng.standard_normal(shape) + 0.5)).astype(dtype) for name, shape in SHAPES.items()
    }


class Given:
    """Parameters that get these gradients, from zero on; at a learning rate of 1 what is applied can be read."""

    def __init__(self, communicator: Any, dtype: str = "float32", **given: Any) -> None:
        self.dtype = dtype
        self.params = {
            name: Tensor(data=np.zeros(shape), dtype=dtype, stores_grad=True, name=name)
            for name, shape in SHAPES.items()
        }
        given = {"threshold": 20, **given}
        self.dist = opt.DistOpt(opt.SGD(1.0), communicator=communicator, **given)
        self.dist.prepare(self.params, {})

    def applied(self, grads: dict[str, np.ndarray]) -> np.ndarray:
        """Return what a step takes from the parameters, float64, flat; they are zeros afterwards."""
        autograd.training = True
        first, *others = (
            autograd.reduce_sum(param * Tensor(data=grads[name], dtype=self.dtype), keepdims=0)
            for name, param in self.params.items()
        )
        for other in others:
            first = first + other
        self.dist(first)
        autograd.training = False
        found = [to_numpy(param).astype(np.float64) for param in self.params.values()]
        for name, param in self.params.items():
            param.copy_from_numpy(np.zeros(SHAPES[name], self.dtype))
        return -np.concatenate([value.ravel() for value in found])


def clipped(vector: np.ndarray, norm: float) -> np.ndarray:
    return vector * min(1.0, norm / (np.linalg.norm(vector) + 1e-6))


def test_every_scheme_is_tested_here() -> None:
    check_that_none_is_missing()


def with_and_without(communicator: Any) -> dict[str, list[bytes]]:
    rank, found = communicator.rank, {}
    with two_ranks_a_host(communicator):
        for name, text in BEFORE_UPDATE.items():
            if name in ("dgc", "partialUpdate"):
                continue
            plain, small, large = (
                Given(communicator, dist_option=text, **given)
                for given in ({}, {"clip_norm": 1.5}, {"clip_norm": 1e4})
            )
            found[name] = []
            for step in range(STEPS):
                grads = gradients(rank, step)
                whole, cut, same = (each.applied(grads) for each in (plain, small, large))
                assert np.linalg.norm(whole) > 1.5
                np.testing.assert_allclose(cut, clipped(whole, 1.5), rtol=1e-5, atol=1e-9, err_msg=text)
                np.testing.assert_array_equal(same, whole)
                found[name].append(cut.tobytes())
            states = [
                {key: value.tobytes() for key, value in each.dist.get_states().items()}
                for each in (plain, small, large)
            ]
            assert states[0] == states[1] == states[2], text  # what is kept is from before clipping
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_applied_has_the_norm_of_float64(size: int) -> None:
    ranks = run_ranks(with_and_without, size, transport="local" if size == 1 else "shm")
    for name in ranks[0]:
        assert name == "localSGD" or all(of_rank[name] == ranks[0][name] for of_rank in ranks), name
    if size > 1:  # each its own
        assert ranks[0]["localSGD"] != ranks[1]["localSGD"]


def partial_update(communicator: Any) -> np.ndarray:
    each = Given(communicator, dist_option="partialUpdate", clip_norm=1.5, threshold=1000)
    return each.applied(gradients(communicator.rank, 0))


def test_partial_update_clips_each_ranks_own_gradient() -> None:
    found = run_ranks(partial_update, 3)
    own = [
        np.concatenate([value.astype(np.float64).ravel() for value in gradients(rank, 0).values()])
        for rank in range(3)
    ]
    expected = np.mean([clipped(each, 1.5) for each in own], axis=0)  # one chunk, averaged after the update
    for applied in found:
        np.testing.assert_allclose(applied, expected, rtol=1e-5, atol=1e-7)


def dgc_two_ways(communicator: Any) -> None:
    nets = [
        made(communicator, False, **given)
        for given in (
            {"dist_option": "dgc:1:mask=0:clip=0.1"},
            {"dist_option": "dgc:1:mask=0", "clip_norm": 0.1},
            {"dist_option": "dgc:1:mask=0"},
        )
    ]
    for net in nets:
        trained(net, communicator.rank, 0, 12)  # by then velocities have summed up to more than 0.1
    assert everything(nets[0]) == everything(nets[1]) != everything(nets[2])


def test_dgc_takes_it_as_its_local_clip() -> None:
    run_ranks(dgc_two_ways, 3)


def dtypes_in_turn(communicator: Any) -> None:
    """Norms beyond float16 among them: 300 times 84 elements."""
    for dtype, worst in (("float16", 2e-3), ("float32", 1e-6), ("float64", 1e-13)):
        for scale, norm in ((1.0, 0.7), (300.0, 20.0)):
            plain, small = Given(communicator, dtype), Given(communicator, dtype, clip_norm=norm)
            grads = gradients(communicator.rank, 0, "float16", scale)
            whole, cut = plain.applied(grads), small.applied(grads)
            np.testing.assert_allclose(cut, clipped(whole, norm), rtol=worst, atol=1e-3 * worst * norm)


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_every_dtype(size: int) -> None:
    run_ranks(dtypes_in_turn, size, transport="local" if size == 1 else "shm")


def test_dtypes_are_clipped_by_the_norm_of_all_together() -> None:
    dtypes = dict(zip(SHAPES, ("float16", "float32", "float64", "float16"), strict=True))
    before = {name: value.astype(dtypes[name]) for name, value in gradients(0, 0).items()}
    tensors = [Tensor(data=value, dtype=dtypes[name]) for name, value in before.items()]
    clip_gradients(tensors, 0.7)
    whole = clipped(np.concatenate([value.astype(np.float64).ravel() for value in before.values()]), 0.7)
    start = 0
    for tensor, (name, value) in zip(tensors, before.items(), strict=True):
        assert tensor.dtype == dtypes[name]
        worst = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-6}[dtypes[name]]  # squares are float32's
        expected = whole[start : start + value.size].reshape(value.shape)
        np.testing.assert_allclose(to_numpy(tensor), expected, rtol=worst, atol=1e-6)
        start += value.size


class Sums(model.Model):
    """Has a parameter without dimensions."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.w = Tensor((), dtype=dtype, stores_grad=True, name="w")
        self.v = Tensor((3,), dtype=dtype, stores_grad=True, name="v")

    def forward(self, x: Tensor) -> Tensor:
        return autograd.reduce_sum((self.w + self.v) * x, keepdims=0)

    def train_one_batch(self, x: Tensor) -> Tensor:
        loss = self.forward(x)
        self.optimizer(loss)
        return loss


@pytest.mark.parametrize("use_graph", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "options",
    [{"clip_norm": 1.0}, {"accumulate": 2}, {"check_finite": "skip"}],
    ids=lambda options: next(iter(options)),
)
def test_a_parameter_without_dimensions_is_updated(options: Any, dtype: str, use_graph: bool) -> None:
    net = Sums(dtype)
    net.set_optimizer(opt.DistOpt(opt.SGD(0.25), communicator=LocalCommunicator(World()), **options))
    x = Tensor(data=np.array([1, 2, 2], dtype), dtype=dtype)
    net.compile([x], use_graph=use_graph)
    for _ in range(4):
        net(x)
    grads = np.array([5, 1, 2, 2], np.float64)  # of w, then of v
    if "clip_norm" in options:
        grads /= np.linalg.norm(grads)
    # by a loss scale that was too large
    updates = 2 if "accumulate" in options else 4 - net.optimizer.num_skipped
    assert updates >= 2
    expected = -0.25 * grads * updates
    found = np.append(to_numpy(net.w), to_numpy(net.v))
    np.testing.assert_allclose(found, expected, rtol=2e-6 if dtype == "float32" else 3e-3)


def not_finite(communicator: Any, bad: float) -> np.ndarray:
    each = Given(communicator, clip_norm=1.0)
    grads = gradients(communicator.rank, 0)
    if communicator.rank == 1:
        grads["c"][3, 1, 0] = bad
    found = [each.applied(grads)]
    found.append(each.applied(gradients(communicator.rank, 1)))
    return np.stack(found)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e20])  # the last has a square beyond float32
def test_a_norm_that_is_not_finite_makes_its_step_nan_on_all_ranks(bad: float) -> None:
    for ruined, next_step in run_ranks(not_finite, 3, bad):
        assert np.isnan(ruined).all()
        assert np.isfinite(next_step).all()


def test_gradients_of_zeros_stay() -> None:
    each = Given(alone(), clip_norm=1.0)
    applied = each.applied({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    np.testing.assert_array_equal(applied, 0)


def recorded_and_resumed(communicator: Any) -> dict[str, dict[str, bytes]]:
    rank, found = communicator.rank, {}
    with two_ranks_a_host(communicator):
        for name, text in ACTIVE.items():
            given = {"dist_option": text, "clip_norm": 0.05, "accumulate": 2}
            eager, recorded, resumed = (made(communicator, use, **given) for use in (False, True, True))
            free = made(communicator, False, dist_option=text, accumulate=2)
            for number in range(10):
                if number == 5:
                    resumed.set_params(values(recorded))
                    resumed.optimizer.set_states(recorded.optimizer.get_states())
                for net in (eager, recorded, free, resumed)[: 3 + (number >= 5)]:
                    trained(net, rank, number, number + 1)
                got = values(recorded)
                for key, value in values(eager).items():
                    np.testing.assert_allclose(got[key], value, rtol=1e-5, err_msg=text)
            assert everything(recorded) == everything(resumed), text
            assert no_breaks(recorded) <= 5
            assert values(free)["first.W"].tobytes() != values(eager)["first.W"].tobytes()
            found[name] = everything(recorded)
    return found


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_recorded_steps_are_as_eager_ones_and_ranks_are_equal(size: int) -> None:
    ranks = run_ranks(recorded_and_resumed, size, transport="local" if size == 1 else "shm")
    for name in ACTIVE:
        for of_rank in ranks:
            if find_schemes()[name].keeps_equal:
                assert {
                    k: v for k, v in of_rank[name].items() if not k.startswith(("sync/", "accumulate/"))
                } == {
                    k: v for k, v in ranks[0][name].items() if not k.startswith(("sync/", "accumulate/"))
                }, name


@pytest.mark.parametrize("norm", [0, -1.0, float("nan"), float("inf"), "1", True, [1.0]])
def test_wrong_norms_are_refused(norm: Any) -> None:
    with pytest.raises(OptionError, match="clip_norm"):
        opt.DistOpt(communicator=alone(), clip_norm=norm)


def test_two_clips_of_dgc_are_refused() -> None:
    with pytest.raises(OptionError, match="clip_norm and the option clip of dgc"):
        opt.DistOpt(communicator=alone(), clip_norm=1.0, dist_option="dgc:clip=1")


def other_norm(communicator: Any) -> None:
    made(communicator, False, clip_norm=None if communicator.rank == 1 else 1.0)


def test_ranks_with_other_norms_are_an_error_on_all() -> None:
    for error in run_ranks(other_norm, 3, return_exceptions=True):
        assert isinstance(error, CommError) and "clip_norm is 1.0 on rank 0 but None on rank 1" in str(error)
