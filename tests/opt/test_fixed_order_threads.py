# SPDX-License-Identifier: Apache-2.0
"""order="fixed" under `singa-lite run` without OMP_NUM_THREADS: the bits depend on the number of threads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from singa_lite.device import get_num_threads, set_num_threads
from singa_lite.errors import CheckpointError, CommError
from singa_lite.launch.rank_wrapper import environ_of
from singa_lite.opt.fixed_order import check_threads
from tests.comm.processes import launch_command, run_command, write_script
from tests.opt.test_fixed_order import made
from tests.ranks import run_ranks

SCRIPT = """
import os, sys, zlib
import numpy as np
from singa_lite import checkpoint, device, layer, model, opt
from singa_lite.tensor import from_numpy, to_numpy

class Net(model.Model):
    def __init__(self):
        super().__init__()
        self.conv, self.flatten, self.linear = layer.Conv2d(8, 3), layer.Flatten(), layer.Linear(10)
        self.loss = layer.SoftMaxCrossEntropy()
    def forward(self, x):
        return self.linear(self.flatten(self.conv(x)))
    def train_one_batch(self, x, y):
        loss = self.loss(self.forward(x), y)
        self.optimizer(loss)
        return loss

kind, folder = sys.argv[1:]
size, rank = int(os.environ["SINGA_LITE_WORLD_SIZE"]), int(os.environ["SINGA_LITE_RANK"])
if kind == "loses a rank" and size == 2 and rank == 1:
    sys.exit(3)
device.get_default_device().SetRandSeed(3)
rng = np.random.default_rng(0)
images, labels = rng.standard_normal((2, 32, 3, 24, 24)).astype(np.float32), rng.integers(0, 10, (2, 32))
net = Net()
net.set_optimizer(opt.DistOpt(opt.SGD(lr=0.1), microbatches=2, order="fixed"))
net.compile([from_numpy(images[0])], use_graph=False)
job = checkpoint.load_job(folder, net)
for update in range(4):
    for number in range(2):
        if number * size // 2 == rank:
            net(from_numpy(images[number]), from_numpy(labels[number]))
if kind == "saves":
    checkpoint.save_job(folder, net)
crc = 0
for name, value in sorted(net.get_params().items()):
    crc = zlib.crc32(to_numpy(value).tobytes(), crc)
print("ended with", size, device.get_num_threads(), crc, job and job.step)
"""


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several ranks need Linux")


def run(
    folder: Path, kind: str, size: int, *options: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    script = write_script(folder, SCRIPT)
    return run_command(launch_command(script, size, kind, str(folder / "job"), options=options), **environ)


def ends(done: subprocess.CompletedProcess[str]) -> list[tuple[str, ...]]:
    """Ranks, threads, checksum and step gone on from, of each rank that has ended."""
    found = re.findall(r"ended with (\d+) (\d+) (\d+) (\w+)", done.stdout)
    assert found and done.returncode == 0, done.stderr
    return found


def test_a_launched_job_that_loses_a_rank_keeps_threads_and_bits(tmp_path: Path) -> None:
    (size, threads, bits, _), other = ends(run(tmp_path, "trains", 2))
    assert size == "2" and other[2] == bits
    restarts = ("--max-restarts", "2", "--min-ranks", "1")
    assert ends(run(tmp_path, "loses a rank", 2, *restarts)) == [("1", threads, bits, "None")]


def test_another_launch_with_other_threads_is_refused_and_the_cure_helps(tmp_path: Path) -> None:
    [(_, before, _, _), _] = ends(run(tmp_path, "saves", 2, OMP_NUM_THREADS="1"))
    assert before == "1"
    refused = run(tmp_path, "goes on", 1, OMP_NUM_THREADS="3")
    assert refused.returncode == 1 and "CheckpointError" in refused.stderr
    assert "1 threads computed on each rank when it was saved, and here there are 3" in refused.stderr
    cure = re.search(r"export OMP_NUM_THREADS=(\d+)", refused.stderr)
    assert cure is not None
    [(_, _, alone, step)] = ends(run(tmp_path, "goes on", 1, OMP_NUM_THREADS=cure[1]))
    both = ends(run(tmp_path, "goes on", 2, OMP_NUM_THREADS=cure[1]))
    assert step == "4" and [bits for _, _, bits, _ in both] == [alone, alone]


def with_other_threads(communicator: Any) -> str:
    before = get_num_threads()
    set_num_threads(3 if communicator.rank == 2 else 2)
    try:
        made(communicator, "fp32", False)
    except CommError as error:
        return str(error)
    finally:
        set_num_threads(before)
    return "none"


def test_ranks_of_different_threads_are_an_error_on_all_that_names_both_numbers() -> None:
    for error in run_ranks(with_other_threads, 4):
        assert "their threads: OMP_NUM_THREADS is 2 on rank 0 but 3 on rank 2; export" in error


def test_a_job_without_the_number_goes_on_with_a_warning_and_any_order_with_none() -> None:
    mine = {"order": "fixed", "num_threads": 2}
    with pytest.warns(UserWarning, match="does not say on how many threads"):
        check_threads({"order": "fixed"}, mine, "load_job: x")
    check_threads({"order": "any"}, mine, "load_job: x")
    check_threads({"order": "fixed", "num_threads": None}, mine, "load_job: x")  # on GPUs
    check_threads({"order": "fixed", "num_threads": 1}, {"order": "any"}, "load_job: x")
    with pytest.raises(CheckpointError, match="export OMP_NUM_THREADS=1"):
        check_threads({"order": "fixed", "num_threads": 1}, mine, "load_job: x")


def test_a_host_that_lost_a_slot_keeps_the_threads_of_the_first_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    alone = {"name": "worker 0", "host": "a"}
    job = {"processes": [alone], "environ": {"worker": {}}, "sharing": {"a": [2, 0]}}
    assert environ_of(job, alone)["OMP_NUM_THREADS"] == "4"
