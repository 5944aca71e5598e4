# SPDX-License-Identifier: Apache-2.0
"""The first minute on a GPU: does a step run, does the loss fall, and are its losses those of the CPU?

    python -m tools.gpu_check.smoke

The CNN of the examples, same initial weights, 50 steps of SGD on the same batches, in float32 and float16, on the CPU,
on the GPU eagerly, and on the GPU with recorded steps; the figure is the largest relative difference of a loss.
Exits 1 if something failed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.rows import QUICK, explain, report

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from model.cnn import CNN

from singa_lite import device, opt, tensor

STEPS, BATCH = (6, 4) if QUICK else (50, 32)
LR = 0.001  # the loss falls to a quarter: near 0 relative differences would tell nothing
LIMITS = {"float32": 1e-3, "float16": 5e-2}  # what sums in another order may change in STEPS steps


def main() -> int:
    try:
        gpu = device.create_cuda_gpu()
    except Exception as error:
        report("GPU device", None, met=False, required="works", note=explain(error))
        return 1
    report("GPU device", "; ".join(device.device_query(0).split("\n")), met=True, required="works")
    states = initial_states()
    cpu = {dtype: losses(device.get_default_device(), dtype, states) for dtype in LIMITS}
    failures = 0
    for dtype, limit in LIMITS.items():
        for use_graph in (False, True):
            mode = "graph" if use_graph else "eager"
            try:
                failures += compare(dtype, mode, cpu[dtype], losses(gpu, dtype, states, use_graph), limit)
            except Exception as error:
                traceback.print_exc()
                report(f"CNN on the GPU, {dtype}, {mode}", None, limit, explain(error))
                failures += 1
    return int(failures > 0)


def initial_states() -> dict[str, np.ndarray]:
    """Weights of a fresh CNN on the CPU."""
    cpu = device.get_default_device()
    cpu.SetRandSeed(1)
    model = CNN()
    model.compile([tensor.zeros((BATCH, 1, 28, 28), cpu)])
    return {name: tensor.to_numpy(state) for name, state in model.get_states().items()}


def losses(dev: Any, dtype: str, states: dict[str, np.ndarray], use_graph: bool = False) -> np.ndarray:
    """The loss of each of STEPS steps, float64; ``dev``: a Device."""
    model = CNN()
    model.set_optimizer(opt.DistOpt(opt.SGD(lr=LR, momentum=0.9, weight_decay=1e-5)))
    x = tensor.from_numpy(np.zeros((BATCH, 1, 28, 28), dtype), dev)
    y = tensor.from_numpy(np.zeros(BATCH, np.int32), dev)
    model.compile([x], use_graph=use_graph)
    model.set_states({name: state.astype(dtype) for name, state in states.items()})
    found = []
    for images, labels in batches():
        x.copy_from_numpy(images.astype(dtype))
        y.copy_from_numpy(labels)
        found.append(model(x, y)[1])
    if use_graph and (refused := [info.break_reason for info in model.graph_info() if info.break_reason]):
        raise RuntimeError(f"the step was not replayed: {refused[0]}")
    return np.array([float(tensor.to_numpy(loss).item()) for loss in found])


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ten random images of 7x7 squares, the classes, in noise: (x, class ids) of each step."""
    rng = np.random.default_rng(5)
    classes = rng.standard_normal((10, 1, 7, 7)).repeat(4, 2).repeat(4, 3)
    for _ in range(STEPS):
        labels = rng.integers(0, 10, BATCH).astype(np.int32)
        yield 0.3 * (classes[labels] + rng.standard_normal((BATCH, 1, 28, 28))), labels


def compare(dtype: str, mode: str, cpu: np.ndarray, gpu: np.ndarray, limit: float) -> int:
    """Report two curves of losses; 1 if they differ or do not fall."""
    difference = float(np.max(np.abs(gpu - cpu) / np.abs(cpu))) if np.isfinite(gpu).all() else float("inf")
    note = f"CPU {cpu[0]:.4f} to {cpu[-1]:.4f}, GPU {gpu[0]:.4f} to {gpu[-1]:.4f}"
    falls = bool(QUICK or gpu[-5:].mean() < 0.7 * gpu[0])
    report(f"losses of {STEPS} steps, GPU beside CPU, {dtype}, {mode}", difference, limit, note)
    if not falls:
        report(f"the loss falls on the GPU, {dtype}, {mode}", None, met=False, required="falls", note=note)
    return int(not falls or difference > limit)


if __name__ == "__main__":
    sys.exit(main())
