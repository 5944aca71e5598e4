# SPDX-License-Identifier: Apache-2.0
"""Which kernels take the time of a training step, ours beside PyTorch's, by PyTorch's profiler.

    python -m tools.gpu_day.profile
    python -m tools.gpu_day.profile cnn transformer --precisions tf32 bf16 --ours

The profiler sees all kernels of the process, ours in CUDA graphs too. Printed for each model and each of float32,
float32 with TF32, and mixed precision: the kernels of 3 warm steps by their time on the GPU, recorded here,
channels_last (with autocast) there. What fails is left out, with its reason.
"""

from __future__ import annotations

import argparse
import traceback
from typing import Any

from benchmarks.gpu.rows import QUICK, TORCH_DEVICE, explain
from benchmarks.gpu.step import CASES, PRECISIONS, WARM_STEPS, allow_tf32, free, synchronize, warm_step
from benchmarks.gpu.transformer import our_step, torch_step
from benchmarks.steps import MIXED, batch
from singa_lite import device

STEPS, ROWS = 3, 40
PEERS = {"float32": "torch channels_last", "float16": "torch amp", **MIXED}
TRANSFORMER = argparse.Namespace(batch=16, length=512, layers=6, width=512, heads=8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", default=["resnet50", "cnn"], help=", ".join([*CASES, "transformer"])
    )
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--ours", action="store_true", help="without PyTorch's steps")
    arguments = parser.parse_args()
    gpu = device.create_cuda_gpu()
    for model in arguments.models:
        for precision in arguments.precisions:
            dtype, tf32 = PRECISIONS[precision]
            allow_tf32(tf32)
            for mode in ("graph",) if arguments.ours else ("graph", PEERS[dtype]):
                print(f"##### {model}, {precision}, {mode}: {STEPS} steps", flush=True)
                try:
                    print(kernels_of(gpu, model, dtype, mode), flush=True)
                except Exception as error:
                    traceback.print_exc()
                    print(f"left out: {explain(error)}", flush=True)
                free(gpu)


def make_step(gpu: Any, mode: str, model: str, dtype: str) -> Any:
    """Return a warm step; ``gpu``: a Device."""
    if model != "transformer":
        shape, small, _ = CASES[model]
        return warm_step(gpu, mode, model, *batch(model, shape=small if QUICK else shape), dtype)
    step = (
        torch_step(mode.replace("channels_last", "eager"), TRANSFORMER, TORCH_DEVICE)
        if mode.startswith("torch")
        else our_step(dtype if dtype in MIXED else mode, TRANSFORMER, gpu)
    )
    for _ in range(WARM_STEPS):
        step()
    synchronize(gpu)
    return step


def kernels_of(gpu: Any, model: str, dtype: str, mode: str) -> str:
    """Return the profiler's table of the kernels of some warm steps; ``gpu``: a Device."""
    from torch.profiler import ProfilerActivity, profile

    step = make_step(gpu, mode, model, dtype)
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
