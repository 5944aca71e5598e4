# SPDX-License-Identifier: Apache-2.0
"""What one rank of `singa-lite bench allreduce` does: time collectives, and, on rank 0, write down what was measured.

Starting ranks and the table are in allreduce.py.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..comm.base import HAS_BLOCKS, Communicator
from ..comm.link_communicator import LinkCommunicator
from ..comm.rendezvous import process_communicator
from ..comm.work import Work
from ..errors import CommError
from ..files import atomic_file

BUDGET_S = 0.2  # of the calls of one size in a round
LEAST_CALLS, MOST_CALLS = 5, 500
WARM_UP = 3
SUMS = ("all_reduce", "reduce", "reduce_scatter")


@dataclass(frozen=True)
class Task:
    """The measurements of one world.

    Attributes:
        transport: that of the world.
        ranks: >= 2.
        link: the emulated link of each rank; None: the real ones.
        collectives: names of methods of Communicator.
        sizes: bytes of the float32 array that a rank gives.
        rounds: how often each is measured, interleaved with the others.
    """

    transport: str
    ranks: int
    link: str | None
    collectives: Sequence[str]
    sizes: Sequence[int]
    rounds: int


def main(task: str, result: str) -> None:
    """Measure as one rank of the world that the environment names.

    Args:
        task: a Task as JSON.
        result: the file that rank 0 writes a list of objects to, as JSON: collective, bytes, bytes_sent of a call, and
            of each round the calls and the seconds of one.

    Raises:
        CommError: the world has another transport or size, as where mpiexec belongs to another MPI.
    """
    given = Task(**json.loads(task))
    communicator = process_communicator()
    world = communicator.world
    if (world.transport, world.size) != (given.transport, given.ranks):
        raise CommError(
            f"bench allreduce: this world has {world.size} ranks over {world.transport}, expected {given.ranks} over "
            f"{given.transport}; `singa-lite info` lists what works here"
        )
    cases = [(kind, _array(kind, size, world.size)) for kind in given.collectives for size in given.sizes]
    rounds = [[_measure(communicator, kind, array) for kind, array in cases] for _ in range(given.rounds)]
    rows = [
        _row(kind, array, times)
        for (kind, array), times in zip(cases, zip(*rounds, strict=True), strict=True)
    ]
    if world.rank == 0:
        with atomic_file(Path(result)) as file:
            file.write(json.dumps(rows).encode())


def _array(kind: str, num_bytes: int, size: int) -> np.ndarray:
    """Return the float32 array that a rank gives: of ``num_bytes``, or a little more where it needs a block a rank."""
    count = max(1, num_bytes // 4)
    return np.zeros(-(-count // size) * size if kind in HAS_BLOCKS else count, np.float32)


def _measure(communicator: Communicator, kind: str, array: np.ndarray) -> tuple[float, int, int]:
    """Return the median over calls of the slowest rank's seconds, the calls, and the bytes sent in one.

    A call is timed from the end of a barrier before it.
    """
    operation = ("sum",) if kind in SUMS else ()
    start_call = partial(getattr(communicator, kind), array, *operation)
    seconds = _slowest(communicator, start_call, WARM_UP)
    calls = int(min(MOST_CALLS, max(LEAST_CALLS, BUDGET_S / max(1e-9, seconds[-1]))))  # equal on all ranks
    before = communicator.traffic.bytes_sent
    start_call().wait()
    sent = communicator.traffic.bytes_sent - before
    return statistics.median(_slowest(communicator, start_call, calls)), calls, sent


def _slowest(communicator: Communicator, start_call: Callable[[], Work], calls: int) -> list[float]:
    """Return of each call the seconds of the slowest rank, on all ranks."""
    # over the memory of the host: a barrier over a slow link would take longer than the call
    host = communicator.host if isinstance(communicator, LinkCommunicator) else communicator
    seconds = np.empty(calls)
    for number in range(calls):
        host.barrier()
        start = time.perf_counter()
        start_call().wait()
        seconds[number] = time.perf_counter() - start
    host.all_reduce(seconds, "max").wait()
    return [float(value) for value in seconds]


def _row(kind: str, array: np.ndarray, rounds: Sequence[tuple[float, int, int]]) -> dict[str, Any]:
    return {
        "collective": kind,
        "bytes": array.nbytes,
        "bytes_sent": rounds[0][2],
        "calls": [calls for _, calls, _ in rounds],
        "seconds": [seconds for seconds, _, _ in rounds],
    }
