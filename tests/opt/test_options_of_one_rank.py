# SPDX-License-Identifier: Apache-2.0
"""Options that one rank alone changes between steps: an error on all ranks that names the rank and both texts."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, layer, model, opt
from singa_lite.comm.link import Link
from singa_lite.comm.link_communicator import LinkCommunicator
from singa_lite.errors import CommError
from singa_lite.tensor import Tensor, to_numpy
from tests.limits import LIMIT_S
from tests.ranks import mpi_missing, run_ranks
from tests.slow_cases import slow_but_first

STEPS, CHANGE = 8, 4  # recorded steps are replayed before the change

# dist_option before the change, after it on one rank, and what errors say of each
CHANGED = [
    ("powerSGD:2", "powerSGD:2:feedback=0", "feedback=True", "feedback=False"),
    ("powerSGD:2", "powerSGD:2:warm_start=0", "warm_start=True", "warm_start=False"),
    ("randomK:0.5", "randomK:0.5:corr=0", "corr=True", "corr=False"),
    ("int8", "int8:seed=7", "seed=0", "seed=7"),
    ("sign", "sign:rescale=0", "rescale=True", "rescale=False"),
    ("sparseTopK:0.2", "sparseTopK:0.2:corr=0", "corr=True", "corr=False"),
    ("sparseThreshold:0.001", "sparseThreshold:0.002", "spars=0.001", "spars=0.002"),
    ("dgc:0.5", "dgc:0.5:mask=0", "mask=True", "mask=False"),
    ("fp16", "fp16:0.01", "clip_value=None", "clip_value=0.01"),
    ("localSGD:2", "localSGD:1", "period=2", "period=1"),
    ("fp32", "powerSGD:2", "fp32: ", "powerSGD:rank=2"),  # a scheme that has not run before
]


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loss = layer.Linear(5), layer.MeanSquareError()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def train_one_batch(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss


def compiled(communicator: Any, dist_option: str, use_graph: bool, **given: Any) -> Net:
    net = Net()
    sgd = opt.SGD(opt.ExponentialDecay(0.1, 2, 0.5), momentum=0.9)
    net.set_optimizer(opt.DistOpt(sgd, communicator=communicator, dist_option=dist_option, **given))
    net.compile([Tensor((4, 20))], use_graph=use_graph)
    return net


def train_step(net: Net, rank: int, step: int) -> None:
    rng = np.random.default_rng([rank, step])
    x, y = (Tensor(data=rng.standard_normal(shape).astype(np.float32)) for shape in ((4, 20), (4, 5)))
    net(x, y)


def local_steps_with_another_period(communicator: Any, use_graph: bool) -> list[tuple[int, str]]:
    """The step of each error, where the last rank has another period until before, or at, the second average."""
    found = []
    for end in (7, 8):
        group = communicator.new_group(range(communicator.size), name=f"until {end}")
        net, error_text, step = compiled(group, "localSGD:4", use_graph), "no error", 0
        try:
            for step in range(12):
                is_other = communicator.rank == communicator.size - 1 and 5 <= step < end
                net.optimizer.dist_option = "localSGD:8" if is_other else "localSGD:4"
                train_step(net, communicator.rank, step)
        except CommError as error:
            error_text = str(error)
        found.append((step, error_text))
        communicator.barrier()
        group.close()
    return found


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
def test_options_of_local_steps_are_compared_by_the_next_average_alone(use_graph: bool) -> None:
    for before, at in run_ranks(local_steps_with_another_period, 3, use_graph, timeout_s=LIMIT_S):
        assert before == (11, "no error")
        assert at[0] == 7 and "period=4" in at[1] and "period=8" in at[1] and "rank 2" in at[1]


def change_on_one_rank(communicator: Any, use_graph: bool) -> list[str]:
    """Return the error of each of CHANGED, which the last rank makes."""
    texts = []
    for before, after, *_ in CHANGED:
        group = communicator.new_group(range(communicator.size), name=before)
        net = compiled(group, before, use_graph)
        try:
            for step in range(STEPS):
                if step == CHANGE and communicator.rank == communicator.size - 1:
                    net.optimizer.dist_option = after
                train_step(net, communicator.rank, step)
            texts.append("no error")
        except CommError as error:
            texts.append(str(error))
        communicator.barrier()
        group.close()
    autograd.training = False
    return texts


@slow_but_first("use_graph", [True, False], ids=["recorded", "eager"])
@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("shm", 3), ("mpi", 3)])
def test_options_that_one_rank_changes_are_an_error_with_both_texts(
    transport: str, size: int, use_graph: bool
) -> None:
    if transport == "mpi" and (reason := mpi_missing()):
        pytest.skip(reason)
    for texts in run_ranks(change_on_one_rank, size, use_graph, transport=transport, timeout_s=LIMIT_S):
        for (before, after, first, last), text in zip(CHANGED, texts, strict=True):
            assert "the ranks disagree" in text, (before, after, text)
            found = dict(re.findall(r"rank (\d) calls ([^,]*'[^']*')", text))
            assert last in found.pop(str(size - 1)), (before, after, text)
            assert found and all(first in theirs for theirs in found.values()), (before, after, text)


class Halves(opt.DecayScheduler):
    """A share of 0.5, but of ``other`` from step 4 on."""

    def __init__(self, other: float) -> None:
        super().__init__(0.5)
        self.other = other

    def call(self, step: int) -> float:
        return 0.5 if step < CHANGE else self.other


def schedules(communicator: Any, dist_option: str, use_graph: bool) -> list[Any]:
    """Equal schedules, then ones that one rank has replaced between steps."""
    found: list[Any] = []
    net = compiled(communicator, dist_option, use_graph, spars=Halves(0.25))
    for step in range(STEPS):
        train_step(net, communicator.rank, step)
    found.append(b"".join(to_numpy(param).tobytes() for param in net.get_params().values()))
    net.optimizer.spars = Halves(0.75 if communicator.rank == 1 else 0.25)
    try:
        train_step(net, communicator.rank, STEPS)
    except CommError as error:
        found.append(str(error))
    autograd.training = False
    return found


def over_a_link(communicator: Any, dist_option: str, use_graph: bool) -> list[Any]:
    return schedules(LinkCommunicator(communicator, Link(10**9, 0)), dist_option, use_graph)


@pytest.mark.parametrize("use_graph", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("dist_option", ["sparseTopK", "sparseThreshold"])
@pytest.mark.parametrize("way", [schedules, over_a_link])
def test_schedules_may_change_values_on_all_ranks_alone(way: Any, dist_option: str, use_graph: bool) -> None:
    ranks = run_ranks(way, 3, dist_option, use_graph)
    for values, text in ranks:
        assert values == ranks[0][0]
        assert "spars=0.25" in text and "rank 1 calls" in text and "spars=0.75" in text


def numbers_of_other_types(communicator: Any) -> list[Any]:
    """Parameters after a step with a share that is Python's number or numpy's; and the error of one that is rounded."""
    found: list[Any] = []
    for share in (0.5, 0.1):
        value = [share, np.float64(share), np.float32(share)][communicator.rank]
        net = compiled(communicator, "sparseTopK", False, spars=value)
        try:
            train_step(net, communicator.rank, 0)
            found.append(b"".join(to_numpy(param).tobytes() for param in net.get_params().values()))
        except CommError as error:
            found.append(str(error))
    autograd.training = False
    return found


def test_numbers_are_compared_by_all_of_their_digits() -> None:
    ranks = run_ranks(numbers_of_other_types, 3)
    for values, text in ranks:
        assert values == ranks[0][0]
        assert "spars=0.1:" in text and "spars=0.10000000149011612:" in text and "rank 2" in text
