# SPDX-License-Identifier: Apache-2.0
"""A run that is saved and one that goes on from its file end with the same bits: every option, optimizer and mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, opt
from singa_lite.comm.base import Communicator
from singa_lite.device import get_default_device
from singa_lite.errors import CommError
from singa_lite.tensor import Tensor, from_numpy, to_numpy
from tests.checkpoint.job_net import Net
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first

OPTIONS = [
    "fp32",
    "fp16",
    "bf16",
    "int8",
    "hierarchical:int8:ef=1",
    "partialUpdate",
    "sparseTopK",
    "sparseThreshold",
]
OPTIMIZERS = {
    "sgd": lambda: opt.SGD(lr=opt.ExponentialDecay(0.1, 5, 0.8), momentum=0.9, weight_decay=1e-4),
    "adam": lambda: opt.Adam(lr=0.01),
}
BEFORE, AFTER = 5, 8  # steps


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([step, rank])
    x = rng.standard_normal((6, 3, 6, 6)).astype(np.float32)
    return from_numpy(x), from_numpy(rng.integers(0, 4, 6))


def compiled(communicator: Communicator, make: Any, option: str, use_graph: bool) -> Net:
    options = {"spars": 0.05} if option.startswith("sparse") else {}
    get_default_device().SetRandSeed(3 + communicator.rank)
    net = Net()
    net.set_optimizer(
        opt.DistOpt(make(), communicator=communicator, dist_option=option, threshold=60, **options)
    )
    net.compile([batch(0, 0)[0]], use_graph=use_graph)
    return net


def bits(net: Net) -> dict[str, bytes]:
    values = {name: to_numpy(value).tobytes() for name, value in net.get_states().items()}
    return values | {name: value.tobytes() for name, value in net.optimizer.get_states().items()}


def resumed(communicator: Communicator, folder: str, use_graph: bool) -> dict[str, bool]:
    """Whether a run that goes on from a file ends where the run that wrote it does."""
    found, rank = {}, communicator.rank
    for number, option in enumerate(OPTIONS):
        # every two of option, optimizer, number of ranks and mode come together
        name = list(OPTIMIZERS)[(number + communicator.size + use_graph) % len(OPTIMIZERS)]
        make, path = OPTIMIZERS[name], Path(folder) / f"{option}-{name}-{rank}.zip"
        whole = compiled(communicator, make, option, use_graph)
        for step in range(BEFORE):
            whole(*batch(step, rank))
        whole.save_states(path)
        for step in range(BEFORE, BEFORE + AFTER):
            whole(*batch(step, rank))
        replayed = not use_graph or any(info.num_kernels for info in whole.graph_info())
        second = compiled(communicator, make, option, use_graph)
        second.load_states(path)
        for step in range(BEFORE, BEFORE + AFTER):
            second(*batch(step, rank))
        found[f"{option} {name}"] = replayed and bits(second) == bits(whole)
    autograd.training = False
    return found


@slow_but_first("use_graph", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_resumed_run_ends_with_the_bits_of_the_run_that_was_saved(
    tmp_path: Path, size: int, use_graph: bool
) -> None:
    transport = "local" if size == 1 else "shm"
    found = run_ranks(resumed, size, str(tmp_path), use_graph, transport=transport)
    assert [all(of_rank.values()) for of_rank in found] == [True] * size, found
    assert all(len(of_rank) == len(OPTIONS) for of_rank in found)


def loaded_apart(communicator: Communicator, folder: str, fault: str) -> str:
    """The error of a rank whose checkpoint is not the others'."""
    net, rank = compiled(communicator, OPTIMIZERS["sgd"], "fp32", True), communicator.rank
    for step in range(6):
        net(*batch(step, rank))
        net.save_states(Path(folder) / f"{step}-{rank}.zip")
    if fault == "another step":
        net.load_states(Path(folder) / f"{3 if rank == 1 else 4}-{rank}.zip")
    elif fault == "one rank":
        if rank == 0:
            net.load_states(Path(folder) / f"4-{rank}.zip")
    elif fault == "another value":
        net.load_states(Path(folder) / f"4-{rank}.zip")
        if rank == 1:
            net.linear.W.array[0, 0] += 1e-6
    try:
        for step in range(6, 9):
            net(*batch(step, rank))
    except CommError as error:
        return str(error)
    return "no error"


FAULTS = {
    "another step": "the number of steps made is 5 on rank 0 but 4 on rank 1",
    "one rank": "the ranks disagree",
    "another value": "linear.W is",
    "no fault": "no error",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_ranks_that_have_loaded_different_states_raise(tmp_path: Path, fault: str) -> None:
    for text in run_ranks(loaded_apart, 3, str(tmp_path), fault):
        assert FAULTS[fault] in text


def drifts(communicator: Communicator, fault: str, check_every: int | None) -> tuple[int, str]:
    """How many steps were made before a rank that differs was found, and its error."""
    net, rank = compiled(communicator, OPTIMIZERS["sgd"], "fp32", True), communicator.rank
    net.optimizer._ranks.check_every = check_every
    for step in range(12):
        if step == 4 and rank == 2:
            if fault == "lr":
                net.optimizer.lr = 0.7
            elif fault == "bit":
                net.conv.b.array[0] += 1e-5
            else:
                net.optimizer.slots(net.linear.b)["momentum"].array[0] += 1e-5
        try:
            net(*batch(step, rank))
        except CommError as error:
            return step, str(error)
    return 12, "no error"


@pytest.mark.parametrize(("fault", "name"), [("lr", "lr is"), ("bit", "conv.b is"), ("momentum", "linear.b")])
def test_every_so_many_steps_the_ranks_compare_what_must_be_equal(fault: str, name: str) -> None:
    for step, text in run_ranks(drifts, 3, fault, 3):
        assert step == 5 and name in text and "rank 2" in text
    assert run_ranks(drifts, 3, fault, None) == [(12, "no error")] * 3


def other_optimizer(communicator: Communicator, kind: str) -> str:
    """The error of the ranks at the start if rank 1 has another optimizer."""
    makes = {
        "class": lambda: opt.Adam(lr=0.1),
        "lr": lambda: opt.SGD(lr=0.2, momentum=0.9),
        "schedule": lambda: opt.SGD(lr=opt.ExponentialDecay(0.1, 5, 0.5), momentum=0.9),
        "nesterov": lambda: opt.SGD(lr=0.1, momentum=0.9, nesterov=True),
    }
    make = makes[kind] if communicator.rank == 1 else lambda: opt.SGD(lr=0.1, momentum=0.9)
    try:
        compiled(communicator, make, "fp32", False)
    except CommError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("class", "class is SGD on rank 0 but Adam"),
        ("lr", "lr is"),
        ("schedule", "lr is"),
        ("nesterov", "nesterov is"),
    ],
)
def test_another_optimizer_on_a_rank_is_an_error_on_all(kind: str, text: str) -> None:
    for error in run_ranks(other_optimizer, 3, kind):
        assert text in error
