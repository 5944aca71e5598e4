# SPDX-License-Identifier: Apache-2.0
"""What one rank of `plan --validate` does: time what a prediction needs, and, apart from it, the steps themselves.

Note [two halves]: the first half, all of ``Found`` that a prediction is made of, never sees a training step that
communicates. Computing is timed over a LoopbackCommunicator, by all ranks at once, so that they share the cores as in
a step: they begin together, and what the slowest one takes counts. Transport is timed by collectives alone. The second
half is steps of DistOpt over the real communicator. Both halves alternate, so that other programs disturb both.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..comm.base import Communicator
from ..comm.dispatch import DispatchCommunicator
from ..comm.link_communicator import LinkCommunicator
from ..comm.rendezvous import process_communicator
from ..files import atomic_file
from .calibration import Calibration, calibration_from
from .cost import Network, ring_all_reduce
from .measure import PLAIN, WARM_UP, Alone, LoneStepTimes, Training, Workload, calibration_of, timed
from .wire_bytes import messages_of, options_of, word_of

ROUNDS = 8  # of all options: often, as other programs come and go
PAUSE_S = 2e-3  # over an emulated link: ranks sleep before they compute on, as they do where they wait for it
SHORT = 64  # bytes, of what costs latency alone
NUM_TRANSFERS = 12  # of each collective


@dataclass(frozen=True)
class Trial:
    """The options and settings that the ranks time.

    Attributes:
        options: texts of dist_options.
        steps: of each option that count, at least.
        model, batch_size: see ``Workload``.
    """

    options: tuple[str, ...]
    steps: int
    model: str
    batch_size: int


@dataclass(frozen=True)
class Found:
    """The times that the ranks of a world of one size measured.

    Attributes:
        calibration: of computing.
        transport: of each kind of collective the seconds of a short one, and those of a byte.
        call_s: seconds of a collective over the emulated link beyond its latency; 0 without one.
        measured: of each option the seconds of a step over the real communicator.
        sent: of each option the mean of bytes that rank 0 sent in a step.
        calibrating_s: seconds that the first half took.
        load: the system's, over a minute, when all was done.
    """

    calibration: Calibration
    transport: dict[str, tuple[float, float]]
    call_s: float
    measured: dict[str, float]
    sent: dict[str, float]
    calibrating_s: float
    load: float


def main(trial: str, result: str) -> None:
    """Time a Trial, given as JSON, as a rank of the environment's world; rank 0 writes a Found to ``result``."""
    given = json.loads(trial)
    communicator = process_communicator()
    found = Rank(Trial(**{**given, "options": tuple(given["options"])}), communicator).run()
    if communicator.rank == 0:
        with atomic_file(Path(result)) as file:
            file.write(json.dumps(asdict(found)).encode())


def read_found(path: Path) -> Found:
    """Return what ``main`` wrote."""
    content = json.loads(path.read_bytes())
    content["calibration"] = calibration_from("validation", content["calibration"])
    return Found(**content)


