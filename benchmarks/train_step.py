# SPDX-License-Identifier: Apache-2.0
"""Time of a training step beside PyTorch on the CPU: same model, batch, optimizer and threads, in one run.

    python benchmarks/train_step.py                                       1 and 2 threads, all models
    python benchmarks/train_step.py --models cnn --threads 1 --rounds 40
    python benchmarks/train_step.py --torch-python ~/torch/bin/python     PyTorch installed elsewhere
    python benchmarks/train_step.py --threads 2 --busy 1                  beside another process that always runs

Every mode is a process of its own; all do a few steps in interleaved rounds, so that all see the machine in the
same state; the first round, in which graphs are recorded and compiled, is not counted. A step is forward, loss,
backward and SGD with momentum 0.9 and weight decay. Printed: median and mean step time, and the median of each of our
modes as a share of PyTorch's eager and best mode. "bf16" and "torch autocast" are mixed precision in bfloat16.
torch.compile needs a C++ compiler.
"""

import argparse
import os
import statistics
import sys

from interleaved import Group, busy_processes, machine, serve, time_interleaved
from steps import OURS, SHAPES, TORCH, batch, make_step

HINT = " (is PyTorch installed? see --torch-python)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", choices=OURS + TORCH, default=OURS + TORCH)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of every mode")
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    parser.add_argument(
        "--busy", type=int, default=0, help="other processes, each of which takes a core if it can"
    )
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        mode, model = arguments.worker
        serve(make_step(mode, model, *batch(model)))
        return
    print(machine())
    print(
        f"{'model':8} {'batch':>5} {'threads':>7} {'mode':22} {'median ms':>9} {'mean ms':>9} "
        f"{'/ eager':>8} {'/ best':>8}  (of PyTorch)",
        flush=True,
    )
    for model in arguments.models:
        for threads in arguments.threads:
            with busy_processes(arguments.busy):
                report(model, threads, measure(model, threads, arguments))


def measure(model: str, threads: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """{mode: step times in ms}; the modes are interleaved."""

    def start(mode: str) -> Group:
        python = arguments.torch_python if mode in TORCH else sys.executable
        return Group([[python, __file__, "--worker", mode, model]], threads)

    starts = {mode: lambda mode=mode: start(mode) for mode in arguments.modes}
    return time_interleaved(starts, arguments.rounds, arguments.steps, HINT)


def report(model: str, threads: int, times: dict[str, list[float]]) -> None:
    medians = {mode: statistics.median(values) for mode, values in times.items()}
    theirs = {mode: medians[mode] for mode in TORCH if mode in medians}
    for mode, median in medians.items():
        shares = ""
        if mode in OURS and theirs:
            eager = f"{median / theirs['torch eager']:8.2f}" if "torch eager" in theirs else " " * 8
            shares = f"{eager} {median / min(theirs.values()):8.2f}"
        row = f"{model:8} {SHAPES[model][0]:5} {threads:7} {mode:22} {median:9.2f}"
        print(f"{row} {statistics.mean(times[mode]):9.2f} {shares}")
    print(f"{'':8} load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
