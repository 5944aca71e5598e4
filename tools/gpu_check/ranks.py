# SPDX-License-Identifier: Apache-2.0
"""Two ranks with NVIDIA's NCCL: on a GPU each, or on one where NCCL >= 2.30 lets ranks share it.

    python -m tools.gpu_check.ranks

Each rank trains the CNN on other data, 4 steps of every dist_option, eagerly and recorded. After them, and what
partialUpdate and localSGD synchronize in the end, all ranks must hold the same bits, and their all-reduce must be
numpy's sum. Exits 1 if not.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.rows import SKIPPED, explain, report
from tools.gpu_check.machine import library_version

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

RANKS, STEPS, BATCH = 2, 4, 8
# dist_option -> spars
OPTIONS = {
    "fp32": None,
    "fp16": None,
    "bf16": None,
    "int8": None,
    "hierarchical:int8": None,
    "partialUpdate": None,
    "sparseTopK": 0.05,
    "sparseThreshold": 0.001,
    "randomK:0.05": None,
    "dgc": None,
    "powerSGD": None,
    "sign": None,
    "localSGD": None,
}
SHARES_GPU = 23000  # NCCL 2.30
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "16"}  # for the ranks' environment


def main() -> int:
    if "SINGA_LITE_RANK" in os.environ:
        return rank()
    title = f"{RANKS} ranks over NCCL"
    if note := why_not():
        report(title, None, note=f"skipped: {note}")
        return SKIPPED
    command = [sys.executable, "-m", "singa_lite", "run", "-n", str(RANKS), "-m", "tools.gpu_check.ranks"]
    environment = {**os.environ, **SHARED_GPU, "SINGA_LITE_TIMEOUT_S": "20"}
    done = subprocess.run(command, env=environment, check=False)
    report(title, done.returncode, 0, f"exit code; {place()}, NCCL {nccl_version()}")
    return done.returncode


def why_not() -> str:
    """Why RANKS ranks cannot run here, "" if they can."""
    from singa_lite import device

    version, gpus = nccl_version(), device.get_num_gpus()
    number = version.split()[0]
    if gpus == 0:  # create_device would take the CPU
        return "no GPU"
    if gpus < RANKS and (not number.isdigit() or int(number) < SHARES_GPU):
        return (
            f"{gpus} GPU, and NCCL {version} does not let ranks share one; install nvidia-nccl-cu13 or -cu12 "
            "2.30 or later, or name its libnccl.so.2 in SINGA_LITE_NCCL_LIB"
        )
    return ""


def nccl_version() -> str:
    from singa_lite import _native

    names = _native.library_names("SINGA_LITE_NCCL_LIB", "nvidia.nccl", "libnccl.so.2")
    return library_version(names, "ncclGetVersion")


def place() -> str:
    from singa_lite import device

    return f"{RANKS} on one GPU" if device.get_num_gpus() < RANKS else "one GPU each"


def rank() -> int:
    """One rank's part; rank 0 reports."""
    from singa_lite import device, opt

    communicator = opt.DistOpt(opt.SGD(lr=0.01)).communicator
    gpu = device.create_device(communicator.local_rank)
    sums = gpu.backend.asarray(np.arange(1000, dtype=np.float32) * (communicator.rank + 1))
    communicator.all_reduce(sums, "sum").wait()
    expected = np.arange(1000, dtype=np.float32) * (RANKS * (RANKS + 1) // 2)
    is_right = bool(np.array_equal(gpu.backend.to_numpy(sums), expected))
    results = [all(communicator.all_gather_object(is_right))]
    tell(communicator, "all_reduce is numpy's sum", results[0])
    for option, spars in OPTIONS.items():
        for use_graph in (False, True):
            result = hold_same_bits(gpu, communicator, option, spars, use_graph)
            mode = "graph" if use_graph else "eager"
            tell(communicator, f"{option}, {mode}: ranks hold the same bits", result)
            if isinstance(result, str):
                return 1  # the communicator is broken
            results.append(result)
    return int(not all(results))


def tell(communicator: Any, what: str, value: bool | str) -> None:
    """A row from rank 0."""
    if communicator.rank == 0:
        note = "" if isinstance(value, bool) else value
        report(what, "yes" if value is True else "NO", met=value is True, required="yes", note=note)


def hold_same_bits(
    gpu: Any, communicator: Any, option: str, spars: float | None, use_graph: bool
) -> bool | str:
    """Whether all ranks' parameters are equal after some steps, or what went wrong here."""
    from model.cnn import CNN

    from singa_lite import opt, tensor

    rng = np.random.default_rng(communicator.rank)
    try:
        optimizer = opt.DistOpt(opt.SGD(lr=0.01, momentum=0.9))
        model = CNN()
        model.set_optimizer(optimizer)
        x = tensor.from_numpy(rng.standard_normal((BATCH, 1, 28, 28)).astype(np.float32), gpu)
        y = tensor.from_numpy(rng.integers(0, 10, BATCH).astype(np.int32), gpu)
        model.compile([x], use_graph=use_graph)
        for _ in range(STEPS):
            model(x, y, option, spars)
        if not optimizer.keeps_equal:
            optimizer.synchronize(model)
        digest = hashlib.sha256()
        for param in model.get_params().values():
            digest.update(tensor.to_numpy(param).tobytes())
        return len(set(communicator.all_gather_object(digest.hexdigest()))) == 1
    except Exception as error:  # the other ranks get an error, too: the communicator tells them
        return explain(error)


if __name__ == "__main__":
    sys.exit(main())
