# SPDX-License-Identifier: Apache-2.0
"""A job that goes on with another number of ranks: nothing of what was not applied yet is lost."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from singa_lite import checkpoint, opt
from singa_lite.checkpoint.resize import resized, share_of_sum
from singa_lite.checkpoint.streams import streams
from singa_lite.comm.base import Communicator
from singa_lite.data import ShardedSampler
from singa_lite.device import get_default_device
from singa_lite.errors import CheckpointError
from singa_lite.tensor import to_numpy
from tests.checkpoint.job_net import OPTIONS, Net, batch, compiled, seed
from tests.ranks import run_ranks

NUM_SAMPLES = (
    119  # three steps of 3 samples a rank by 4, 2, 3 and 4 ranks, the last two samples in the last step
)
RESIDUALS = "optimizer/sync/"


def state_of(net: Net) -> dict[str, np.ndarray]:
    states = {f"model/{name}": to_numpy(value) for name, value in net.get_states().items()}
    return states | {f"optimizer/{name}": value for name, value in net.optimizer.get_states().items()}


def trained(communicator: Communicator, folder: str, steps: int, options: list[str]) -> dict[str, Any]:
    """Go on by some steps of each option; what was there before and after, and which samples were used."""
    found: dict[str, Any] = {}
    for option in options:
        net = compiled(communicator, option, True, accumulate=2 if option == "fp16" else 1)
        sampler = ShardedSampler(NUM_SAMPLES, 3, communicator.rank, communicator.size, seed=1)
        job = checkpoint.load_job(Path(folder) / option, net, sampler=sampler)
        before, used, loop = state_of(net), [], iter(sampler)
        stream = get_default_device().get_random_state(), random.random(), np.random.random()
        for _ in range(steps):
            used += next(loop).tolist()
            net(*batch(net.optimizer.step_counter, communicator.rank))
        after = state_of(net)
        checkpoint.save_job(Path(folder) / option, net, sampler=sampler)
        found[option] = {
            "start": None if job is None else job.step,
            "before": before,
            "after": after,
            "used": used,
            "stream": stream,
        }
    return found


def total(ranks: list[dict[str, Any]], when: str, name: str) -> np.ndarray:
    """The float64 sum over the ranks that have the state."""
    return np.sum([rank[when][name].astype(np.float64) for rank in ranks if name in rank[when]], axis=0)


def test_four_ranks_two_three_and_four_again(tmp_path: Path) -> None:
    runs = [run_ranks(trained, size, str(tmp_path), 3, OPTIONS, transport="shm") for size in (4, 2, 3, 4)]
    for option in OPTIONS:
        by_run = [[rank[option] for rank in run] for run in runs]
        for number, (old, new) in enumerate(pairwise(by_run), 1):
            check_that_nothing_is_lost(option, old, new)
            assert new[0]["start"] == (3 * number // 2 if option == "fp16" else 3 * number)
        used = [index for run in by_run for rank in run for index in rank["used"]]
        assert sorted(used) == list(range(NUM_SAMPLES))


def check_that_nothing_is_lost(option: str, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
    num_residuals = 0
    for name in old[0]["after"]:
        values = [rank["after"][name] for rank in old if name in rank["after"]]
        equal = all(np.array_equal(value, values[0]) for value in values)
        if name.startswith(RESIDUALS) and values[0].ndim and (not equal or len(values) < len(old)):
            num_residuals += 1
            whole = total(old, "after", name)
            if option.startswith("hierarchical"):
                np.testing.assert_allclose(total(new, "before", name), whole, rtol=1e-6)
            else:
                np.testing.assert_array_equal(total(new, "before", name), whole)
        elif name.startswith("optimizer/accumulate/sum/"):
            np.testing.assert_array_equal(total(new, "before", name), total(old, "after", name))
        elif name.startswith("model/norm.running"):
            mean = np.mean([value.astype(np.float64) for value in values], axis=0)
            assert not equal
            for rank in new:
                np.testing.assert_allclose(rank["before"][name], mean, rtol=1e-6)
        elif equal:
            for rank in new:
                np.testing.assert_array_equal(rank["before"][name], values[0])
        else:
            assert option in ("localSGD:4", "partialUpdate"), name
            mean = np.mean([value.astype(np.float64) for value in values], axis=0)
            for rank in new:
                np.testing.assert_allclose(rank["before"][name], mean, rtol=1e-6)
    has_residuals = option.partition(":")[0] in (
        "sparseTopK",
        "sparseThreshold",
        "randomK",
        "dgc",
        "sign",
        "powerSGD",
    )
    assert bool(num_residuals) == has_residuals or option in ("int8:ef=1", "hierarchical:int8:ef=1")
    assert len({str(rank["stream"]) for rank in new}) == len(new)


values = arrays(
    np.float32, st.integers(1, 20), elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
)


@given(st.lists(values, min_size=1, max_size=5), st.integers(2, 5))
def test_shares_add_up_to_the_sum_exactly(given_values: list[np.ndarray], size: int) -> None:
    length = min(map(len, given_values))
    # multiples of 2**-20: a sum of five is exact in float64, as those of a residual nearly always are
    residuals = [np.float32(np.round(value[:length] * 2.0**4) * 2.0**-20) for value in given_values]
    shares = [share_of_sum(residuals, rank, size) for rank in range(size)]
    whole = np.sum([value.astype(np.float64) for value in residuals], axis=0)
    np.testing.assert_array_equal(np.sum([share.astype(np.float64) for share in shares], axis=0), whole)
    # no rank has it all
    if length >= size and np.all(whole):
        assert all(np.any(share) for share in shares)


def test_a_sum_that_does_not_fit_is_refused() -> None:
    large = np.full(3, 60000, np.float16)
    with pytest.raises(CheckpointError, match="too large for float16"):
        share_of_sum([large, large], 0, 2)
    assert np.isinf(share_of_sum([np.full(3, np.inf, np.float16)] * 2, 0, 2)).any()


def within_a_global_batch(communicator: Communicator, folder: str) -> tuple[str, list[str]]:
    """On two ranks: save after an update and within the next. On one: the error of going on, and what is there then."""
    net, error = Net(), ""
    seed(0)
    net.set_optimizer(opt.DistOpt(opt.SGD(), communicator=communicator, microbatches=4, order="fixed"))
    net.compile([batch(0, 0)[0]])
    if communicator.size == 2:
        for step in range(3):
            net(*batch(step, communicator.rank))
            if step:
                checkpoint.save_job(folder, net)
    else:
        with pytest.raises(CheckpointError) as raised:
            checkpoint.load_job(folder, net)
        error = str(raised.value)
    return error, sorted(os.listdir(folder))


def test_a_whole_generation_that_cannot_be_resized_is_an_error_and_stays(tmp_path: Path) -> None:
    names = ["step-00000001", "step-00000001.1"]
    assert run_ranks(within_a_global_batch, 2, str(tmp_path))[0] == ("", names)
    [(error, left)] = run_ranks(within_a_global_batch, 1, str(tmp_path))
    assert "step-00000001.1: it was saved within a global batch" in error and left == names


def test_counters_that_differ_are_refused() -> None:
    own = [
        {**streams([(0, rank)]), "optimizer/sync/dgc/counter/first step": np.array(rank)} for rank in (0, 1)
    ]
    with pytest.raises(CheckpointError, match="only 2 ranks can go on"):
        resized({}, own, [], 1, 0)


def of_one_rank(communicator: Communicator, folder: str) -> None:
    for option in ("sparseTopK:0.05", "dgc:0.05", "powerSGD:2", "hierarchical:int8:ef=1"):
        net = compiled(communicator, option, False)
        for step in range(3):
            net(*batch(step, 0))
        checkpoint.save_job(Path(folder) / option, net)
        np.savez(Path(folder) / f"{option}.npz", **net.optimizer.get_states())


def on_two_ranks(communicator: Communicator, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for option in ("sparseTopK:0.05", "dgc:0.05", "powerSGD:2", "hierarchical:int8:ef=1"):
        net = compiled(communicator, option, False)
        try:
            checkpoint.load_job(Path(folder) / option, net)
            found[option] = net.optimizer.get_states()
            net(*batch(3, communicator.rank))
        except CheckpointError as error:
            found[option] = str(error)
    return found


def test_what_one_rank_had_not_applied_is_shared_by_two(tmp_path: Path) -> None:
    """Residuals and velocities are equal on all ranks there, and still each rank's own."""
    run_ranks(of_one_rank, 1, str(tmp_path), transport="local")
    both = run_ranks(on_two_ranks, 2, str(tmp_path))
    for option, ends in {
        "sparseTopK:0.05": "residual",
        "dgc:0.05": "velocity",
        "powerSGD:2": "error",
    }.items():
        with np.load(tmp_path / f"{option}.npz") as saved:
            names = [name for name in saved if name.startswith("sync/") and name.endswith(ends)]
            assert names and any(np.any(saved[name]) for name in names)
            for name in names:
                total = sum(of[option][name].astype(np.float64) for of in both)
                np.testing.assert_array_equal(total, saved[name].astype(np.float64))
            for name in saved:
                if name.endswith(":q"):
                    assert all(np.array_equal(of[option][name], saved[name]) for of in both)
    with np.load(tmp_path / "hierarchical:int8:ef=1.npz") as saved:
        first, second = (
            {name: value for name, value in of["hierarchical:int8:ef=1"].items() if name.startswith("sync/")}
            for of in both
        )
        assert not second and len(first) == sum(name.startswith("sync/") for name in saved)
        assert all(np.array_equal(value, saved[name]) for name, value in first.items())


