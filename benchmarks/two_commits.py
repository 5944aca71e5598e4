# SPDX-License-Identifier: Apache-2.0
"""Time of a recorded training step in this checkout beside another one: before and after a change, in one run.

    git worktree add ~/before COMMIT && make -C ~/before .venv-test/installed
    python benchmarks/two_commits.py ~/before                                  1 thread, and 2 ranks of the CNN
    python benchmarks/two_commits.py ~/before --models mlp --rounds 42

Each checkout runs with the Python of its ``.venv-test``; all processes are interleaved, and the first round is not
counted. The processes are started several times, every second time in the other order, as where a process has its
memory changes its steps by a few per cent for as long as it runs. So does the name of a checkout's folder: give both
names of one length, and run again with the two exchanged. Printed: median step times, this checkout's as a share of the
other's, and the same of the imports of a script that trains.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
from functools import partial
from pathlib import Path

from import_time import TIMED, WHOLE
from interleaved import Group, machine, time_interleaved
from steps import SHAPES

HERE = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--models", nargs="*", choices=SHAPES, default=["cnn", "mlp", "resnet20", "resnet18"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--ranks", type=int, default=2, help="of the CNN by DistOpt; 0 leaves that out")
    parser.add_argument("--rounds", type=int, default=24, help="rounds that count, of all starts together")
    parser.add_argument("--starts", type=int, default=6, help="how often both are started, an even number")
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    arguments = parser.parse_args()
    print(machine(), flush=True)
    for model in arguments.models:
        for threads in arguments.threads:
            report(f"{model}, {threads} threads", partial(alone, model, threads), arguments)
    if arguments.ranks:
        report(f"cnn, {arguments.ranks} ranks", partial(together, arguments.ranks), arguments)
    times: dict[str, list[float]] = {"before": [], "now": []}
    for _ in range(arguments.rounds):
        for name, folder in (("before", arguments.before), ("now", HERE)):
            times[name].append(import_ms(folder))
    show("import", times)
    print(machine())


def python_of(checkout: Path) -> str:
    return str(checkout.resolve() / ".venv-test" / "bin" / "python")


def alone(model: str, threads: int, checkout: Path) -> Group:
    script = str(checkout.resolve() / "benchmarks" / "train_step.py")
    return Group([[python_of(checkout), script, "--worker", "graph", model]], threads)


def together(ranks: int, checkout: Path) -> Group:
    script = str(checkout.resolve() / "benchmarks" / "train_step_2_ranks.py")
    run = [str(Path(python_of(checkout)).with_name("singa-lite")), "run", "-n", str(ranks)]
    return Group([[*run, script, "--worker", "graph", "cnn", "ours", str(ranks)]], 1, ranks)


def import_ms(checkout: Path) -> float:
    command = [python_of(checkout), "-I", "-c", TIMED.format(WHOLE)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


def report(name: str, start: partial[Group], arguments: argparse.Namespace) -> None:
    starts = {"before": partial(start, arguments.before), "now": partial(start, HERE)}
    times: dict[str, list[float]] = {"before": [], "now": []}
    for number in range(arguments.starts):
        order = sorted(starts, reverse=bool(number % 2))  # what starts second is 1 to 2 % slower
        rounds = max(1, arguments.rounds // arguments.starts)
        found = time_interleaved({each: starts[each] for each in order}, rounds, arguments.steps)
        for each, values in found.items():
            times[each] += values
    show(name, times)


def show(name: str, times: dict[str, list[float]]) -> None:
    before, now = (statistics.median(times[name]) for name in ("before", "now"))
    print(f"{name:22} before {before:9.2f} ms  now {now:9.2f} ms  ratio {now / before:.3f}", flush=True)


if __name__ == "__main__":
    main()
