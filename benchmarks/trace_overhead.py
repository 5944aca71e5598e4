# SPDX-License-Identifier: Apache-2.0
"""What `singa-lite run --trace` costs a step of 2 ranks, how much of a step its events cover, and how well ranks agree.

    python benchmarks/trace_overhead.py                    MNIST CNN, 64 images a rank, recorded steps
    python benchmarks/trace_overhead.py --mode eager

Traced and untraced ranks take turns in one run; those that wait sleep. Printed: the ratio of median step times; the
share of a step, from the call to its return, that the host's events cover, the median of each rank; and how far apart
ranks saw the end of the same collective, the median and the share within 0.2 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from interleaved import Group, machine, serve, time_interleaved
from steps import batch, our_step

WALLS = (
    "BENCHMARK_WALLS"  # the environment variable with the folder for the steps' times, of the traced ranks
)
CLOSE_MS = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--mode", choices=["graph", "eager"], default="graph")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of both")
    parser.add_argument("--steps", type=int, default=20, help="steps in a round")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker)
        return
    print(f"{machine()}; {arguments.model}, {arguments.mode}, 64 images a rank, 1 thread a rank")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[WALLS] = folder
        file = Path(folder) / "trace.json"

        def start(*options: str) -> Group:
            run = [sys.executable, "-m", "singa_lite", "run", "-n", "2", *options]
            return Group([[*run, __file__, "--worker", arguments.mode, arguments.model]], 1, 2)

        starts = {"untraced": start, "traced": lambda: start("--trace", str(file))}
        times = time_interleaved(starts, arguments.rounds, arguments.steps)
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratio = medians["traced"] / medians["untraced"]
        print(f"step: untraced {medians['untraced']:.3f} ms, traced {medians['traced']:.3f} ms: {ratio:.4f}")
        report(json.loads(file.read_bytes())["traceEvents"], Path(folder))
    print(f"load {os.getloadavg()[0]:.1f}")


def report(events: list[dict[str, Any]], folder: Path) -> None:
    """Print what share of the steps the events cover, and how far apart the ends of collectives are."""
    covered: dict[tuple[int, int], float] = defaultdict(float)
    ends: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    counts: dict[tuple[int, int, str], int] = defaultdict(int)
    for event in events:
        if event["ph"] != "X":
            continue
        rank, step = event["pid"], event["args"]["step"]
        if "bytes_sent" not in event["args"]:
            covered[rank, step] += event["dur"] / 1e3
        elif not event["name"].startswith("waits"):
            name = event["args"]["of"]
            counts[rank, step, name] += 1
            ends[step, name, counts[rank, step, name]].append((event["ts"] + event["dur"]) / 1e3)
    shares = []
    for rank in range(2):
        walls = json.loads((folder / f"{rank}.json").read_bytes())
        known = [covered[rank, step] / wall for step, wall in enumerate(walls, 1) if (rank, step) in covered]
        shares.append(statistics.median(known))
        print(f"rank {rank}: events cover {100 * shares[-1]:.2f} % of a step, {len(known)} steps")
    apart = [max(both) - min(both) for both in ends.values() if len(both) == 2]
    close = sum(gap <= CLOSE_MS for gap in apart) / len(apart)
    print(
        f"ends of {len(apart)} collectives: {statistics.median(apart):.4f} ms apart in the median, "
        f"{100 * close:.1f} % within {CLOSE_MS} ms"
    )


def work(mode: str, model: str) -> None:
    """Be one rank."""
    rank = int(os.environ["SINGA_LITE_RANK"])
    step = our_step(mode, model, *batch(model, rank), is_distributed=True)
    walls = []

    def timed() -> None:
        begin = time.perf_counter()
        step()
        walls.append(1e3 * (time.perf_counter() - begin))

    serve(timed)
    if "SINGA_LITE_TRACE" in os.environ:
        (Path(os.environ[WALLS]) / f"{rank}.json").write_text(json.dumps(walls))


if __name__ == "__main__":
    main()