LEADERS_KEEP = [  # residuals alone, Q, and the learning rates of residuals as well
    "hierarchical:int8:ef=1",
    "hierarchical:powerSGD:2",
    "hierarchical:sign",
]


def on_hosts(communicator: Communicator, folder: str, hosts: str) -> dict[str, Any]:
    """The states of hosts' leaders before two steps and behind them."""
    os.environ["SINGA_LITE_HOST"] = hosts[communicator.rank]
    found = {}
    for option in LEADERS_KEEP:
        net = compiled(communicator, option, False)
        checkpoint.load_job(Path(folder) / option, net)
        before = state_of(net)
        for step in range(2):
            net(*batch(step, communicator.rank))
        found[option] = {"before": before, "after": state_of(net)}
        checkpoint.save_job(Path(folder) / option, net)
    del os.environ["SINGA_LITE_HOST"]
    return found


def test_states_of_leaders_go_to_rank_0_on_whatever_hosts_the_job_goes_on(tmp_path: Path) -> None:
    runs = [run_ranks(on_hosts, len(hosts), str(tmp_path), hosts) for hosts in ("ab", "aabb", "abb", "a")]
    for option in runs[0][0]:
        for old, new in pairwise([rank[option] for rank in run] for run in runs):
            names = {name for name in old[0]["after"] if name.startswith(RESIDUALS)}
            assert names and names == {name for name in new[0]["before"] if name.startswith(RESIDUALS)}
            assert not any(name.startswith(RESIDUALS) for rank in new[1:] for name in rank["before"])
            for name in names:
                is_sum = not name.endswith(":q") and "/counter/" not in name
                whole = total(old, "after", name) if is_sum else old[0]["after"][name]
                np.testing.assert_allclose(new[0]["before"][name], whole, rtol=1e-6, atol=1e-12)
            assert len({rank["after"]["model/linear.W"].tobytes() for rank in new}) == 1


