# SPDX-License-Identifier: Apache-2.0
"""Time of a training step of the transformer of examples/train_text.py on one GPU beside PyTorch.

    python -m benchmarks.gpu.transformer

Forward, loss, backward and Adam, on pieces of characters out of 103; all steps take turns in one process, medians of
turns. float32 without and with TF32 on both sides, and bfloat16 mixed precision on both sides; PyTorch's attention is
its scaled_dot_product_attention. Each of our steps is held against PyTorch's eager one, and with --compile against
torch.compile(mode="reduce-overhead").
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

# modules that CPU benchmarks import without a package
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from transformer import our_step, torch_step

from benchmarks.gpu.rows import QUICK, TORCH_DEVICE, explain, medians_ms, report
from benchmarks.gpu.step import WARM_STEPS, allow_tf32, free, synchronize
from singa_lite import device

# batch, length, layers, width, heads
SIZES = ((2, 16, 1, 16, 2),) if QUICK else ((32, 128, 4, 128, 4), (16, 512, 6, 512, 8))
PRECISIONS = (("float32", False), ("float32", True), ("bf16", False))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", action="store_true", help="beside torch.compile")
    suffix = " compile" if parser.parse_args().compile else ""
    gpu = device.create_cuda_gpu()
    for size in SIZES:
        for precision, tf32 in PRECISIONS:
            allow_tf32(tf32)
            eager = "torch autocast" if precision == "bf16" else "torch" if suffix else "torch eager"
            title = f"step of a transformer, {size}, {precision}{' with TF32' if tf32 else ''}"
            try:
                compare(title, size, "bf16" if precision == "bf16" else "graph", eager + suffix, gpu)
            except Exception as error:
                traceback.print_exc()
                report(title, None, 1.0, f"left out: {explain(error)}")
            free(gpu)


def compare(title: str, size: tuple[int, ...], mode: str, peer: str, gpu: device.Device) -> None:
    """Time our step in ``mode`` and PyTorch's in the mode ``peer`` in turns, and report their ratio."""
    numbers = dict(zip(("batch", "length", "layers", "width", "heads"), size, strict=True))
    arguments = argparse.Namespace(**numbers)
    steps = {"graph": our_step(mode, arguments, gpu), peer: torch_step(peer, arguments, TORCH_DEVICE)}
    for step in [*steps.values()] * WARM_STEPS:
        step()
    medians = medians_ms(steps, lambda: synchronize(gpu))
    note = ", ".join(f"{name} {ms:.3f} ms" for name, ms in medians.items())
    report(f"{title}: graph / {peer}", medians["graph"] / medians[peer], 1.0, note)


if __name__ == "__main__":
    main()
