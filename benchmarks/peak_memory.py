# SPDX-License-Identifier: Apache-2.0
"""Peak memory of training beside PyTorch on the CPU: what a model and a few steps add to a process.

    python benchmarks/peak_memory.py                                       ResNet-18, batch 32, 5 steps
    python benchmarks/peak_memory.py --models resnet20 cnn --threads 1
    python benchmarks/peak_memory.py --torch-python ~/torch/bin/python     PyTorch installed elsewhere

Every mode is a process of its own. It imports its framework (all of it: PyTorch would import 75 MB more
later), makes the batch, and then reads VmHWM, the largest resident memory so far, of /proc/self/status; then
it builds the model, trains, and reads it again. The difference is printed in MB (10^6 bytes), with its ratio
to the smallest and to PyTorch's eager mode. compile counts what compiling takes in this process as well.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from interleaved import environment, machine
from steps import OURS, SHAPES, TORCH, batch, make_step

TIMEOUT_S = 900  # compiling for PyTorch takes minutes on a busy machine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["resnet18"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", choices=OURS + TORCH, default=OURS + TORCH)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        mode, model = arguments.worker
        print(json.dumps(measure(mode, model, arguments.steps)))
        return
    print(f"{machine()}; {arguments.steps} steps")
    print(
        f"{'model':8} {'batch':>5} {'threads':>7} {'mode':22} {'before MB':>9} {'added MB':>9} {'/ least':>8}"
        f" {'/ PyTorch eager':>15}"
    )
    for model in arguments.models:
        for threads in arguments.threads:
            report(model, threads, {mode: run(mode, model, threads, arguments) for mode in arguments.modes})


def run(mode: str, model: str, threads: int, arguments: argparse.Namespace) -> list[float] | None:
    """MB before and added by ``mode`` in a fresh process; None if it failed, which its own words explain."""
    python = arguments.torch_python if mode in TORCH else sys.executable
    command = [python, __file__, "--worker", mode, model, "--steps", str(arguments.steps)]
    job = subprocess.run(
        command, env=environment(threads), stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S
    )
    if job.returncode:
        print(f"{mode}: failed, left out (is PyTorch installed? see --torch-python)", file=sys.stderr)
        return None
    return json.loads(job.stdout.splitlines()[-1])


def measure(mode: str, model: str, steps: int) -> list[float]:
    """The worker: VmHWM before the model is built, and what it grew by, in MB."""
    if mode in TORCH:
        # the first optimizer would import it: 75 MB of code, not of training
        import torch._dynamo  # noqa: F401
    else:
        import singa_lite.layer
        import singa_lite.model
        import singa_lite.opt  # noqa: F401
    x, labels = batch(model)
    before = peak_mb()
    step = make_step(mode, model, x, labels)
    for _ in range(steps):
        step()
    return [before, peak_mb() - before]


def peak_mb() -> float:
    """The largest resident memory this process has had, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024e-6 for line in lines if line.startswith("VmHWM:"))


def report(model: str, threads: int, results: dict[str, list[float] | None]) -> None:
    found = {mode: result for mode, result in results.items() if result is not None}
    least = min(added for _, added in found.values()) if found else 0
    for mode, (before, added) in found.items():
        eager = f"{added / found['torch eager'][1]:15.2f}" if "torch eager" in found else ""
        print(
            f"{model:8} {SHAPES[model][0]:5} {threads:7} {mode:22} {before:9.0f} {added:9.1f} {added / least:8.2f}"
            f" {eager}",
            flush=True,
        )


if __name__ == "__main__":
    main()
