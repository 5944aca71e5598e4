# SPDX-License-Identifier: Apache-2.0
"""localSGD against its equations in float64, step by step on every transport, and against fp32 where both are one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from singa_lite import autograd, checkpoint, layer, opt
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.work import ring_bytes
from singa_lite.errors import CheckpointError, CommError
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import run_ranks
from tests.slow_cases import slow_but_first
from tests.sync.by_hand import SHAPES, STEPS, WORLDS, Case, bits, gradients, new_scheme, sizes
from tests.sync.make_scheme import begin
from tests.sync.test_dgc import SGDS
from tests.sync.training import Net, made, steps, values

LR = 0.1
CASES = {
    "period 3": Case({"period": 3}),
    "period 1": Case({"period": 1}),
    "late": Case({"period": 2, "start": 4}, first_step=1),
}


def drift(communicator: Any, case: Case, stop: int | None = None) -> list[tuple[dict[str, np.ndarray], int]]:
    """Parameters and bytes sent of eight steps of gradient descent; after ``stop`` a new scheme goes on."""
    params = {key: Tensor(data=np.ones(shape), stores_grad=True, name=key) for key, shape in SHAPES.items()}
    names = {param: key for key, param in params.items()}
    scheme, log = new_scheme("localSGD", communicator, case), []
    for step in range(STEPS):
        if step == stop:
            states = scheme.state_dict(names)
            scheme = new_scheme("localSGD", communicator, case)
            scheme.load_state_dict(states, names)
        before = communicator.traffic.copy()
        begin(scheme, case.first_step + step, **case.options)
        for key, grad in gradients(communicator.rank, step).items():
            scheme.add_gradient(params[key], Tensor(data=grad))
        for param, grad in scheme.finish():
            param.copy_from_numpy(to_numpy(param) - np.float32(LR) * to_numpy(grad))
        scheme.end(list(params.values()))
        sent = communicator.traffic.since(before).bytes_sent
        log.append(({key: to_numpy(param) for key, param in params.items()}, sent))
    return log


def all_cases(communicator: Any) -> dict[str, list[tuple[dict[str, np.ndarray], int]]]:
    found = {}
    for label, case in CASES.items():
        found[label] = drift(communicator, case)
        for (mine, _), (other, _) in zip(found[label], drift(communicator, case, stop=5), strict=True):
            assert bits(mine) == bits(other), label
    return found


@pytest.mark.parametrize(("transport", "size"), WORLDS)
def test_eight_steps_are_those_of_the_equations(transport: str, size: int) -> None:
    ranks = run_ranks(all_cases, size, transport=transport)
    for label, case in CASES.items():
        period, start = case.options["period"], case.options.get("start", 0)
        params = [{key: np.ones(shape) for key, shape in SHAPES.items()} for _ in range(size)]
        num_local = 0
        for step in range(STEPS):
            grads, is_local = [gradients(rank, step) for rank in range(size)], case.first_step + step >= start
            num_local += is_local
            is_average = is_local and num_local % period == 0
            for key in SHAPES:
                mean = np.mean([grad[key].astype(float) for grad in grads], axis=0)
                for rank in range(size):
                    params[rank][key] = params[rank][key] - LR * (grads[rank][key] if is_local else mean)
                if is_average:
                    average = np.mean([each[key] for each in params], axis=0)
                    for each in params:
                        each[key] = average
            for rank, of_rank in enumerate(ranks):
                mine, sent = of_rank[label][step]
                note = f"{label}, step {step}, rank {rank}"
                for key, expected in params[rank].items():
                    np.testing.assert_allclose(
                        mine[key], expected, rtol=1e-5, atol=1e-6, err_msg=f"{note}, {key}"
                    )
                is_equal = bits(mine) == bits(ranks[0][label][step][0])
                assert is_equal == (rank == 0 or not is_local or is_average), note
                does_send = is_average or not is_local
                assert sent == (ring_bytes("all_reduce", 4 * sum(sizes()), size) if does_send else 0), note


def beside_fp32(communicator: Any) -> dict[str, list[dict[str, np.ndarray]]]:
    """fp32, and what must be the same: of every step, eagerly and recorded, and before ``start``."""
    found: dict[str, list[dict[str, np.ndarray]]] = {}
    for label, sgd in SGDS.items():
        found[label] = []
        for option, use_graph in (
            ("fp32", True),
            ("localSGD:1", False),
            ("localSGD:1", True),
            ("localSGD:4:start=100", True),
        ):
            net = made(communicator, use_graph, option, **sgd)
            steps(net, communicator.rank, 0, 20)
            found[label].append(values(net))
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_average_after_every_step_is_fp32(size: int) -> None:
    ranks = run_ranks(beside_fp32, size, transport="local" if size == 1 else "shm")
    for label in SGDS:
        expected = ranks[0][label][0]
        for of_rank in ranks:
            for found in of_rank[label][1:3]:
                for name, value in found.items():
                    np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=label)
            assert bits(of_rank[label][3]) == bits(expected)


def records(communicator: Any) -> tuple[int, list[int]]:
    net = made(communicator, True, "localSGD:4:start=2")
    sent = []
    for step in range(14):
        steps(net, communicator.rank, step, step + 1)
        sent.append(net.optimizer.bytes_sent)
    return len(net.graph_info()), sent


def test_a_step_is_recorded_before_the_start_and_with_and_without_an_average() -> None:
    for num_records, sent in run_ranks(records, 2):
        each = 4 * (30 + 6 + 18 + 3)
        assert sent == [each, each, *[0, 0, 0, each] * 3]
        assert num_records == 3


def test_a_dist_opt_says_that_ranks_differ() -> None:
    local = LocalCommunicator(World())
    assert not opt.DistOpt(communicator=local, dist_option="localSGD:8:start=500").keeps_equal
    scheme = new_scheme("localSGD", local, Case())
    with pytest.raises(CheckpointError, match=r"localSGD: .*are not its counters"):
        scheme.load_state_dict({"counter/first step": np.array(1)}, {})


def switch(communicator: Any, use_graph: bool, option: str, folder: str) -> list[dict[str, bytes]]:
    """Bits of parameters and states: twice after fp32 behind ``option``, and of a job that goes on from a save."""
    net = made(communicator, use_graph, option, momentum=0.9)
    found: list[dict[str, bytes]] = []
    net.optimizer.dist_option = "fp32"  # recorded while ranks are equal
    steps(net, communicator.rank, 20, 22)
    for first in (0, 3):  # twice, as what is recorded of the first turn is replayed in the second
        net.optimizer.dist_option = option
        steps(net, communicator.rank, first, first + 3)
        net.optimizer.dist_option = "fp32"
        if first == 3:
            checkpoint.save_job(folder, net)
        steps(net, communicator.rank, first + 3, first + 6)
        found.append(kept(net))
    other = made(communicator, use_graph, option, momentum=0.9)
    other.optimizer.dist_option = "fp32"
    assert checkpoint.load_job(folder, other) is not None
    steps(other, communicator.rank, 6, 9)
    return [*found, kept(other)]


def kept(net: Any) -> dict[str, bytes]:
    """Bits of parameters and of what the optimizer keeps, without that of dist_options."""
    states = {k: v for k, v in net.optimizer.get_states().items() if "sync/" not in k}
    return bits(values(net)) | bits(states)


@pytest.mark.parametrize("use_graph", [False, True])
@pytest.mark.parametrize("option", ["localSGD:4", "partialUpdate"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_are_equal_again_from_the_first_step_of_another_dist_option(
    size: int, option: str, use_graph: bool, tmp_path: Path
) -> None:
    ranks = run_ranks(switch, size, use_graph, option, str(tmp_path))
    for first, second, resumed in ranks:
        assert first == ranks[0][0]
        assert second == ranks[0][1] == resumed


def first_step_of_fp32(communicator: Any, use_graph: bool) -> float:
    """How far the first step of fp32 after localSGD is from mean(p) - lr * (0.9 * mean(v) + mean(g))."""
    net = made(communicator, use_graph, "localSGD:100", momentum=0.9)
    steps(net, communicator.rank, 0, 5)
    rng, lr = np.random.default_rng([communicator.rank, 5]), net.optimizer.lr_value
    x, y = Tensor(data=rng.standard_normal((4, 5))), Tensor(data=rng.standard_normal((4, 3)))
    autograd.training = True
    grads = {param.name: to_numpy(grad) for param, grad in autograd.backward(net.loss(net.forward(x), y))}
    states, expected = net.optimizer.get_states(), {}
    for key, value in values(net).items():
        mine = value - np.float32(lr) * (np.float32(0.9) * states[f"{key}:momentum"] + grads[key])
        expected[key] = np.mean(communicator.all_gather(mine, name=key).wait(), 0)
    net.optimizer.dist_option = "fp32"
    steps(net, communicator.rank, 5, 6)
    return max(float(np.abs(value - expected[key]).max()) for key, value in values(net).items())


@pytest.mark.parametrize("use_graph", [False, True])
def test_what_becomes_equal_is_the_mean(use_graph: bool) -> None:
    assert max(run_ranks(first_step_of_fp32, 3, use_graph)) < 1e-6


def load_other_values(communicator: Any) -> str:
    net = made(communicator, False, "localSGD:2", momentum=0.9)
    steps(net, communicator.rank, 0, 4)
    net.optimizer.dist_option = "fp32"
    steps(net, communicator.rank, 4, 8)
    states = net.optimizer.get_states()
    net.set_params({**values(net), "first.b": np.full(6, communicator.rank, np.float32)})
    net.optimizer.set_states(states)
    with pytest.raises(CommError) as error:
        steps(net, communicator.rank, 8, 9)
    return str(error.value)


def test_ranks_that_load_other_values_than_each_other_are_told_once_they_were_equal_again() -> None:
    for text in run_ranks(load_other_values, 2):
        assert "the ranks differ in their parameters and optimizer states: first.b" in text


class TwoBranches(Net):
    """The first layer of the step takes turns; backward yields the last one's parameters first, which all share."""

    def __init__(self) -> None:
        super().__init__()
        self.other = layer.Linear(6)
        self.turn = 2

    def forward(self, x: Tensor) -> Tensor:
        hidden = [self.first(x)] * (self.turn != 1) + [self.other(x)] * (self.turn != 0)
        return self.second(autograd.tanh(sum(hidden[1:], hidden[0])))


