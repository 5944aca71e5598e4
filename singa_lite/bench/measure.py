# SPDX-License-Identifier: Apache-2.0
"""Measure a calibration: steps of a model on one rank of several, over a communicator that moves nothing (loopback.py).

So a step has all that its rank computes, merging what N ranks would send included, and nothing of the network. What
does not live here: many ranks that compute at once (validation_rank.py).
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import tensor
from ..comm.base import Communicator, World
from ..device import get_num_threads
from ..opt import SGD, DistOpt
from .calibration import BucketShapes, Calibration, OptionTimes, write_calibration
from .datasets import data_set_of
from .loopback import LoopbackCommunicator
from .models import MODELS, make_model, step_arguments
from .wire_bytes import messages_of, word_of

MEASURED = (
    "fp32",
    "fp16",
    "bf16",
    "int8",
    "sign",
    "powerSGD:4",
    "sparseTopK:0.01",
    "dgc:0.001",
    "randomK:0.1",
    "localSGD:8",
)
PLAIN = "fp32"  # what other options are compared with
CLASSES = 10  # of all data sets
BATCH, ROUNDS, WARM_UP = 64, 40, 4
LIMIT_S = 30.0  # on a busy machine fewer rounds have to do
FEW, MANY = 4, 16  # ranks; more than 2, where int8 has two phases


class LoneStepTimes(NamedTuple):
    """Seconds of a step over a LoopbackCommunicator.

    Attributes:
        total_s: of all that the rank computes.
        ready_s: from the step's start to the first collective with each of ``Alone.groups``.
        rest_s: from the last wait for a collective to the step's end: decompressing, merging and updating.
    """

    total_s: float
    ready_s: tuple[float, ...]
    rest_s: float


@dataclass(frozen=True)
class Workload:
    """The training step that a rank computes: model and batch size.

    Attributes:
        model: one of MODELS, or ``file.py:function``, which trains on made data in the shape of its data set.
        batch_size: n, >= 1.
    """

    model: str = MODELS[0]
    batch_size: int = BATCH


class Training:
    """A model that trains with one dist_option on made data, with recorded steps.

    Args:
        work: what it computes.
        option: text of the dist_option.
        communicator: that of the ranks.

    Attributes:
        dist: the DistOpt.
        shapes: of the parameters, by name.
    """

    def __init__(self, work: Workload, option: str, communicator: Communicator) -> None:
        sgd = SGD(lr=0.005, momentum=0.9, weight_decay=1e-5)
        self.dist = DistOpt(sgd, dist_option=option, communicator=communicator)
        rng = np.random.default_rng(communicator.rank)
        images = rng.standard_normal((work.batch_size, *data_set_of(work.model).shape)).astype(np.float32)
        self._x = tensor.from_numpy(images)
        self._y = tensor.from_numpy(rng.integers(0, CLASSES, work.batch_size).astype(np.int32))
        self._model = make_model(work.model)
        self._model.set_optimizer(self.dist)
        self._model.compile([self._x], is_train=True, use_graph=True)
        self._arguments = step_arguments(self._model, option)
        self.shapes = {name: tuple(param.shape) for name, param in self._model.get_params().items()}

    def step(self) -> None:
        """Make a step, to the loss on the host."""
        _, loss = self._model(self._x, self._y, **self._arguments)
        loss.item()


class Alone:
    """A Training on one rank of ``size`` without the others, whose steps can be timed.

    Attributes:
        training: the Training.
        groups: names of the parameters that were exchanged together in the last step; all, where nothing was.
    """

    def __init__(self, work: Workload, option: str, size: int, rank: int = 0) -> None:
        self._loopback = LoopbackCommunicator(World(rank, size, rank, size))
        self.training = Training(work, option, self._loopback)
        self.groups: list[tuple[str, ...]] = []
        for _ in range(WARM_UP):
            self.training.step()

    def time_step(self) -> LoneStepTimes:
        """Return the times of one step more."""
        loopback = self._loopback
        loopback.calls.clear()
        loopback.moved_s, start = 0.0, time.perf_counter()
        self.training.step()
        end = time.perf_counter()
        calls: dict[tuple[str, ...], float] = {}
        for call in loopback.calls:
            names = tuple(call.name.rpartition(": ")[2].split(", "))  # behind the options
            if all(name in self.training.shapes for name in names):  # others are of a part of the bucket
                calls.setdefault(names, call.called_s - start)
        self.groups = list(calls) or [tuple(self.training.shapes)]
        total = end - start - loopback.moved_s
        rest = end - max(loopback.waited_at_s, start) if loopback.calls else 0.0
        return LoneStepTimes(total, tuple(calls.values()) or (total - rest,), rest)


def measure(
    options: Sequence[str] = MEASURED, work: Workload | None = None, rounds: int = ROUNDS
) -> Calibration:
    """Measure steps on one rank, in this process, on the CPU; takes some seconds.

    Of each step the shortest counts, as other programs only make steps longer. What an option adds is its step minus
    that of fp32; what merging adds for each rank is found from steps as one of FEW and one of MANY ranks.

    Args:
        options: texts of dist_options; fp32 is measured in any case.
        work: what a rank computes; None: 64 images through the MNIST CNN.
        rounds: of a step of each option, >= 1; no more begin after LIMIT_S.

    Raises:
        OptionError: there is no such option, or no formula of its bytes, or no such model.
    """
    work, options = work or Workload(), tuple(dict.fromkeys([PLAIN, *options]))
    few = {option: Alone(work, option, FEW) for option in timed(options)}
    shapes = tuple(few[PLAIN].training.shapes.values())
    merging = [option for option in few if merges(option, shapes)]
    many = {option: Alone(work, option, MANY) for option in merging}
    times: dict[str, list[LoneStepTimes]] = {option: [] for option in few}
    rests: dict[str, list[float]] = {option: [] for option in many}
    end = time.perf_counter() + LIMIT_S
    for _ in range(rounds):
        for option, alone in few.items():
            times[option].append(alone.time_step())
        for option, alone in many.items():
            rests[option].append(alone.time_step().rest_s)
        if time.perf_counter() > end:
            break
    more_s = {
        option: min(rest) - min(step.rest_s for step in times[option]) for option, rest in rests.items()
    }
    merge_s = {option: max(0.0, seconds) / (MANY - FEW) for option, seconds in more_s.items()}
    about = f"{work.model}, {work.batch_size} images, {platform.machine()}, {get_num_threads()} threads"
    return calibration_of(options, few, times, min, about, merge_s)


def timed(options: Sequence[str]) -> list[str]:
    """Return the options whose steps differ from those of fp32 apart from the network: all but localSGD."""
    return [option for option in options if word_of(option) != "localSGD"]


def merges(option: str, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether a rank adds up the more, the more ranks there are: it gathers as much of each as of one."""

    few, many = (
        [message for message in messages_of(option, shapes, size) if message.kind == "all_gather"]
        for size in (FEW, MANY)
    )
    return bool(few) and few == many


