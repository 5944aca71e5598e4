# SPDX-License-Identifier: Apache-2.0
"""A job of a gluon.Trainer is saved whole: what servers keep, what compression has lost, and the learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, checkpoint, gluon, opt
from singa_lite.errors import CheckpointError, OptionError
from singa_lite.tensor import from_numpy, to_numpy
from tests.checkpoint.job_net import WithTrainer, batch, bits, with_trainer
from tests.kvstore.rig import Launch, Rig, caught, run_calls
from tests.slow_cases import slow_but_first

UNLOSSY = {"compression_params": None}


class Heavy(opt.SGD):
    """Has the states of SGD."""


def optimizer(kind: str) -> opt.Optimizer:
    if kind == "heavy":
        return Heavy(lr=0.1, momentum=0.9)
    return opt.Adam(lr=0.01) if kind == "adam" else opt.SGD(lr=0.1, momentum=0.9)


def made(rig: Rig, kind: str, **options: Any) -> WithTrainer:
    return with_trainer(rig.store(), optimizer(kind), **options)


def train(net: WithTrainer, rank: int, steps: range) -> None:
    for step in steps:
        if step == 7:
            net.trainer.set_learning_rate(0.05)  # before the save
        net(*batch(step, rank))
    autograd.training = False


def at_one_go(rig: Rig, folder: str, kind: str, options: dict[str, Any]) -> dict[str, bytes]:
    """Train 16 steps, with a save after 8; return all states."""
    net = made(rig, kind, **options)
    train(net, rig.rank, range(8))
    checkpoint.save_job(folder, net, trainer=net.trainer, block=kind == "adam")
    train(net, rig.rank, range(8, 16))
    checkpoint.load_job(f"{folder}-none", net, trainer=net.trainer)  # waits for what is saved
    return bits(net)


def goes_on(rig: Rig, folder: str, kind: str, options: dict[str, Any]) -> dict[str, bytes]:
    """Make the last 8 steps in a job whose servers are new and whose parameters were others."""
    net = made(rig, kind, **options)
    net.set_params({name: 0 * to_numpy(value) for name, value in net.get_params().items()})
    job = checkpoint.load_job(folder, net, trainer=net.trainer)
    assert job is not None and job.step == net.trainer.optimizer.step_counter == 8
    assert net.trainer.learning_rate == 0.05
    train(net, rig.rank, range(8, 16))
    return bits(net)


KINDS = [
    ("2bit", {}),
    ("adam", UNLOSSY),
    ("own", {**UNLOSSY, "update_on_kvstore": False}),
]


@slow_but_first(("workers", "servers"), [(3, 2), (2, 1), (3, 0)])
def test_a_job_that_goes_on_ends_with_the_same_bits(tmp_path: Path, workers: int, servers: int) -> None:
    """Also with another number of servers."""
    calls = [(str(tmp_path / kind), kind, options) for kind, options in KINDS]
    whole = run_calls(Launch("shm", workers, servers), at_one_go, *calls)
    assert run_calls(Launch("shm", workers, servers), goes_on, *calls) == whole
    first = [{name: each for name, each in of[0].items() if "residual" not in name} for of in whole]
    assert all(states["linear.W"] == first[0]["linear.W"] for states in first)
    assert any(name.startswith("sync/kvstore/") for name in whole[0][0])
    for others in {0, 1 + servers % 2} - {servers}:
        again = run_calls(Launch("shm", workers, others), goes_on, *calls)
        assert [[each["linear.W"] for each in of] for of in again] == [
            [each["linear.W"] for each in of] for of in whole
        ]


def lost(rig: Rig, folder: str, is_first: bool, reduction: str) -> tuple[np.ndarray[Any, Any], float]:
    """What compression has lost of one parameter, and the mean of another, after a save or a load."""
    net = made(rig, "2bit", reduction=reduction)
    if is_first:
        train(net, rig.rank, range(6))
        checkpoint.save_job(folder, net, trainer=net.trainer)
    else:
        assert checkpoint.load_job(folder, net, trainer=net.trainer) is not None
    residual = net.trainer.get_states()["sync/kvstore/linear.W"].astype(np.float64)
    return residual, float(to_numpy(net.get_params()["conv.W"]).mean())


@pytest.mark.parametrize(("servers", "reduction"), [(0, "mean"), (1, "mean"), (1, "sum")])
def test_with_another_number_of_workers_what_was_lost_keeps_its_weight(
    tmp_path: Path, servers: int, reduction: str
) -> None:
    folder = str(tmp_path / "job")
    before = [of[0] for of in run_calls(Launch("shm", 3, servers), lost, (folder, True, reduction))]
    after = [of[0] for of in run_calls(Launch("shm", 2, servers), lost, (folder, False, reduction))]
    total = sum(residual for residual, _ in before)
    assert np.abs(total).max() > 0
    for residual, mean in after:
        np.testing.assert_allclose(residual, total / (3 if reduction == "mean" else 2), rtol=1e-6, atol=1e-12)
        assert mean == before[0][1]


def refused(rig: Rig, folder: str) -> list[str]:
    net = made(rig, "2bit")
    train(net, rig.rank, range(3))
    checkpoint.save_job(folder, net, trainer=net.trainer)
    found = []
    for options in ({"kind": "adam"}, {"kind": "2bit", **UNLOSSY}, {"kind": "heavy"}):
        other = with_trainer(rig.store(), optimizer(options.pop("kind")), **options)
        before = bits(other)
        found.append(
            caught(
                lambda other=other: checkpoint.load_job(folder, other, trainer=other.trainer), CheckpointError
            )
        )
        assert bits(other) == before
    return found


def test_a_job_of_another_trainer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    for of in run_calls(Launch("shm", 3, 1), refused, (str(tmp_path / "job"),)):
        adam, plain, heavy = of[0]
        assert "saved with the optimizer SGD, this one is Adam" in adam, adam
        assert "rank 0 failed" in plain or "another trainer" in plain
        assert "saved with the optimizer SGD, this one is Heavy" in heavy, heavy


def test_what_is_no_whole_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = WithTrainer()
    net.compile([from_numpy(np.zeros((6, 3, 6, 6), np.float32))])
    net.trainer = gluon.Trainer(net.get_params(), "sgd")
    with pytest.raises(OptionError, match="or give a trainer"):
        checkpoint.save_job(tmp_path, net)
    for name, value in (("RENDEZVOUS_ID", "job"), ("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(f"SINGA_LITE_{name}", value)
    with pytest.raises(OptionError, match="not a dist store"):
        checkpoint.save_job(tmp_path, net, trainer=net.trainer)
    for name in ("RENDEZVOUS_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(f"SINGA_LITE_{name}")
    assert checkpoint.save_job(tmp_path, net, trainer=net.trainer).done()
    net.set_optimizer(opt.SGD(lr=0.1))
    with pytest.raises(OptionError, match="leave the trainer out"):
        checkpoint.load_job(tmp_path, net, trainer=net.trainer)
