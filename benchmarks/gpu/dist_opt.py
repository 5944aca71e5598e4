# SPDX-License-Identifier: Apache-2.0
"""What DistOpt costs on one GPU: a step that packs, reduces by NCCL and unpacks every bucket, beside one without it.

    python -m benchmarks.gpu.dist_opt

A world of one normally skips all of that; here it is forced by giving DistOpt an NCCL communicator of one rank. Both
steps take turns in one process, medians. Exits 1 when a recorded step is above 1.05 times the one without DistOpt.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.gpu.rows import QUICK, explain, medians_ms, report
from benchmarks.gpu.step import CASES, WARM_STEPS, free
from benchmarks.steps import batch, our_step
from singa_lite import device
from singa_lite.comm.base import World
from singa_lite.comm.local import LocalCommunicator
from singa_lite.comm.nccl import NcclCommunicator

LIMIT = 1.05


def main() -> int:
    gpu = device.create_cuda_gpu()
    forced = NcclCommunicator(LocalCommunicator(World()), gpu.id())
    is_met = [
        compare(gpu, forced, model, mode) for model in ("cnn", "resnet18") for mode in ("graph", "eager")
    ]
    forced.close()
    return int(not all(is_met))


def compare(gpu: Any, forced: NcclCommunicator, model: str, mode: str) -> bool:
    """Report one model; whether it is within the limit. ``gpu``: a Device."""
    shape, small, _ = CASES[model]
    x, labels = batch(model, shape=small if QUICK else shape)
    title = f"step of {model}, batch {len(x)}, {mode}: DistOpt with NCCL at one rank / without DistOpt"
    limit = LIMIT if mode == "graph" else None
    try:
        steps = {
            "with": our_step(mode, model, x, labels, True, device=gpu, communicator=forced),
            "without": our_step(mode, model, x, labels, device=gpu),
        }
        for step in list(steps.values()) * WARM_STEPS:
            step()
        medians = medians_ms(steps, gpu.Sync)
    except Exception as error:
        report(title, None, limit, explain(error))
        return False
    ratio = medians["with"] / medians["without"]
    report(title, ratio, limit, f"with {medians['with']:.3f} ms, without {medians['without']:.3f} ms")
    steps.clear()
    free(gpu)
    return limit is None or ratio <= limit


if __name__ == "__main__":
    sys.exit(main())
