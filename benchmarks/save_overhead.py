# SPDX-License-Identifier: Apache-2.0
"""What saving the job costs training on 2 ranks: a save every so many steps beside none, in turns.

    python benchmarks/save_overhead.py                     MNIST CNN, 64 images a rank, a save every 50 steps
    python benchmarks/save_overhead.py --block --every 20

Printed: the mean step of each round, which has one save, over that of a round without; the medians of both; and what
the step that saves and the one behind it, which is recorded anew, take.
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
    parser.add_argument("--rounds", type=int, default=20, help="rounds of both")
    parser.add_argument("--block", action="store_true", help="wait for the disk")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker)
        return
    print(f"{machine()}; {arguments.model}, {arguments.mode}, 64 images a rank, 1 thread a rank")
    with tempfile.TemporaryDirectory() as folder:

        def start(every: int) -> Group:
            run = [sys.executable, "-m", "singa_lite", "run", "-n", "2", __file__, "--worker"]
            options = [arguments.mode, arguments.model, str(every), str(arguments.block), folder]
            return Group([[*run, *options]], 1, 2)

        starts = {"no save": lambda: start(0), "saves": lambda: start(arguments.every)}
        times = time_interleaved(starts, arguments.rounds, arguments.every)
        size = sum(path.stat().st_size for path in Path(folder).glob("step-*/*"))
    means = {
        name: [statistics.mean(part) for part in chunks(values, arguments.every)]
        for name, values in times.items()
    }
    none, saves = (statistics.median(means[name]) for name in ("no save", "saves"))
    print(f"mean step of a round: no save {none:.3f} ms, saves {saves:.3f} ms: {saves / none:.4f}")
    parts = chunks(times["saves"], arguments.every)
    for number, what in ((0, "that saves"), (1, "behind it")):
        print(f"step {what}: {statistics.median(part[number] for part in parts):.3f} ms")
    print(f"{size} bytes on the disk in the generations kept; load {os.getloadavg()[0]:.1f}")


def chunks(values: list[float], size: int) -> list[list[float]]:
    """Return the rounds."""
    return [values[start : start + size] for start in range(0, len(values), size)]


def work(mode: str, model: str, every: str, block: str, folder: str) -> None:
    """Be one rank: the first step of each round saves."""
    from singa_lite import checkpoint

    step = our_step(mode, model, *batch(model, int(os.environ["SINGA_LITE_RANK"])), is_distributed=True)
    count = 0

    def saving() -> None:
        nonlocal count
        if int(every) and count and count % int(every) == 0:
            checkpoint.save_job(folder, step.func, block=block == "True")  # type: ignore[attr-defined]
        step()
        count += 1

    serve(saving)


if __name__ == "__main__":
    main()
