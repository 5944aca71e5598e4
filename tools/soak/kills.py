# SPDX-License-Identifier: Apache-2.0
"""Kill training at random moments, let it go on, and compare the end with that of a run that nobody disturbed.

    python -m tools.soak.kills --kills 300

A kill is SIGKILL of a random rank or of the launcher, at a random moment from the first step to the last, so also while
a checkpoint is written. After each the job must have a whole generation, or none before the first save, and goes on to
the same bits on all ranks. Every dist_option runs eagerly and recorded, and a Trainer of a key-value store without and
with a server, with saves that block and that do not.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from singa_lite.checkpoint.rank_arrays import read_rank, read_shared
from singa_lite.generation import find_generations
from tests.checkpoint.job_net import OPTIONS

SCRIPT = Path(__file__).with_name("train.py")
LIMIT_S = 300.0  # a job that takes longer hangs


@dataclass(frozen=True)
class Kind:
    """What runs: a dist_option, or "store", a Trainer, with a server where ``graph`` is set."""

    option: str
    graph: bool
    ranks: int
    no_block: bool

    def command(self, folder: Path, result: Path, steps: int, *options: str) -> list[str]:
        """Return the command line of the job; ``options`` are the launcher's."""
        flags = ["--no-block"] * self.no_block
        servers = ["-s", "1"] if self.graph and self.option == "store" else []
        flags += ["--graph"] * (self.graph and self.option != "store")
        start = [sys.executable, "-m", "singa_lite", "run", "-n", str(self.ranks), *servers, *options]
        given = [str(SCRIPT), str(folder), str(result), "--dist-option", self.option, "--steps", str(steps)]
        return [*start, *given, *flags]


def modes() -> Iterator[tuple[str, bool]]:
    """Yield every dist_option, eager and recorded, and a Trainer without and with a server, for ever."""
    return itertools.cycle(itertools.product([*OPTIONS, "store"], (False, True)))


def kinds() -> Iterator[Kind]:
    """Yield kinds of all modes for ever, with 2 and 3 ranks in turn."""
    for number, (option, graph) in enumerate(modes()):
        yield Kind(option, graph, 2 + number % 2, no_block=number // 2 % 2 == 1)


def finish(kind: Kind, folder: Path, steps: int) -> tuple[list[str], float, str]:
    """Run the job to its end; return the ranks' hashes, the seconds from its first step, and its output."""
    result = folder.with_name(folder.name + "-result")
    with Running(kind, folder, result, steps) as job:
        started = job.wait_for("training from")
        end = job.wait_for("trained")
        output = job.rest()
        if job.process.returncode != 0:
            raise SystemExit(f"{kind}: the job ended with {job.process.returncode}:\n{output}")
    hashes = [Path(f"{result}-{rank}").read_text() for rank in range(kind.ranks)]
    return hashes, end - started, output


class Running:
    """A job that runs; leaving the block ends it."""

    def __init__(self, kind: Kind, folder: Path, result: Path, steps: int) -> None:
        self.process = subprocess.Popen(
            kind.command(folder, result, steps),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()

    def wait_for(self, text: str) -> float:
        """Return when the first line with ``text`` came, or the output ended."""
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.append(line)
            if text in line:
                break
        return time.monotonic()

    def rest(self) -> str:
        """Wait for the end; return all output."""
        text, _ = self.process.communicate(timeout=LIMIT_S)
        return "".join(self._lines) + text

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks that run."""
        text = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", SCRIPT.name], capture_output=True, text=True
        )
        return [int(word) for word in text.stdout.split()]


def kill_one(kind: Kind, folder: Path, steps: int, span: float, rng: random.Random) -> str:
    """Start the job and kill one of its processes; return which, "" if it had ended before."""
    with Running(kind, folder, folder.with_name(folder.name + "-killed"), steps) as job:
        job.wait_for("training from")
        time.sleep(rng.uniform(0.0, span))
        ranks = job.ranks()
        if not ranks:
            return ""
        victim = rng.choice([job.process.pid, *ranks])
        try:
            subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(victim)], stderr=subprocess.DEVNULL)
            job.rest()
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{kind}: HANG after a kill") from None
        return "launcher" if victim == job.process.pid else "rank"


def check_whole(kind: Kind, folder: Path) -> int:
    """Return the step of the newest generation, 0 without one; SystemExit if what counts is not whole."""
    found, problems = find_generations(folder)
    if problems:
        raise SystemExit(f"{kind}: {problems}")
    for generation in found:
        read_shared(generation)
        for rank in range(kind.ranks):
            read_rank(generation, rank)
    return found[0].manifest.step if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill training at random moments")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    wanted: dict[Kind, tuple[list[str], float]] = {}
    counts = {"rank": 0, "launcher": 0}
    resumed_from: dict[int, int] = {}
    with tempfile.TemporaryDirectory(prefix="singa_lite-kills-") as name:
        for number, kind in enumerate(itertools.islice(kinds(), arguments.kills)):
            folder = Path(name) / "job"
            if kind not in wanted:
                hashes, seconds, _ = finish(kind, folder, arguments.steps)
                wanted[kind] = hashes, seconds
                shutil.rmtree(folder)
            hashes, seconds = wanted[kind]
            while not (victim := kill_one(kind, folder, arguments.steps, seconds, rng)):
                shutil.rmtree(folder)
            counts[victim] += 1
            step = check_whole(kind, folder)
            resumed_from[step] = resumed_from.get(step, 0) + 1
            found, _, output = finish(kind, folder, arguments.steps)
            if found != hashes or not re.search(rf"training from {step}\b", output):
                raise SystemExit(f"{kind}: another end after a kill, gone on from {step}:\n{output}")
            shutil.rmtree(folder)
            print(f"{number + 1} of {arguments.kills}: {kind}, gone on from step {step}", flush=True)
    print(f"killed: {counts}; gone on from step: {dict(sorted(resumed_from.items()))}")
    print(f"{arguments.kills} of {arguments.kills} ended with the bits of the undisturbed run")


if __name__ == "__main__":
    main()