def drawn(communicator: Communicator, folder: str, alike: str) -> dict[str, Any]:
    """The seeds and numbers of a rank that goes on; the streams in ``alike`` were seeded the same on all ranks."""
    net = compiled(communicator, "fp32", False)
    if "device" in alike:
        get_default_device().SetRandSeed(3)
    if "numpy" in alike:
        np.random.seed(5)
    if "python" in alike:
        random.seed(7)
    job = checkpoint.load_job(folder, net)
    found = {"job": job is not None, "device": get_default_device().get_random_state()}
    state = np.random.get_state(), random.getstate()
    found |= {
        "numpy": np.random.standard_normal(3).tolist(),
        "python": [random.gauss(0, 1) for _ in range(3)],
    }
    np.random.set_state(state[0])
    random.setstate(state[1])
    net(*batch(0, communicator.rank))
    found["next"] = get_default_device().get_random_state(), np.random.random(), random.random()
    checkpoint.save_job(folder, net)
    return found


STREAMS = ("device", "numpy", "python")


@pytest.mark.parametrize("alike", ["", "device", "numpy", "python", "device numpy python"])
def test_ranks_draw_the_same_after_a_resize_only_where_they_did_before(tmp_path: Path, alike: str) -> None:
    runs = [run_ranks(drawn, size, str(tmp_path), alike, transport="shm") for size in (1, 3, 2, 1, 2)]
    assert [rank["job"] for run in runs for rank in run] == [False] + 8 * [True]
    for run in runs:
        for name in STREAMS:
            assert len({str(rank[name]) for rank in run}) == (1 if name in alike else len(run)), name
    for name in STREAMS:  # nobody draws what was drawn before
        seen = [{str(rank[name]) for rank in run} for run in runs]
        assert sum(map(len, seen)) == len(set.union(*seen)), name
