# SPDX-License-Identifier: Apache-2.0
"""What recording each collective costs 2 ranks over shared memory: an all-reduce of 4 KB, and a training step.

    python benchmarks/flight_recorder.py                   both; MNIST CNN, 64 images a rank, recorded steps
    python benchmarks/flight_recorder.py --mode eager

Ranks with and without the flight recorder (SINGA_LITE_FLIGHT_RECORDER) take turns in one run; those that wait sleep.
Printed: both medians, their ratio, and their difference for each all-reduce in microseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
from interleaved import Group, machine, serve, time_interleaved
from steps import batch, our_step

from singa_lite.comm.rendezvous import process_communicator

BYTES = 4096
CALLS = 200  # all-reduces in what is timed as one step
LIMITS = {"all_reduce": 1.05, "step": 1.01}  # of the ratio


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--mode", choices=["graph", "eager"], default="graph")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of both")
    parser.add_argument("--steps", type=int, default=20, help="steps in a round")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker)
        return
    print(f"{machine()}; 2 ranks, {arguments.model}, {arguments.mode}, 64 images a rank, 1 thread a rank")
    for what in LIMITS:
        starts: dict[str, Callable[[], Group]] = {
            switch: partial(start, switch, what, arguments.mode, arguments.model) for switch in ("off", "on")
        }
        times = time_interleaved(starts, arguments.rounds, arguments.steps)
        report(what, *(statistics.median(times[switch]) for switch in ("off", "on")))
    print(f"load {os.getloadavg()[0]:.1f}")


def start(switch: str, *what: str) -> Group:
    """Start two ranks that record, or do not."""
    run = [sys.executable, "-m", "singa_lite", "run", "-n", "2", __file__, "--worker", *what]
    return Group([["env", f"SINGA_LITE_FLIGHT_RECORDER={switch}", *run]], 1, 2)


def report(what: str, off: float, on: float) -> None:
    """Print the medians of one thing in ms."""
    ratio, limit = on / off, LIMITS[what]
    if what == "all_reduce":
        off, on = 1e3 * off / CALLS, 1e3 * on / CALLS
        print(
            f"all_reduce of {BYTES} bytes: off {off:.3f} us, on {on:.3f} us ({on - off:+.3f} us): {ratio:.4f}"
        )
    else:
        print(f"step: off {off:.3f} ms, on {on:.3f} ms: {ratio:.4f}")
    print(f"  {'within' if ratio <= limit else 'ABOVE'} {limit}")


def work(what: str, mode: str, model: str) -> None:
    """Be one rank."""
    if what == "step":
        rank = int(os.environ["SINGA_LITE_RANK"])
        serve(our_step(mode, model, *batch(model, rank), is_distributed=True))
        return
    communicator = process_communicator()
    array = np.zeros(BYTES // 4, np.float32)

    def calls() -> None:
        for _ in range(CALLS):
            communicator.all_reduce(array, "sum", name="small").wait()

    serve(calls)


if __name__ == "__main__":
    main()
