# SPDX-License-Identifier: Apache-2.0
"""Which kernels take the time of a training step, ours beside PyTorch's, by PyTorch's profiler.

    python -m tools.gpu_day.profile
    python -m tools.gpu_day.profile cnn resnet50

The profiler sees all kernels of the process, ours in CUDA graphs too. Printed for each model and each of float32,
float32 with TF32, and mixed precision: the kernels of 3 warm steps by their time on the GPU, recorded here,
channels_last (with autocast) there. What fails is left out, with its reason.
"""

from __future__ import annotations

import argparse
import traceback
from typing import Any

from benchmarks.gpu.rows import QUICK, explain
from benchmarks.gpu.step import CASES, allow_tf32, free, synchronize, warm_step
from benchmarks.steps import MIXED, batch
from singa_lite import device

STEPS, ROWS = 3, 25
PEERS = {"float32": "torch channels_last", **MIXED}
DTYPES = (("float32", False), ("float32", True), ("fp16", False), ("bf16", False))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["resnet50", "cnn"], help=", ".join(CASES))
    arguments = parser.parse_args()
    gpu = device.create_cuda_gpu()
    for model in arguments.models:
        for dtype, tf32 in DTYPES:
            allow_tf32(tf32)
            for mode in ("graph", PEERS[dtype]):
                print(
                    f"##### {model}, {dtype}{' with TF32' if tf32 else ''}, {mode}: {STEPS} steps", flush=True
                )
                try:
                    print(kernels_of(gpu, model, dtype, mode), flush=True)
                except Exception as error:
                    traceback.print_exc()
                    print(f"left out: {explain(error)}", flush=True)
                free(gpu)


def kernels_of(gpu: Any, model: str, dtype: str, mode: str) -> str:
    """Return the profiler's table of the kernels of some warm steps; ``gpu``: a Device."""
    from torch.profiler import ProfilerActivity, profile

    shape, small, _ = CASES[model]
    x, labels = batch(model, shape=small if QUICK else shape)
    step = warm_step(gpu, mode, model, x, labels, dtype)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS):
            step()
        synchronize(gpu)
    table = seen.key_averages().table(
        sort_by="self_device_time_total", row_limit=ROWS, max_name_column_width=70
    )
    return str(table)


if __name__ == "__main__":
    main()