class Rank:
    """One rank of a Trial.

    Args:
        trial: equal on all ranks.
        communicator: that of the process.
    """

    def __init__(self, trial: Trial, communicator: Communicator) -> None:
        self._trial, self._communicator = trial, communicator
        self._host = communicator  # without the emulated link
        if isinstance(communicator, (LinkCommunicator, DispatchCommunicator)):
            self._host = communicator.host
        work, size, rank = Workload(trial.model, trial.batch_size), communicator.size, communicator.rank
        self._alone = {
            option: Alone(work, option, size, rank)
            for option in timed([*dict.fromkeys([PLAIN, *trial.options])])
        }
        self._shapes = tuple(self._alone[PLAIN].training.shapes.values())
        self._training = {option: Training(work, option, communicator) for option in trial.options}
        for option, training in self._training.items():
            for _ in range(WARM_UP * period_of(option)):
                training.step()

    def run(self) -> Found:
        """Return what all ranks found, on every rank."""
        start = time.perf_counter()
        transport, call_s = self._time_transport(), self._time_calls()
        calibrating_s = time.perf_counter() - start
        alone: dict[str, list[LoneStepTimes]] = {option: [] for option in self._alone}
        times: dict[str, list[float]] = {option: [] for option in self._training}
        sent = dict.fromkeys(times, 0.0)
        num_steps = math.ceil(self._trial.steps / ROUNDS)
        for option in [*dict.fromkeys([*alone, *times])] * ROUNDS:
            if option in alone:
                start = time.perf_counter()
                alone[option] += [self._time_alone(option) for _ in range(num_steps)]
                calibrating_s += time.perf_counter() - start
            if option in times:
                seconds, sent[option] = self._time_steps(option, num_steps)
                times[option] += seconds
        size = self._communicator.size
        options = tuple(self._alone | times)
        return Found(
            calibration_of(options, self._alone, alone, statistics.median, f"{size} ranks", size=size),
            transport,
            call_s,
            {option: statistics.median(seconds) for option, seconds in times.items()},
            sent,
            calibrating_s,
            os.getloadavg()[0],
        )

    # ---- what a prediction needs -----------------------------------------------------------------------

    def _time_alone(self, option: str) -> LoneStepTimes:
        """Return the times of a step that all ranks compute at once; of each those of the slowest."""
        self._begin_together()
        step = self._alone[option].time_step()
        total_s, rest_s, *ready_s = self._latest([step.total_s, step.rest_s, *step.ready_s])
        return LoneStepTimes(total_s, tuple(ready_s), rest_s)

    def _time_transport(self) -> dict[str, tuple[float, float]]:
        """Return seconds of a short collective and of a byte, for each kind that the options use."""
        largest: dict[str, int] = {}
        for option in self._trial.options:
            for kind, payload in messages_of(option, self._shapes, self._communicator.size):
                largest[kind] = max(largest.get(kind, 2 * SHORT), payload)
        found = {}
        for kind, payload in largest.items():
            short_s = self._time_collective(self._host, kind, SHORT)
            long_s = self._time_collective(self._host, kind, payload)
            found[kind] = short_s, max(0.0, long_s - short_s) / payload
        return found

    def _time_calls(self) -> float:
        """Return what a collective over the emulated link takes beyond the link's own time."""
        link, size = self._communicator, self._communicator.size
        if not isinstance(link, LinkCommunicator) or size == 1:
            return 0.0
        own_s = ring_all_reduce(Network.of_link(link.link), SHORT, size).total_s
        return max(0.0, self._time_collective(link, "all_reduce", SHORT) - own_s)

    def _time_collective(self, communicator: Communicator, kind: str, payload: int) -> float:
        """Return the median seconds of a collective of about ``payload`` bytes, from all calls to the last end."""
        rows = -(-payload // (4 * communicator.size))
        array = np.ones((rows * communicator.size,), np.float32)
        operation = ("mean",) if kind == "all_reduce" else ()
        seconds = []
        for _ in range(NUM_TRANSFERS):
            start = self._begin_together()
            getattr(communicator, kind)(array, *operation).wait()
            seconds.append(self._latest([time.perf_counter()])[0] - start)
        return statistics.median(seconds)

    # ---- what is predicted -----------------------------------------------------------------------------

    def _time_steps(self, option: str, num_steps: int) -> tuple[list[float], float]:
        """Return mean seconds of each period of at least ``num_steps``, and the bytes a step that this rank sent."""
        training, period = self._training[option], period_of(option)
        num_periods = math.ceil(num_steps / period)
        ends, sent = [self._begin_together()], 0
        for _ in range(num_periods * period):
            training.step()
            ends.append(time.perf_counter())
            sent += training.dist.bytes_sent
        means = np.diff(self._latest(ends)[::period]) / period
        return means.tolist(), sent / (num_periods * period)

    # ---- the ranks together ----------------------------------------------------------------------------

    def _begin_together(self) -> float:
        """Wait for a moment from which all ranks go on; return it, in seconds of ``perf_counter``."""
        pause_s = PAUSE_S if isinstance(self._communicator, LinkCommunicator) else 0.0
        start = self._latest([time.perf_counter()])[0] + pause_s
        while (left := start - time.perf_counter()) > 0:
            time.sleep(left)
        return start

    def _latest(self, seconds: Sequence[float]) -> list[float]:
        """Return the largest over the ranks of each number; processes of a host share the clock."""
        latest = np.array(seconds)
        self._host.all_reduce(latest, "max").wait()
        return latest.tolist()


def period_of(option: str) -> int:
    """Return after how many steps an option repeats what it sends."""
    return int(options_of(option).period) if word_of(option) == "localSGD" else 1
