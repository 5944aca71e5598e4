# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step of DistOpt went, read from the clock of its thread (graph/clock.py)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ..graph.clock import StepTimes, Waited

Interval = tuple[float, float]  # start and end


@dataclass(frozen=True)
class StepSeconds:
    """Seconds that one rank spent on parts of a step, evaluations and data loading not among them.

    All but ``wire`` and ``hidden`` add up to the step. It begins with the call of a Model in training mode, else with
    the first operator that records for backward. So a forward pass in training mode that no step follows counts for the
    next step, with the time between them: look at a loss in evaluation mode or under ``autograd.no_grad()``.

    Attributes:
        compute: forward and backward.
        pack: copying gradients into buckets; in a recorded step most are computed there.
        compress: making messages from buckets: casts, selections, codes.
        wait: the host waited for collectives.
        decompress: making gradients from messages.
        update: the optimizer's, clipping included.
        wire: at least one collective was moving data: all ranks had called it, and it had not ended. None where the
            transport does not report times, or the step does not ``wait()`` for all of its collectives.
        hidden: of ``wire``, while the host did something else than wait; None if that is.
    """

    compute: float
    pack: float
    compress: float
    wait: float
    decompress: float
    update: float
    wire: float | None
    hidden: float | None

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return self.compute + self.pack + self.compress + self.wait + self.decompress + self.update

    @property
    def overlap(self) -> float | None:
        """The share of ``wire`` that is ``hidden``; None if ``wire`` is None or 0."""
        return self.hidden / self.wire if self.wire and self.hidden is not None else None


def step_seconds(times: StepTimes, bytes_sent: int) -> StepSeconds:
    """Return the seconds of a step.

    Args:
        times: what the clock has measured of it.
        bytes_sent: by all of its collectives, that of ``check_finite`` among them.
    """
    seconds, moving = defaultdict(float, times.seconds), _moving(times.waited, bytes_sent)
    waiting = [(wait.start, wait.end) for wait in times.waited]
    return StepSeconds(
        compute=seconds["forward"] + seconds["backward"],
        **{phase: seconds[phase] for phase in ("pack", "compress", "wait", "decompress", "update")},
        wire=None if moving is None else covered(moving),
        hidden=None if moving is None else covered([*moving, *waiting]) - covered(waiting),
    )


def _moving(waited: list[Waited], bytes_sent: int) -> list[Interval] | None:
    """Return when each of the collectives moved data; None unless they are all of the step's, and known."""
    known = [wait.times[1:] for wait in waited if wait.times is not None]
    is_known = len(known) == len(waited) and sum(wait.bytes_sent for wait in waited) == bytes_sent
    return known if is_known else None


def covered(intervals: list[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
