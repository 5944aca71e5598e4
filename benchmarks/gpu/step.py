# SPDX-License-Identifier: Apache-2.0
"""Time of a training step on one GPU beside PyTorch: same model, batch, optimizer and TF32 setting, one process.

    python -m benchmarks.gpu.step                          CNN, ResNet-18 and ResNet-50 beside eager PyTorch
    python -m benchmarks.gpu.step cnn --compile            beside torch.compile(mode="reduce-overhead")

All steps take turns; a turn is some steps and a wait for the device; medians of turns. Graph mode is held against the
faster of PyTorch's row-major and channels_last steps, and besides against a row-major one with cudnn.deterministic, as
our convolutions take cuDNN's deterministic algorithms. cudnn.benchmark is on there. First without TF32, then with it on
both sides, then mixed precision, precision="fp16" and "bf16" here beside torch.autocast(float16), with its GradScaler,
and torch.autocast(bfloat16) there; last a model in float16, weights included, beside torch.autocast(float16). "untimed"
is our step with the algorithms that cuDNN proposes, without device.benchmark_convolutions.
"""

from __future__ import annotations

import argparse
import gc
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.gpu.rows import QUICK, TORCH_DEVICE, explain, medians_ms, report
from benchmarks.steps import MIXED, Step, batch, our_step, torch_step
from singa_lite import device

# model -> (shape, shape to try the script with, limit beside eager PyTorch)
CASES = {
    "cnn": ((64, 1, 28, 28), (4, 1, 28, 28), 0.5),
    "resnet18": ((128, 3, 32, 32), (2, 3, 16, 16), 1.0),
    "resnet50": ((64, 3, 224, 224), (2, 3, 32, 32), 1.0),
}
COMPILED_LIMIT = 1.0
# dtype, or mixed precision, and whether TF32 is allowed
PRECISIONS = {
    "float32": ("float32", False),
    "tf32": ("float32", True),
    "fp16": ("fp16", False),
    "bf16": ("bf16", False),
    "float16": ("float16", False),
}
UNTIMED = "graph untimed"  # without device.benchmark_convolutions
WARM_STEPS = 4  # before times count: they compile, record, capture and choose algorithms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--compile", action="store_true", help="beside torch.compile, with float32 alone")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    arguments = parser.parse_args()
    gpu = device.create_cuda_gpu()
    for model in arguments.models:
        for dtype, tf32 in (PRECISIONS[name] for name in arguments.precisions):
            if dtype == "float32" or not arguments.compile:
                compare(gpu, model, dtype, tf32, arguments.compile)


def compare(gpu: Any, model: str, dtype: str, tf32: bool, is_compiled: bool) -> None:
    """Report our steps of one model as a share of PyTorch's; ``gpu``: a Device."""
    shape, small, limit = CASES[model]
    peers = ["torch eager", "torch channels_last"] if dtype == "float32" else [MIXED.get(dtype, "torch amp")]
    peers = ["torch compile"] if is_compiled else peers
    like = ["torch deterministic"] if dtype == "float32" and not is_compiled else []
    x, labels = batch(model, shape=small if QUICK else shape)
    title = f"step of {model}, batch {len(x)}, {dtype}{' with TF32' if tf32 else ''}"
    allow_tf32(tf32)
    steps = {}
    ours = [
        "graph",
        *([] if is_compiled else [UNTIMED]),
        *([] if is_compiled or dtype in MIXED else ["eager"]),
    ]
    for mode in [*ours, *peers, *like]:
        try:
            steps[mode] = warm_step(gpu, mode, model, x, labels, dtype)
        except Exception as error:
            traceback.print_exc()
            report(f"{title}: {mode}", None, note=f"left out: {explain(error)}")
    medians = medians_ms(steps, lambda: synchronize(gpu))
    note = ", ".join(f"{mode} {ms:.3f} ms" for mode, ms in medians.items())
    if "graph" in steps and (reasons := break_reasons_of(steps["graph"])):
        note += f"; graph mode ran eagerly: {reasons}"
    theirs = min((medians[peer] for peer in peers if peer in medians), default=None)
    required = None if dtype != "float32" else COMPILED_LIMIT if is_compiled else limit
    for mode in ("graph", "eager"):
        if mode in medians or mode == "graph":
            ratio = medians[mode] / theirs if theirs and mode in medians else None
            report(f"{title}: {mode} / {name_of(peers)}", ratio, required if mode == "graph" else None, note)
    if {"graph", UNTIMED} <= medians.keys():
        report(f"{title}: {UNTIMED} / graph", medians[UNTIMED] / medians["graph"], note=note)
    if like and {"graph", *like} <= medians.keys():
        report(
            f"{title}: graph / torch deterministic",
            medians["graph"] / medians["torch deterministic"],
            note=note,
        )
    steps.clear()
    free(gpu)


def break_reasons_of(step: Any) -> str:
    """Why our recorded step was not replayed; "" if it was."""
    return "; ".join(info.break_reason for info in step.func.graph_info() if info.break_reason)


def name_of(peers: Sequence[str]) -> str:
    return peers[0] if len(peers) == 1 else "PyTorch eager"


def warm_step(gpu: Any, mode: str, model: str, x: np.ndarray, labels: np.ndarray, dtype: str) -> Step:
    if mode.startswith("torch"):
        step = torch_step(mode, model, x, labels, device=TORCH_DEVICE)
    else:
        device.benchmark_convolutions(mode != UNTIMED)
        mode, dtype = (dtype, "float32") if dtype in MIXED else ("graph" if mode == UNTIMED else mode, dtype)
        step = our_step(mode, model, x.astype(dtype), labels, device=gpu)
    for _ in range(WARM_STEPS):
        step()
    synchronize(gpu)
    device.benchmark_convolutions()
    return step


# ---- PyTorch, where it is installed ------------------------------------------------------------------


def torch_module() -> Any:
    """The module torch, or None."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def allow_tf32(allowed: bool) -> None:
    """On both sides."""
    device.allow_tf32(allowed)
    if torch := torch_module():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        torch.backends.cudnn.benchmark = True


def synchronize(gpu: Any) -> None:
    """Wait until the GPU has nothing to do for either side."""
    gpu.Sync()
    if TORCH_DEVICE != "cpu" and (torch := torch_module()):
        torch.cuda.synchronize()


def free(gpu: Any) -> None:
    """Give both sides' cached memory back."""
    gc.collect()
    gpu.backend.release_cached_memory()
    if TORCH_DEVICE != "cpu" and (torch := torch_module()):
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