def turns(communicator: Any) -> dict[str, int]:
    """How often each parameter was equal on all ranks after one of 24 steps."""
    net = made(communicator, False, "partialUpdate", TwoBranches)
    net.optimizer.threshold = 25  # two chunks for each branch
    equal = dict.fromkeys(net.get_params(), 0)
    for step in range(24):
        net.turn = step % 2
        steps(net, communicator.rank, step, step + 1)
        for name, value in values(net).items():
            equal[name] += len(set(communicator.all_gather_object(value.tobytes().hex(), name=name))) == 1
    return equal


def test_partial_update_goes_round_the_chunks_of_each_branch() -> None:
    for equal in run_ranks(turns, 2):
        assert all(8 <= number < 24 for number in equal.values()), equal


def set_again(communicator: Any, option: str, use_graph: bool) -> bool:
    """Whether a copy of the model taken between two averages, as its optimizer cannot be copied, changes nothing."""
    found = []
    for copies in (False, True):
        net = made(communicator, use_graph, option, momentum=0.9)
        steps(net, communicator.rank, 0, 6)
        if copies:
            sgd, net.optimizer = net.optimizer, None
            copied = copy.deepcopy(net)
            net.set_optimizer(sgd)
            assert bits(values(copied)) == bits(values(net))
        steps(net, communicator.rank, 6, 10)
        found.append(bits(values(net)))
    return found[0] == found[1]


@slow_but_first("use_graph", [True, False])
@pytest.mark.parametrize("option", ["localSGD:8", "partialUpdate", "fp32"])
def test_an_optimizer_that_is_set_again_keeps_what_each_rank_has_learnt(option: str, use_graph: bool) -> None:
    assert run_ranks(set_again, 3, option, use_graph) == [True] * 3
