# SPDX-License-Identifier: Apache-2.0
"""Train examples/train_mnist.py on 4 ranks, then 2, 3 and 4 in one run, and compare its accuracy with that of 4 ranks.

    python -m tools.soak.resize
    python -m tools.soak.resize --epochs 2 --seeds 0

The job is asked to stop within an epoch, as a batch system does it (SIGTERM to the launcher): all ranks save and end
with 0, and it goes on with another number of ranks. A batch has 192 images whatever the number. Printed: both
accuracies of each seed, their means and the difference in points.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from singa_lite.generation import find_generations

SCRIPT = Path("examples/train_mnist.py")
GLOBAL_BATCH, IMAGES = 192, 60_000
SIZES = (4, 2, 3, 4)
LIMIT_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Change the number of ranks while a job trains")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--dist-option", default="fp32")
    arguments = parser.parse_args()
    plain, resized = [], []
    for seed in arguments.seeds.split(","):
        given = ["--epochs", str(arguments.epochs), "--seed", seed, "--dist-option", arguments.dist_option]
        with tempfile.TemporaryDirectory(prefix="singa_lite-resize-") as name:
            plain.append(accuracy(run(4, Path(name) / "plain", given)))
            resized.append(accuracy(changing(Path(name) / "resized", given, arguments.epochs)))
        print(f"seed {seed}: 4 ranks {plain[-1]:.2f} %, {SIZES} ranks {resized[-1]:.2f} %", flush=True)
    means = statistics.mean(plain), statistics.mean(resized)
    print(f"means: {means[0]:.3f} and {means[1]:.3f} %: {means[1] - means[0]:+.3f} points")


def changing(folder: Path, given: list[str], epochs: int) -> str:
    """Train with each number of ranks for an equal share of the steps; return the last output."""
    steps = epochs * -(-IMAGES // GLOBAL_BATCH)
    for number, size in enumerate(SIZES[:-1]):
        stop_at = steps * (number + 1) // len(SIZES)
        text = run(size, folder, given, stop_at)
        [stopped] = re.findall(r"Stopped at step (\d+)", text)
        print(f"  {size} ranks until step {stopped} of {steps}", flush=True)
    return run(SIZES[-1], folder, given)


def run(size: int, folder: Path, given: list[str], stop_at: int | None = None) -> str:
    """Run the job, and ask it to stop once a generation of step ``stop_at`` is there; return its output."""
    command = [
        sys.executable,
        "-m",
        "singa_lite",
        "run",
        "-n",
        str(size),
        "--checkpoint",
        str(folder),
        str(SCRIPT),
    ]
    command += [
        "--batch-size",
        str(GLOBAL_BATCH // size),
        "--save-every",
        "20",
        "--out",
        str(folder.parent),
        *given,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while stop_at is not None and process.poll() is None and newest(folder) < stop_at:
            time.sleep(0.02)
        if stop_at is not None:
            process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=LIMIT_S)
    if process.returncode != 0:
        raise SystemExit(f"{size} ranks ended with {process.returncode}:\n{text}")
    return text


def newest(folder: Path) -> int:
    """Return the step of the newest generation, 0 without one."""
    found, _ = find_generations(folder)
    return found[0].manifest.step if found else 0


def accuracy(text: str) -> float:
    """Return the last test accuracy that was printed, in %."""
    return 100 * float(re.findall(r"Evaluation accuracy = ([\d.]+)", text)[-1])


if __name__ == "__main__":
    main()
