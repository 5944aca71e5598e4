# SPDX-License-Identifier: Apache-2.0
"""What saving the job costs training on 2 ranks: rounds of steps with one save beside rounds without, in turns.

    python benchmarks/save_overhead.py                     MNIST CNN, 64 images a rank, a save every 50 steps
    python benchmarks/save_overhead.py --block --every 20

Both kinds of rounds are of one job, as two jobs of the same program differ by some percent. Printed: the median over
the rounds of each step of a round, summed, for both kinds, and their ratio; the same of the mean step of a round, which
disturbances of the machine are in; and what the step that saves and those behind it take.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from interleaved import Group, machine, serve, time_interleaved
from steps import batch, our_step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--mode", choices=["graph", "eager"], default="graph")
    parser.add_argument("--every", type=int, default=50, help="steps from save to save")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each kind")
    parser.add_argument("--block", action="store_true", help="wait for the disk")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker)
        return
    print(f"{machine()}; {arguments.model}, {arguments.mode}, 64 images a rank, 1 thread a rank")
    with tempfile.TemporaryDirectory() as folder:

        def start() -> Group:
            run = [sys.executable, "-m", "singa_lite", "run", "-n", "2", __file__, "--worker"]
            options = [arguments.mode, arguments.model, str(arguments.every), str(arguments.block), folder]
            return Group([[*run, *options]], 1, 2)

        [times] = time_interleaved({"job": start}, 2 * arguments.rounds, arguments.every).values()
        size = sum(path.stat().st_size for path in Path(folder).glob("step-*/*"))
    rounds = [times[begin : begin + arguments.every] for begin in range(0, len(times), arguments.every)]
    saves, none = rounds[0::2], rounds[1::2]  # the first round, which counts for nothing, had none
    sums = [sum(map(statistics.median, zip(*part, strict=True))) for part in (none, saves)]
    print(
        f"a round by medians of its steps: no save {sums[0]:.2f} ms, saves {sums[1]:.2f} ms: {sums[1] / sums[0]:.4f}"
    )
    means = [statistics.median(map(statistics.mean, part)) for part in (none, saves)]
    print(
        f"mean step of a round: no save {means[0]:.3f} ms, saves {means[1]:.3f} ms: {means[1] / means[0]:.4f}"
    )
    for number, what in enumerate(("first", "second", "third", "fourth")[: arguments.every]):
        both = [statistics.median(part[number] for part in each) for each in (none, saves)]
        print(f"{what} step: no save {both[0]:.3f} ms, saves {both[1]:.3f} ms")
    print(f"{size} bytes on the disk in the generations kept; load {os.getloadavg()[0]:.1f}")


def work(mode: str, model: str, every: str, block: str, folder: str) -> None:
    """Be one rank: the first step of every other round saves."""
    from singa_lite import checkpoint
    from singa_lite.model import Model

    step = our_step(mode, model, *batch(model, int(os.environ["SINGA_LITE_RANK"])), is_distributed=True)
    network = step.func
    assert isinstance(network, Model)
    count = 0

    def saving() -> None:
        nonlocal count
        if count % (2 * int(every)) == int(every):
            checkpoint.save_job(folder, network, block=block == "True")
        step()
        count += 1

    serve(saving)


if __name__ == "__main__":
    main()
