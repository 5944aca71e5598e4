# SPDX-License-Identifier: Apache-2.0
"""What happens when one of 3 ranks is killed with -9 in the middle of an all-reduce.

    python benchmarks/killed_rank.py

Prints, from the instant of the kill: when each other rank had its CommError (required: < 2 s), when
`singa-lite run` had ended, non-zero (required: < 4 s), and how many processes and /dev/shm files are left (0).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from singa_lite.comm.rendezvous import connect, find_world
from singa_lite.errors import CommError

RANKS, VICTIM, ELEMENTS = 3, 1, 4_000_000
ERROR_S, EXIT_S = 2.0, 4.0


def rank_main(folder: Path) -> None:
    """All-reduce for ever; the victim kills itself while its third one is in flight."""
    communicator = connect(find_world())
    rank = communicator.rank
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    array = np.ones(ELEMENTS, np.float32)
    try:
        for step in range(1_000_000):
            work = communicator.all_reduce(array, "mean", name="gradients")
            if step == 2 and rank == VICTIM:
                (folder / "killed").write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            work.wait()
    except CommError as error:
        (folder / f"error-{rank}").write_text(json.dumps([time.monotonic(), str(error)]))
        raise


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter between its opening and reading
        return False


def main() -> int:
    before = set(Path("/dev/shm").glob("singa_lite-*"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = [str(Path(__file__).resolve()), "--folder", str(folder)]
        command = [sys.executable, "-m", "singa_lite", "run", "-n", str(RANKS), *script]
        code = subprocess.run(command, timeout=60).returncode
        ended = time.monotonic()
        killed = float((folder / "killed").read_text())
        is_good = code != 0 and ended - killed < EXIT_S
        for rank in (rank for rank in range(RANKS) if rank != VICTIM):
            at, text = json.loads((folder / f"error-{rank}").read_text())
            is_good &= at - killed < ERROR_S
            print(f"rank {rank}: error after {at - killed:.3f} s: {text}")
        running = sum(is_running(int(path.read_text())) for path in folder.glob("pid-*"))
    files = len(set(Path("/dev/shm").glob("singa_lite-*")) - before)
    print(f"launcher: exit code {code} after {ended - killed:.3f} s")
    print(f"left: {running} processes, {files} files in /dev/shm")
    is_good &= running == 0 and files == 0
    print("as required" if is_good else "NOT as required")
    return 0 if is_good else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="be a rank, which leaves its part there")
    given = parser.parse_args()
    if given.folder is not None:
        rank_main(given.folder)
    else:
        sys.exit(main())
