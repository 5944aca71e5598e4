# SPDX-License-Identifier: Apache-2.0
"""50 steps of a Trainer end with the bits of DistOpt fp32, wherever sums are made and parameters updated.

With 3 workers over shm; in other jobs 10 steps do, as a sum or an update that differs shows in the first of them.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, gluon, opt
from singa_lite.tensor import Tensor, to_numpy
from tests.gluon.jobs import Rig, check_outcome, run_job
from tests.slow_cases import slow_but_first

EXAMPLES = str(Path(__file__).parents[2] / "examples")
FEW_STEPS, STEPS, BATCH = 10, 50, 2
F32 = np.float32


def make_model() -> Any:
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    from model.cnn import CNN

    return CNN()


def batch(rig: Rig, step: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([rig.rank, step])
    x = Tensor(data=rng.standard_normal((BATCH, 1, 28, 28)).astype(F32))
    return x, Tensor(data=rng.integers(0, 10, BATCH).astype(np.int32))


def prepared(rig: Rig, optimizer: opt.Optimizer | None) -> Any:
    """A compiled model, other weights on each worker until they agree on those of worker 0."""
    net = make_model()
    rng = np.random.default_rng(rig.rank)
    net.compile([batch(rig, 0)[0]])
    net.set_params({n: 0.05 * rng.standard_normal(p.shape).astype(F32) for n, p in net.get_params().items()})
    if optimizer is not None:
        net.set_optimizer(optimizer)
    return net


def crc(net: Any) -> int:
    found = 0
    for name, param in sorted(net.get_params().items()):
        found = zlib.crc32(to_numpy(param).tobytes(), zlib.crc32(name.encode(), found))
    return found


def make_sgd() -> opt.SGD:
    return opt.SGD(lr=0.005, momentum=0.9, weight_decay=1e-5)


def train(rig: Rig, net: Any, step: Callable[[Tensor, Tensor], object]) -> list[int]:
    """The bits behind FEW_STEPS, and behind STEPS with 3 workers over shm."""
    ends = [FEW_STEPS, STEPS] if (rig.everyone.transport, rig.size) == ("shm", 3) else [FEW_STEPS]
    found = []
    for number in range(1, ends[-1] + 1):
        step(*batch(rig, number))
        if number in ends:
            found.append(crc(net))
    return found


def bits_of_trainers(rig: Rig) -> dict[str, list[int]]:
    found = {}
    if rig.num_servers == 0:
        net = prepared(rig, opt.DistOpt(make_sgd(), communicator=rig.workers))
        start = crc(net)
        found["DistOpt"] = train(rig, net, net)
        assert len({start, *found["DistOpt"]}) == 1 + len(found["DistOpt"])
    for on_store in (True, False):
        net = prepared(rig, None)
        trainer = gluon.Trainer(
            net.get_params(),
            make_sgd(),
            kvstore=rig.store(big_array=1000),
            update_on_kvstore=on_store,
            reduction="mean",
        )
        found[f"update_on_kvstore={on_store}"] = train(rig, net, partial(step, net, trainer))
    return found


def step(net: Any, trainer: gluon.Trainer, x: Tensor, y: Tensor) -> None:
    with autograd.record():
        loss = net.softmax_cross_entropy(net.forward(x), y)
    loss.backward()
    trainer.step(1)


@cache
def outcomes(transport: str, num_workers: int, num_servers: int) -> list[Any]:
    return run_job(transport, num_workers, num_servers, [bits_of_trainers])


@slow_but_first("num_servers", [2, 0, 1])
@pytest.mark.parametrize(
    ("transport", "num_workers"),
    [
        ("shm", 3),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("shm", 2), ("mpi", 2), ("mpi", 3))),
    ],
)
def test_a_trainer_ends_with_the_bits_of_dist_opt(transport: str, num_workers: int, num_servers: int) -> None:
    [expected, *others] = check_outcome(outcomes("shm", num_workers, 0), "bits_of_trainers")
    found = check_outcome(outcomes(transport, num_workers, num_servers), "bits_of_trainers")
    assert len(expected["DistOpt"]) == (2 if num_workers == 3 else 1)
    for bits in (bits for each in [*others, *found] for bits in each.values()):
        assert bits == expected["DistOpt"][: len(bits)]
