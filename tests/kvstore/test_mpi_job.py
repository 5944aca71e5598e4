# SPDX-License-Identifier: Apache-2.0
"""A whole MPI job with a server: a store and a Trainer. `make test-openmpi` runs this under Open MPI, too."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.comm.processes import run_command, write_script
from tests.ranks import _mpiexec, mpi_missing
from tests.slow_cases import slow_but_first

pytestmark = pytest.mark.skipif(bool(mpi_missing()), reason=mpi_missing() or "mpi works")

SCRIPT = """
import sys
import numpy as np
from singa_lite import autograd, gluon, kvstore, tensor

store = kvstore.create("dist")
workers, rank = store.num_workers, store.rank
store.init(["small", "large"], [np.zeros(3, np.float32), np.zeros((300, 300), np.float32)])
grads = [np.full(3, rank + 1, np.float32), np.full((300, 300), 2 * (rank + 1), np.float32)]
outs = [np.empty_like(grad) for grad in grads]
for _ in range(3):
    store.pushpull(["small", "large"], grads, outs)
assert (outs[0] == 1 + 2).all() and (outs[1] == 2 + 4).all(), outs

param = tensor.Tensor((2,), data=np.ones(2, np.float32), stores_grad=True, name="w")
trainer = gluon.Trainer([param], "sgd", {"learning_rate": 1.0}, kvstore=store)
autograd.training = True
(param * float(rank + 1)).backward(tensor.from_numpy(np.ones(2, np.float32)))
trainer.step(1)
assert (tensor.to_numpy(param) == 1 - 3).all(), param
sys.stdout.write(f"worker {rank} of {workers} with {store.num_servers} server\\n")
"""


OPEN_MPI = {  # needs leave to run as root and with more ranks than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def test_a_store_and_a_trainer_work_in_an_mpi_job_with_a_server(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    command = [_mpiexec() or "", "-n", "3", sys.executable, str(script)]
    result = run_command(command, SINGA_LITE_NUM_SERVERS="1", **OPEN_MPI)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert f"worker {rank} of 2 with 1 server" in result.stdout


def test_a_server_of_another_version_does_not_join(tmp_path: Path) -> None:
    before = (
        "import os, singa_lite\n"
        "if '2' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK')):\n"
        "    singa_lite.__version__ = '9.8'\n"
    )
    script = write_script(tmp_path, before + SCRIPT)
    command = [_mpiexec() or "", "-n", "3", sys.executable, str(script)]
    result = run_command(command, SINGA_LITE_NUM_SERVERS="1", **OPEN_MPI)
    assert result.returncode != 0
    assert re.search(
        r"MPI: rank 2 on .* has singa_lite 9\.8, rank 0 on .*; install one version", result.stderr
    )


@slow_but_first("first", [0, 1])
def test_a_script_that_finalizes_mpi_itself_closes_its_store(tmp_path: Path, first: int) -> None:
    end = """
import time
from mpi4py import MPI
time.sleep(0.2 * (rank != {}))
MPI.Finalize()
try:
    store.pushpull("small", grads[0], outs[0])
except Exception as error:
    sys.stdout.write(f"worker {{rank}} then: {{type(error).__name__}}: {{error}}\\n")
"""
    script = write_script(tmp_path, SCRIPT + end.format(first))
    command = [_mpiexec() or "", "-n", "3", sys.executable, str(script)]
    result = run_command(command, SINGA_LITE_NUM_SERVERS="1", **OPEN_MPI)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    for rank in range(2):
        assert re.search(rf"worker {rank} then: CommError: .*closed", result.stdout), result.stdout
