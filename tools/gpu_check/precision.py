# SPDX-License-Identifier: Apache-2.0
"""Mixed precision on the GPU: kernels beside float64, losses beside float32, and captured steps beside eager ones.

    python -m tools.gpu_check.precision

Products, convolutions and their gradients of tests/backend/test_cuda_precision.py, the largest error of each over the
sum of magnitudes, for each rounding; products whose long sums cancel; and 15 steps of a model with convolutions, batch
norm, attention and layer norm, in one process, with the loss scaled. A precision that this GPU or cupy does not have is
named. Exits 1 if something failed.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import numpy as np

from benchmarks.gpu.rows import QUICK, explain, report

STEPS = 6 if QUICK else 15
CURVE, MODES = 5e-2, 2e-2  # losses beside float32, and of captured steps beside eager ones


def main() -> int:
    from singa_lite import device
    from singa_lite.autograd.autocast import LOW

    gpu, failures = device.create_cuda_gpu(), 0
    for precision in LOW:
        if reason := gpu.backend.missing_precisions.get(precision):
            report(f"precision {precision}", None, note=f"skipped: {reason}")
            continue
        for check in (check_kernels, check_losses):
            try:
                failures += check(gpu, precision)
            except Exception as error:
                traceback.print_exc()
                report(
                    f"{check.__name__}, {precision}", None, met=False, required="works", note=explain(error)
                )
                failures += 1
    return int(failures > 0)


def check_kernels(gpu: Any, precision: str) -> int:
    """Report a row for each kernel; return how many are too far off."""
    from singa_lite.autograd.autocast import LOW
    from tests.backend.test_cuda_precision import CASES, LONG_SUMS, TOLERANCE, error_of_long_sums, errors_of

    largest: dict[tuple[str, str], float] = {}
    for case in CASES:
        for errors, dtype in errors_of(gpu.backend, case, LOW[precision]):
            key = case[0], str(dtype)
            error = float(np.nan_to_num(errors, nan=np.inf, posinf=np.inf).max(initial=0))
            largest[key] = max(largest.get(key, 0.0), error)
    for (kernel, dtype), error in largest.items():
        report(
            f"{kernel} of {precision}, rounded to {dtype}: error over the sum of magnitudes, for each rounding",
            error,
            TOLERANCE[dtype],
        )
    long = error_of_long_sums(gpu.backend, LOW[precision])
    report(
        f"matmul of {precision}, 65536 terms that cancel: error over the sum of magnitudes", long, LONG_SUMS
    )
    return (long > LONG_SUMS) + sum(error > TOLERANCE[dtype] for (_, dtype), error in largest.items())


def check_losses(gpu: Any, precision: str) -> int:
    """Report how far losses are from float32's, and recorded ones from eager ones; return how many are too far."""
    wide = losses(gpu, "fp32", False)
    eager, graph = (losses(gpu, precision, use_graph) for use_graph in (False, True))
    rows = (
        (f"losses of {STEPS} steps, {precision} beside float32", eager, wide, CURVE),
        (f"losses of {STEPS} steps, {precision}, captured beside eager", graph, eager, MODES),
    )
    failures = 0
    for what, found, expected, limit in rows:
        difference = float(np.max(np.abs(found - expected))) if np.isfinite(found).all() else float("inf")
        report(what, difference, limit, f"{found[0]:.4f} to {found[-1]:.4f}")
        failures += difference > limit
    return failures


def losses(gpu: Any, precision: str, use_graph: bool) -> np.ndarray:
    """Return the loss of each of STEPS updates, float64; a batch whose update is left out comes again."""
    from tests.backend.test_cuda_precision import compiled, curve
    from tests.test_precision import Plain

    return np.array(curve(compiled(gpu, use_graph, precision, Plain), gpu, STEPS))


if __name__ == "__main__":
    sys.exit(main())
