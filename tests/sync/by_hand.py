# SPDX-License-Identifier: Apache-2.0
"""Run steps of a scheme by hand, on gradients that are known, for a model in float64 to be compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, floor, log2, prod
from typing import Any, NamedTuple

import numpy as np

from singa_lite.comm.base import Communicator
from singa_lite.sync import find_schemes
from singa_lite.sync.base import Scheme
from singa_lite.tensor import Tensor, to_numpy
from tests.ranks import mpi_missing
from tests.sync.make_scheme import NoOptimizer, begin

SHAPES = {"a": (3, 5), "b": (40,), "c": (7, 2, 2), "d": (1,), "e": (11,)}
GROUPS = [["b"], ["c"], ["a", "d", "e"]]  # at a threshold of 20: the larger ones alone
THRESHOLD, STEPS = 20, 8
# transport and number of ranks
WORLDS = [
    ("local", 1),
    ("shm", 2),
    ("shm", 3),
    *([] if mpi_missing() else [("mpi", size) for size in (1, 2, 3)]),
]


class Rule(NamedTuple):
    momentum: float
    is_nesterov: bool


@dataclass(frozen=True)
class Case:
    """What a scheme is run with.

    Attributes:
        options: of the scheme.
        momentum, is_nesterov: of the optimizer.
        lrs: learning rates, step by step; the last one stays.
        first_step: number of the first step.
    """

    options: dict[str, Any] = field(default_factory=dict)
    momentum: float = 0.9
    is_nesterov: bool = False
    lrs: tuple[float, ...] = (0.1,)
    first_step: int = 0

    def lr(self, step: int) -> float:
        return self.lrs[min(step, len(self.lrs) - 1)]


class KnownOptimizer(NoOptimizer):
    """The OptimizerView of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def lr_at(self, step: int) -> float:
        return self.case.lr(step)

    def momentum_rule(self, step: int) -> Rule:
        return Rule(self.case.momentum, self.case.is_nesterov)


class Step(NamedTuple):
    """What a rank has after a step: by parameter, in float32."""

    result: dict[str, np.ndarray]
    states: dict[str, np.ndarray]
    bytes_sent: int


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    """Gradients of a rank at a step, in float32."""
    rng = np.random.default_rng([5, rank, step])
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def new_scheme(name: str, communicator: Communicator, case: Case) -> Scheme:
    return find_schemes()[name](communicator, THRESHOLD, 1 << 30, KnownOptimizer(case))


def run_steps(communicator: Communicator, name: str, case: Case, stop: int | None = None) -> list[Step]:
    """Eight steps; after ``stop`` of them a new scheme goes on from the saved states."""
    params = {key: Tensor(shape, stores_grad=True, name=key) for key, shape in SHAPES.items()}
    names = {param: key for key, param in params.items()}
    scheme, log = new_scheme(name, communicator, case), []
    for step in range(STEPS):
        if step == stop:
            states = scheme.state_dict(names)
            scheme = new_scheme(name, communicator, case)
            scheme.load_state_dict(states, names)
        before = communicator.traffic.copy()
        begin(scheme, case.first_step + step, **case.options)
        for key, grad in gradients(communicator.rank, step).items():
            scheme.add_gradient(params[key], Tensor(data=grad))
        result = {param.name: to_numpy(grad) for param, grad in scheme.finish()}
        scheme.end(list(params.values()))
        sent = communicator.traffic.since(before).bytes_sent
        log.append(Step(result, scheme.state_dict(names), sent))
    return log


def run_cases(communicator: Communicator, name: str, cases: dict[str, Case]) -> dict[str, list[Step]]:
    """The steps of each case; that a resumed one has the same bits is asserted here."""
    found = {}
    for label, case in cases.items():
        found[label] = run_steps(communicator, name, case)
        resumed = run_steps(communicator, name, case, stop=5)
        for mine, other in zip(found[label][5:], resumed[5:], strict=True):
            assert bits(mine.result) == bits(other.result), label
            assert bits(mine.states) == bits(other.states), label
    return found


def bits(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in sorted(arrays.items())}


def joined(arrays: dict[str, np.ndarray], group: list[str], suffix: str = "") -> np.ndarray:
    """Return the arrays of a group end to end."""
    return np.concatenate([np.ravel(arrays[name + suffix]) for name in group])


def sizes() -> list[int]:
    """Numbers of elements of each group."""
    return [sum(prod(SHAPES[name]) for name in group) for group in GROUPS]


def sparse_bytes(n: int, k: int) -> int:
    """Bytes of k float32 values and their indices below n, by the closed formula."""
    if k == 0:
        return 0
    low_bits = floor(log2(n / k))
    return 4 * (k + ceil(k * low_bits / 32) + ceil((k + ((n - 1) >> low_bits) + 1) / 32))
