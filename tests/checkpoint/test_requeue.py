# SPDX-License-Identifier: Apache-2.0
"""A job that mpiexec starts on two hosts goes on when the same line runs again, as after `scontrol requeue`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.hosts import write_agent
from tests.comm.processes import assert_nothing_left, fresh_environment
from tests.limits import LIMIT_S
from tests.ranks import mpi_missing

SCRIPT = Path(__file__).parents[2] / "tools" / "soak" / "train.py"
RANKS, STEPS = 3, 30


def train(start: list[str], folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Train to step 30 from what is in folder/job, with a save every 10 steps."""
    given = [str(folder / "job"), str(folder / "result"), "--steps", str(STEPS), "--save-every", "10"]
    return subprocess.run(
        [*start, str(SCRIPT), *given, "--graph", "--dist-option", "sparseTopK:0.05", *options],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        env=fresh_environment(SINGA_LITE_TIMEOUT_S="20", OMP_NUM_THREADS="1"),
    )


def results(folder: Path) -> list[str]:
    return [(folder / f"result-{rank}").read_text() for rank in range(RANKS)]


@pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi works")
def test_the_same_mpiexec_line_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    found = Path(sys.executable).with_name("mpiexec")
    (tmp_path / "hosts").write_text("d1\nd2\n")
    start = [str(found if found.exists() else "mpiexec"), "-launcher", "ssh"]
    start += ["-launcher-exec", str(write_agent(tmp_path)), "-f", str(tmp_path / "hosts")]
    start += ["-n", str(RANKS), sys.executable]
    killed = train(start, tmp_path, "--fault", "kill:1:25")
    assert killed.returncode != 0 and killed.stdout.count("training from 0") == RANKS
    again = train(start, tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("training from 20") == RANKS
    other = tmp_path / "undisturbed"
    other.mkdir()
    done = train([sys.executable, "-m", "singa_lite", "run", "-n", str(RANKS)], other)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(tmp_path) == results(other)
    assert_nothing_left(tmp_path)
