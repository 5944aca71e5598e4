# SPDX-License-Identifier: Apache-2.0
"""How far the clocks of ranks on other hosts are from rank 0's, measured by messages there and back.

Note [offset]: rank 0 sends at t0, the other rank answers with its time t1, and the answer is there at t2. If both ways
took equally long, the other clock showed t1 at (t0 + t2) / 2; however they were divided, that is wrong by (t2 - t0) / 2
at most. Of several such round trips the shortest counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from .base import Communicator
from .host import this_host

NUM_ROUNDS = 16


class Offset(NamedTuple):
    """A rank's clock compared with rank 0's.

    Attributes:
        at: when it was measured, in seconds of rank 0's clock.
        offset_s: the rank's clock minus rank 0's.
        error_s: the offset is wrong by no more.
    """

    at: float
    offset_s: float
    error_s: float


def pairs_with_rank_0(communicator: Communicator) -> dict[int, Communicator]:
    """Make a communicator of rank 0 with each rank on another host, which all ranks must call.

    Returns:
        By that rank: all of them on rank 0, its own on that rank, none on the others.
    """
    hosts = communicator.all_gather_object(this_host(), name="hosts of a trace")
    found = {}
    for rank, host in enumerate(hosts):
        if host != hosts[0]:
            pair = communicator.new_group([0, rank], name=f"clock of rank {rank}")
            if pair is not None:
                found[rank] = pair
    return found


def measure_offset(
    pair: Communicator, clock: Callable[[], float] = perf_counter, timeout_s: float | None = None
) -> Offset | None:
    """Compare the clocks of the two ranks of ``pair``, which both must call; None on the second, see Note [offset].

    Raises:
        CommError: the other rank is gone, or has not called it within ``timeout_s`` (None: that of ``pair``).
    """
    message, best = np.zeros(1), Offset(0.0, 0.0, math.inf)
    if timeout_s is not None:
        pair.timeout_s = timeout_s  # of calls that wait themselves
    for _ in range(NUM_ROUNDS):
        start = clock()
        pair.broadcast(message, 0, name="there").wait(timeout_s)
        message[0] = clock()
        pair.broadcast(message, 1, name="back").wait(timeout_s)
        end = clock()
        measured = Offset(end, float(message[0]) - (start + end) / 2, (end - start) / 2)
        best = min(best, measured, key=lambda offset: offset.error_s)
    return best if pair.rank == 0 else None


def offset_at(offsets: Sequence[Offset], now: float) -> float:
    """Return the offset at a time of a rank: between measurements by a straight line, else the nearest one.

    Args:
        offsets: of a rank, at least one, in the order of time.
        now: seconds of the rank's own clock, which may have begun long before or after rank 0's.
    """
    shown = [one.at + one.offset_s for one in offsets]  # by the rank's clock, when each was measured
    return float(np.interp(now, shown, [one.offset_s for one in offsets]))
