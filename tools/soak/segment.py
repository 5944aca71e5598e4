# SPDX-License-Identifier: Apache-2.0
"""Overwrite bytes of a shm world's memory while its ranks join and work: each must go on right or get a CommError.

    python -m tools.soak.segment --worlds 200 --seed 0

This process, of the same user, opens the segment while it still has a name and writes random bytes, zeros or ones at
random moments: into the header (the first page), the ranks' entries behind it, or the flight record at the end. Every
rank checks the values of every collective. A finding is a rank that a signal ends, that still runs LATE_S after its
time-outs, or that raises anything else, a file left in /dev/shm, and other values after damage of header or record. In
a rank's entry are its counters, which have no checksum: one that is a little too large lets others read too soon, and
those values are counted apart.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from singa_lite.comm.base import World
from singa_lite.comm.shm import ShmCommunicator
from singa_lite.errors import CommError

RANKS = 3
TIMEOUT_S = 1.5  # of joining, and of collectives
LATE_S = 15.0  # of a busy machine
STEPS = 30
PAGE, RANK_BYTES = 4096, 192  # of native/comm/segment.h: Header, RankBlock
SIZES = (3, 5000, 200_000)  # elements: one wait, two waits, several rounds
AREAS = ("header", "ranks", "record")


def expected(step: int, count: int) -> np.ndarray:
    """Return the sum of all ranks' arrays of a step, which is exact in float32."""
    return sum((array_of(rank, step, count).astype(np.float64) for rank in range(RANKS)), np.zeros(count))


def array_of(rank: int, step: int, count: int) -> np.ndarray:
    return ((np.arange(count) + 7 * step) % 1000 * (rank + 1)).astype(np.float32)


def work(connection: Connection, rendezvous_id: str, rank: int, may_join: Event, timeout_s: float) -> None:
    """Join, make collectives and send what came of them: "right", "error: ..." or "wrong: ..."."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the flight recorder's reports
    if rank != 0:
        may_join.wait(LATE_S)
    try:
        communicator = ShmCommunicator(World(rank, RANKS, rank, RANKS, rendezvous_id, "shm"), timeout_s)
        for step in range(STEPS):
            count = SIZES[step % len(SIZES)]
            array = array_of(rank, step, count)
            communicator.all_reduce(array, "sum", name=f"step {step}").wait()
            if not np.array_equal(array, expected(step, count)):
                connection.send(f"wrong: the sum of step {step}")
                return
            everyone = communicator.all_gather(array_of(rank, step, 5), name="gather").wait()
            if everyone is None or not np.array_equal(
                everyone, [array_of(each, step, 5) for each in range(RANKS)]
            ):
                connection.send(f"wrong: what was gathered in step {step}")
                return
        communicator.close()
        connection.send("right")
    except CommError as error:
        connection.send(f"error: {error}")


def segment_of(rendezvous_id: str) -> int:
    """Return a descriptor of a world's segment, as soon as it is there and has its size."""
    path, end = f"/dev/shm/singa_lite-{rendezvous_id}", time.monotonic() + LATE_S
    while time.monotonic() < end:
        try:
            found = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        while os.fstat(found).st_size == 0 and time.monotonic() < end:
            pass
        return found
    raise SystemExit(f"{path} has not come")


def place_in(area: str, size: int, rng: random.Random) -> tuple[int, int]:
    """Return where to write and how many bytes."""
    if area == "header":
        start = rng.choice([0, 8, 16, 20, 24, 32, 36, 40, rng.randrange(PAGE - 8)])
        return start, min(PAGE - start, rng.choice([1, 4, 8, 64, PAGE]))
    if area == "ranks":
        start = PAGE + rng.randrange(RANKS * RANK_BYTES)
        return start, min(PAGE + RANKS * RANK_BYTES - start, rng.choice([1, 4, 8, 64, 192]))
    start = size - rng.randrange(1, 60_000)
    return start, min(size - start, rng.choice([1, 8, 64, 2000]))


def damage(found: int, area: str, rng: random.Random, end: float) -> None:
    """Write some times until ``end``."""
    for _ in range(rng.choice([1, 1, 3, 20])):
        start, count = place_in(area, os.fstat(found).st_size, rng)
        content = rng.choice([rng.randbytes(count), rng.randbytes(count), bytes(count), b"\xff" * count])
        os.pwrite(found, content, start)
        time.sleep(max(0.0, min(rng.choice([0.0, 0.0005, 0.005]), end - time.monotonic())))


def run_world(area: str, rng: random.Random, timeout_s: float) -> list[str]:
    """Start a world, damage its memory, and return what came of each rank."""
    context, rendezvous_id = multiprocessing.get_context("fork"), f"soak{secrets.token_hex(8)}"
    pipes, may_join = [context.Pipe(duplex=False) for _ in range(RANKS)], context.Event()
    ranks = [
        context.Process(target=work, args=(pipe[1], rendezvous_id, rank, may_join, timeout_s), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    found = segment_of(rendezvous_id)
    end = time.monotonic() + 2 * timeout_s + LATE_S
    if rng.random() < 0.3:
        damage(found, area, rng, end)
        may_join.set()
    else:
        may_join.set()
        time.sleep(rng.uniform(0.0, 0.05))
        damage(found, area, rng, end)
    outcomes = []
    for process, (here, there) in zip(ranks, pipes, strict=True):
        process.join(max(0.0, end - time.monotonic()))
        there.close()
        if process.exitcode is None:
            process.kill()
            process.join()
            outcomes.append("hang")
        elif process.exitcode != 0:
            code = process.exitcode
            outcomes.append(f"ended: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}")
        else:
            outcomes.append(here.recv())
        here.close()
    os.close(found)
    for left in Path("/dev/shm").glob(f"*{rendezvous_id}*"):
        left.unlink()
        outcomes.append(f"left: {left.name.removesuffix(rendezvous_id)}")
    return outcomes


def soak(
    num_worlds: int, seed: int, timeout_s: float = TIMEOUT_S
) -> tuple[dict[str, Counter[str]], list[str]]:
    """Return for each area how many ranks ended in which way, and the findings."""
    counts: dict[str, Counter[str]] = {area: Counter() for area in AREAS}
    findings = []
    for number in range(num_worlds):
        area = AREAS[number % len(AREAS)]
        for rank, outcome in enumerate(run_world(area, random.Random(f"{seed}/{number}"), timeout_s)):
            kind = outcome.partition(":")[0]
            counts[area][kind] += 1
            if kind not in ("right", "error") and (kind, area) != ("wrong", "ranks"):
                findings.append(f"world {number}, {area}, rank {rank}: {outcome}")
    return counts, findings


def main() -> int:
    parser = argparse.ArgumentParser(description="Overwrite bytes of a shm world's memory")
    parser.add_argument("--worlds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    counts, findings = soak(given.worlds, given.seed)
    for area, ways in counts.items():
        print(f"{area}: {', '.join(f'{count} ranks {kind}' for kind, count in sorted(ways.items()))}")
    print(*findings, f"{given.worlds} worlds, {len(findings)} findings", sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