def calibration_of(
    options: Sequence[str],
    alone: Mapping[str, Alone],
    times: Mapping[str, Sequence[LoneStepTimes]],
    choose: Callable[[Sequence[float]], float],
    about: str,
    merge_s: Mapping[str, float] | None = None,
    size: int = FEW,
) -> Calibration:
    """Return the calibration that steps give.

    Args:
        options: those of the calibration, fp32 among them.
        alone: what was timed, of each option; fp32 among them.
        times: of its steps, as one of ``size`` ranks.
        choose: gives the one number of many, such as min.
        about: see Calibration.
        merge_s: of each option, that ``times`` contain ``size`` times; 0 where there is none.
        size: see ``times``.
    """
    steps, merge_s = times[PLAIN], merge_s or {}
    total_s = choose([step.total_s for step in steps])
    update_s = choose([step.rest_s for step in steps])
    compute_s = total_s - update_s
    ready = [choose(column) for column in zip(*(step.ready_s for step in steps), strict=True)]
    ready_s = {
        name: min(at, compute_s)
        for at, names in zip(ready, alone[PLAIN].groups, strict=True)
        for name in names
    }
    buckets = buckets_of(alone[PLAIN], ready_s)
    found = {}
    for option in options:
        if option not in times:
            found[option] = OptionTimes(0.0)
            continue
        own_s, merge = choose([step.total_s for step in times[option]]), merge_s.get(option, 0.0)
        own = () if alone[option].groups == alone[PLAIN].groups else buckets_of(alone[option], ready_s)
        found[option] = OptionTimes(max(0.0, own_s - total_s - size * merge), merge, own)
    return Calibration(compute_s, update_s, buckets, found, about)


def buckets_of(alone: Alone, ready_s: Mapping[str, float]) -> tuple[BucketShapes, ...]:
    """Return the groups of a step with their shapes; ``ready_s`` are the times of all parameters by name."""
    buckets, before = [], 0.0
    for names in alone.groups:
        before = max([before, *(ready_s[name] for name in names)])
        buckets.append(BucketShapes(before, tuple(alone.training.shapes[name] for name in names)))
    return tuple(buckets)


def main(path: str, options: str, work: str) -> None:
    """Measure a list of ``options`` and the arguments of a Workload, both JSON; write the calibration to ``path``."""
    write_calibration(Path(path), measure(json.loads(options), Workload(**json.loads(work))))
