# SPDX-License-Identifier: Apache-2.0
"""Let ranks of a job fail in every way, under --max-restarts, and compare the end with that of an undisturbed run.

    python -m tools.soak.faults --minutes 30
    python -m tools.soak.faults --faults 50

Each job has one fault, of the kinds in train.py, on a random rank at a random step; dist_options, eager and recorded
steps, 2 to 4 ranks and saves that block or do not take turns. A job that ends with another code than 0, with other
bits, or not at all ends the soak. Printed in the end: how many, the seconds from the fault to the first new step, and
what was left behind: processes, files in /dev/shm, memory and descriptors of a long job.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tools.soak.kills import Kind, modes
from tools.soak.train import FAULTS

SCRIPT = Path(__file__).with_name("train.py")
LIMIT_S = 300.0  # a job that takes longer hangs
TIMEOUT_S = 4.0  # of collectives: how soon a rank that stands still is noticed
WAITS = ("stop", "loop")  # of the kinds, those that are noticed at the time-out alone
STEPS, LONG_STEPS = 60, 3000
SHM = Path("/dev/shm")
SETTLED_S = 30.0  # a file that nobody uses for so long is left behind, not of another job


def run(kind: Kind, folder: Path, steps: int, *options: str) -> str:
    """Run a job to its end; return its output. SystemExit if it hangs or fails."""
    launcher = ["--timeout-s", str(TIMEOUT_S), "--max-restarts", "1", "--checkpoint", str(folder)]
    command = kind.command(folder, Path(f"{folder}-result"), steps, *launcher)
    process = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise SystemExit(f"HANG: {kind} {options}") from None
    if process.returncode != 0:
        raise SystemExit(f"LOST: {kind} {options}: exit code {process.returncode}:\n{output}")
    return output


def hashes(kind: Kind, folder: Path) -> list[str]:
    """Return and remove what the ranks wrote at the end."""
    paths = [Path(f"{folder}-result-{rank}") for rank in range(kind.ranks)]
    found = [path.read_text() for path in paths]
    for path in paths:
        path.unlink()
    shutil.rmtree(folder)
    return found


def times(output: str, word: str) -> list[float]:
    return [float(text) for text in re.findall(rf"{word} at ([\d.]+)", output)]


def left_behind(before: set[Path], folder: Path) -> list[str]:
    """Return what jobs of ``folder`` have left: files in /dev/shm that no process uses, and processes."""
    files = set(SHM.glob("singa_lite-*")) - before
    deadline = time.monotonic() + SETTLED_S
    while files and time.monotonic() < deadline:  # those of other jobs of this machine are used or go away
        files = {path for path in files if path.exists()} - used_files()
        time.sleep(0.1)
    found = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True).stdout.split()
    return [*map(str, files), *(f"process {pid}" for pid in found if int(pid) != os.getpid())]


def used_files() -> set[Path]:
    """Return the files in /dev/shm that a process has open or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            found.update(re.findall(rf"{SHM}/singa_lite-\S*", (process / "maps").read_text()))
            found.update(os.readlink(link) for link in (process / "fd").iterdir())
    return {Path(name) for name in found}


def use_of_a_long_job(folder: Path, steps: int) -> str:
    """Return how memory and descriptors of two ranks grow from the middle of a long job to its end, in words."""
    output = run(Kind("sparseTopK:0.05", True, 2, True), folder, steps, "--usage", "--save-every", "50")
    rows = re.findall(r"\[(\d)\] usage (\d+) (\d+)", output)
    texts = []
    for rank in ("0", "1"):
        (first, first_fds), (last, last_fds) = (
            (int(kb), int(fds)) for number, kb, fds in rows if number == rank
        )
        texts.append(
            f"rank {rank}: {first} to {last} kB ({last / first - 1:+.2%}), {first_fds} to {last_fds} fds"
        )
    return "; ".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Let ranks fail under --max-restarts")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--faults", type=int, default=sys.maxsize)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--long-steps", type=int, default=LONG_STEPS, help="of the job whose memory is watched"
    )
    arguments = parser.parse_args()
    rng, deadline = random.Random(arguments.seed), time.monotonic() + 60 * arguments.minutes
    before, wanted = set(SHM.glob("singa_lite-*")), dict[Kind, list[str]]()
    seconds: dict[str, list[float]] = {}
    names = itertools.cycle(FAULTS)
    with tempfile.TemporaryDirectory(prefix="singa_lite-soak-") as name:
        folder = Path(name) / "job"
        for number, fault, (option, graph) in zip(range(arguments.faults), names, modes(), strict=False):
            if time.monotonic() > deadline:
                break
            kind = Kind(option, graph, 2 + number % 3, rng.random() < 0.5)
            if kind not in wanted:
                run(kind, folder, STEPS)
                wanted[kind] = hashes(kind, folder)
            spec = f"{fault}:{rng.randrange(kind.ranks)}:{rng.randrange(1, STEPS - 20)}"
            output = run(kind, folder, STEPS, "--fault", spec)
            if hashes(kind, folder) != wanted[kind]:
                raise SystemExit(f"OTHER BITS: {kind} {spec}:\n{output}")
            if left := left_behind(before, folder):
                raise SystemExit(f"LEFT BEHIND: {kind} {spec}: {left}")
            starts = [start for start in times(output, "first step") if start > times(output, "fault")[0]]
            if starts:
                seconds.setdefault(fault, []).append(min(starts) - times(output, "fault")[0])
            print(f"{number + 1}: {spec} {kind}: the same bits", flush=True)
        count = number + (time.monotonic() <= deadline)
        print(f"{count} faults, 0 jobs lost, 0 hangs, 0 processes and 0 files left")
        for fault, values in seconds.items():
            note = f", {TIMEOUT_S:g} s of them the time-out" if fault in WAITS else ""
            print(
                f"{fault}: {statistics.median(values):.2f} s from the fault to the first new step in the median, "
                f"{max(values):.2f} s at most of {len(values)}{note}"
            )
        print(f"a job of {arguments.long_steps} steps: {use_of_a_long_job(folder, arguments.long_steps)}")


if __name__ == "__main__":
    main()
