# SPDX-License-Identifier: Apache-2.0
"""A few minutes of `make soak`, as a few seconds: jobs that are killed or fail go on to the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import LIMIT_S
from tools.soak import faults
from tools.soak.kills import Kind, check_whole

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several ranks need Linux")


def run(tool: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"tools.soak.{tool}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_killed_jobs_end_with_the_bits_of_the_undisturbed_run() -> None:
    assert "1 of 1 ended with the bits of the undisturbed run" in run(
        "kills", "--kills", "1", "--steps", "40"
    )


@pytest.mark.slow
def test_jobs_with_faults_restart_and_leave_nothing() -> None:
    output = run("faults", "--faults", "1", "--long-steps", "60")
    assert "1 faults, 0 jobs lost, 0 hangs, 0 processes and 0 files left" in output
    assert "a job of 60 steps: rank 0: " in output


@pytest.mark.slow
@pytest.mark.parametrize("graph", [False, True])  # with a server
def test_a_worker_of_a_key_value_store_fails_and_the_job_goes_on_to_the_same_bits(
    tmp_path: Path, graph: bool
) -> None:
    kind, found = Kind("store", graph, 2, no_block=True), []
    for given in ((), ("--fault", "kill:1:33")):
        output = faults.run(kind, tmp_path / "job", 40, *given)
        found.append(faults.hashes(kind, tmp_path / "job"))
    assert found[0] == found[1] and "restart 1 of 1" in output


def test_a_job_that_is_lost_ends_the_soak(tmp_path: Path) -> None:
    """So that the tests above can fail."""
    with pytest.raises(SystemExit, match="LOST"):
        faults.run(Kind("no such option", False, 2, False), tmp_path / "job", 10)
    broken = tmp_path / "job" / "step-00000020"
    broken.mkdir(parents=True, exist_ok=True)
    (broken / "manifest.json").write_text("{")
    with pytest.raises(SystemExit, match=r"manifest\.json"):
        check_whole(Kind("fp32", False, 2, False), tmp_path / "job")
