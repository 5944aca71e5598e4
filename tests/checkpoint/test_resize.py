# SPDX-License-Identifier: Apache-2.0
"""A job that goes on with another number of ranks: what was not applied yet keeps its weight."""

from __future__ import annotations

import os
import random
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, checkpoint, layer, model, opt
from singa_lite.checkpoint.resize import resized
from singa_lite.checkpoint.streams import streams
from singa_lite.comm.base import Communicator
from singa_lite.data import ShardedSampler
from singa_lite.device import get_default_device
from singa_lite.errors import CheckpointError
from singa_lite.tensor import Tensor, from_numpy, to_numpy
from tests.checkpoint.job_net import OPTIONS, Net, batch, compiled, seed
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first

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


def mean(ranks: list[dict[str, Any]], when: str, name: str) -> np.ndarray:
    """The float64 mean over the ranks; one that has not the state has zeros, or is no leader."""
    values = [rank[when][name].astype(np.float64) for rank in ranks if name in rank[when]]
    return np.asarray(np.sum(values, axis=0) / len(values if "hierarchical" in name else ranks))


FIRST = ["fp16", "hierarchical:int8:ef=1", "sparseTopK:0.05", "localSGD:4"]


@slow_but_first(
    "options", [FIRST, [option for option in OPTIONS if option not in FIRST]], ids=["first", "others"]
)
def test_four_ranks_two_three_and_four_again(tmp_path: Path, options: list[str]) -> None:
    runs = [run_ranks(trained, size, str(tmp_path), 3, options, transport="shm") for size in (4, 2, 3, 4)]
    for option in options:
        by_run = [[rank[option] for rank in run] for run in runs]
        for number, (old, new) in enumerate(pairwise(by_run), 1):
            check_that_weights_are_kept(option, old, new)
            assert new[0]["start"] == (3 * number // 2 if option == "fp16" else 3 * number)
        used = [index for run in by_run for rank in run for index in rank["used"]]
        assert sorted(used) == list(range(NUM_SAMPLES))


def check_that_weights_are_kept(option: str, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
    num_residuals = 0
    for name in old[0]["after"]:
        values = [rank["after"][name] for rank in old if name in rank["after"]]
        equal = all(np.array_equal(value, values[0]) for value in values)
        if name.startswith(RESIDUALS) and values[0].ndim and (not equal or len(values) < len(old)):
            num_residuals += 1
            check_means(new, old, name)
        elif name.startswith("optimizer/accumulate/sum/"):
            check_means(new, old, name)
        elif name.startswith("model/norm.running"):
            assert not equal
            check_means(new, old, name)
        elif equal:
            for rank in new:
                np.testing.assert_array_equal(rank["before"][name], values[0])
        else:
            assert option in ("localSGD:4", "partialUpdate"), name
            check_means(new, old, name)
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


def check_means(new: list[dict[str, Any]], old: list[dict[str, Any]], name: str) -> None:
    """Updates are means over the ranks: each that goes on has the mean of those that saved."""
    for rank in new:
        if name in rank["before"] or "hierarchical" not in name:
            np.testing.assert_allclose(rank["before"][name], mean(old, "after", name), rtol=1e-6, atol=1e-12)


class Weighted(model.Model):
    """A weight whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = layer.Linear(1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def train_one_batch(self, x: Tensor) -> None:
        self.optimizer(autograd.mean(self.forward(x)))


def constant_gradient(communicator: Communicator, folder: str, options: dict[str, Any]) -> float:
    """Three ranks save when 1 was not applied yet; whatever ranks go on, the change of the weight by the next step."""
    net = Weighted()
    x = from_numpy(np.ones((1, 1), np.float32))
    net.set_optimizer(opt.DistOpt(opt.SGD(lr=1.0), communicator=communicator, **options))
    net.compile([x])
    [weight] = net.get_params().values()
    if checkpoint.load_job(folder, net) is None:
        net(x)
        checkpoint.save_job(folder, net)
    before = to_numpy(weight).item()
    net(x)
    return float(before - to_numpy(weight).item())


@slow_but_first(
    ("options", "change"),
    [
        ({"accumulate": 2}, 1.0),
        ({"dist_option": "sparseThreshold", "spars": 1.5}, 2.0),
        ({"dist_option": "hierarchical:sparseThreshold:1.5"}, 2.0),
    ],
    ids=["accumulate", "sparse", "hierarchical"],
)
def test_what_was_not_applied_has_the_same_weight_on_other_numbers_of_ranks(
    tmp_path: Path, options: dict[str, Any], change: float
) -> None:
    for number, size in enumerate((3, 1, 2)):
        shutil.copytree(tmp_path / "0", tmp_path / str(number)) if number else None
        found = run_ranks(constant_gradient, size, str(tmp_path / str(number)), options)
        np.testing.assert_allclose(found, [change] * size, rtol=1e-6)


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


def with_own_sampler(communicator: Communicator, folder: str, steps: list[int]) -> str:
    """Save with a sampler of each rank's own, after that many of its batches; or the error of going on."""
    net, sampler = compiled(communicator, "fp32", False), ShardedSampler(40, 4, 0, 1)
    if not steps:
        with pytest.raises(CheckpointError) as error:
            checkpoint.load_job(folder, net, sampler=sampler)
        return str(error.value)
    for number, _ in enumerate(sampler, 1):
        if number == steps[communicator.rank]:
            break
    checkpoint.save_job(folder, net, sampler=sampler)
    return ""


def test_samplers_at_places_of_their_own_are_refused_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(with_own_sampler, 2, str(tmp_path), [1, 3])
    for error in run_ranks(with_own_sampler, 3, str(tmp_path), []):
        assert "so only 2 ranks can go on from it" in error


def test_counters_that_differ_are_refused() -> None:
    own = [
        {**streams([(0, rank)]), "optimizer/sync/dgc/counter/first step": np.array(rank)} for rank in (0, 1)
    ]
    with pytest.raises(CheckpointError, match="only 2 ranks can go on"):
        resized({}, own, [], 1, 0, is_leader=True)


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


def test_two_ranks_have_each_what_one_rank_had_not_applied(tmp_path: Path) -> None:
    run_ranks(of_one_rank, 1, str(tmp_path), transport="local")
    both = run_ranks(on_two_ranks, 2, str(tmp_path))
    for option in ("sparseTopK:0.05", "dgc:0.05", "powerSGD:2", "hierarchical:int8:ef=1"):
        with np.load(tmp_path / f"{option}.npz") as saved:
            names = [name for name in saved if name.startswith("sync/")]
            assert any(np.any(saved[name]) for name in names)
            for name in names:
                assert np.array_equal(both[0][option][name], saved[name])
                if not option.startswith("hierarchical"):  # one host has one leader
                    assert np.array_equal(both[1][option][name], saved[name])


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


def test_each_leader_goes_on_from_the_mean_of_the_leaders_on_whatever_hosts(tmp_path: Path) -> None:
    hosts_of_runs = ("ab", "aabb", "abb", "a")
    runs = [run_ranks(on_hosts, len(hosts), str(tmp_path), hosts) for hosts in hosts_of_runs]
    for option in runs[0][0]:
        for number, (old, new) in enumerate(pairwise([rank[option] for rank in run] for run in runs), 1):
            names = {name for name in old[0]["after"] if name.startswith(RESIDUALS)}
            for rank, here in enumerate(new):
                is_leader = hosts_of_runs[number].index(hosts_of_runs[number][rank]) == rank
                found = {name for name in here["before"] if name.startswith(RESIDUALS)}
                assert names and found == (names if is_leader else set())
                for name in found:
                    is_mean = not name.endswith(":q") and "/counter/" not in name
                    expected = mean(old, "after", name) if is_mean else old[0]["after"][name]
                    np.testing.assert_allclose(here["before"][name], expected, rtol=1e-6, atol=1e-12)
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


@slow_but_first("alike", ["device numpy python", "", "device", "numpy", "python"])
def test_ranks_draw_the_same_after_a_resize_only_where_they_did_before(tmp_path: Path, alike: str) -> None:
    runs = [run_ranks(drawn, size, str(tmp_path), alike, transport="shm") for size in (1, 3, 2, 1, 2)]
    assert [rank["job"] for run in runs for rank in run] == [False] + 8 * [True]
    for run in runs:
        for name in STREAMS:
            assert len({str(rank[name]) for rank in run}) == (1 if name in alike else len(run)), name
    for name in STREAMS:  # nobody draws what was drawn before
        seen = [{str(rank[name]) for rank in run} for run in runs]
        assert sum(map(len, seen)) == len(set.union(*seen)), name
