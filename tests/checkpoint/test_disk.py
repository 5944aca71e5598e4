# SPDX-License-Identifier: Apache-2.0
"""Saving to a disk that is full, then to one that is mounted read-only, with real file systems."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from singa_lite import checkpoint
from singa_lite.comm.base import Communicator
from singa_lite.errors import CheckpointError
from singa_lite.generation import find_generations
from tests.checkpoint.job_net import batch, compiled
from tests.ranks import run_ranks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 KB, which holds three generations."""
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if done.returncode != 0:
        pytest.skip(f"mount needs root: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def fill(communicator: Communicator, folder: str) -> tuple[list[str], list[int], int]:
    """Save after each of 6 steps and keep all; the error or "" of each, the steps that count, and what is loaded."""
    net, errors = compiled(communicator, "sparseTopK:0.05", True), []
    for step in range(6):
        net(*batch(step, communicator.rank))
        try:
            checkpoint.save_job(folder, net, keep=10, block=step % 2 == 0).wait()
            errors.append("")
        except CheckpointError as error:
            errors.append(str(error))
    found, problems = find_generations(folder)
    assert not problems
    job = checkpoint.load_job(folder, net)
    return errors, [each.manifest.step for each in found], 0 if job is None else job.step


def save_once(communicator: Communicator, folder: str) -> tuple[str, int]:
    net = compiled(communicator, "sparseTopK:0.05", True)
    job = checkpoint.load_job(folder, net)
    with pytest.raises(CheckpointError) as error:
        checkpoint.save_job(folder, net)
    again = checkpoint.load_job(folder, net)
    assert job is not None and again is not None and job.step == again.step
    return str(error.value), again.step


def test_a_full_disk_and_a_read_only_one_are_errors_on_all_ranks_and_older_generations_stay(
    small_disk: Path,
) -> None:
    folder = str(small_disk / "job")
    for errors, steps, loaded in run_ranks(fill, 3, folder):
        assert errors[:3] == [""] * 3 and all("No space left on device" in text for text in errors[3:])
        assert steps == [3, 2, 1] and loaded == 3
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for error, step in run_ranks(save_once, 3, folder):
        assert "Read-only file system" in error and step == 3
