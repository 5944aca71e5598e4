# SPDX-License-Identifier: Apache-2.0
"""Time to find the 1 % of largest magnitude of 25 million float32 elements on a GPU, beside torch.topk.

    python -m benchmarks.gpu.top_k

Both in turn on the same values (gradients: normal; equal: many elements of the border's size), medians. The kernel
takes the values, and gives indices in order and the chosen values; torch.topk(sorted=False) is handed the magnitudes
ready made, and its time does not count the gathering of values. The choice is compared with numpy's: same
elements, ties at the lowest index. Exits 1 when it is not the same.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from benchmarks.gpu.rows import QUICK, TORCH_DEVICE, explain, medians_ms, report
from benchmarks.gpu.step import free, synchronize, torch_module
from singa_lite import device

ELEMENTS, SHARE, LIMIT = 20_000 if QUICK else 25_000_000, 0.01, 0.5


def main() -> int:
    gpu = device.create_cuda_gpu()
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(ELEMENTS, dtype=np.float32)
    return max([compare(gpu, "normal", normal), compare(gpu, "equal", np.round(normal, 1))])


def compare(gpu: Any, name: str, values: np.ndarray) -> int:
    """Report a time and a check; 1 if the kernel chose otherwise than a sort. ``gpu``: a Device."""
    k, backend = round(ELEMENTS * SHARE), gpu.backend
    ours = backend.asarray(values)
    out = backend.empty((k,), np.int32), backend.empty((k,), np.float32)
    steps: dict[str, Any] = {"top_k": lambda: backend.run("top_k", ours, out=out, k=k)}
    if torch := torch_module():
        try:
            theirs = torch.from_numpy(np.abs(values)).to(TORCH_DEVICE)
            steps["torch.topk"] = lambda: torch.topk(theirs, k, sorted=False)
            steps["torch.topk"]()
        except RuntimeError as error:
            report(f"top-K beside torch.topk, {name} values", None, note=explain(error))
            del steps["torch.topk"]
    medians = medians_ms(steps, lambda: synchronize(gpu))
    note = ", ".join(f"{step} {ms:.3f} ms" for step, ms in medians.items())
    ratio = medians["top_k"] / medians["torch.topk"] if "torch.topk" in medians else None
    title = f"{SHARE:.0%} of {ELEMENTS / 1e6:g} M"
    report(f"top-K, {title}, {name} values, / torch.topk", ratio, LIMIT, note)
    indices, selected = map(backend.to_numpy, out)
    expected = largest(np.abs(values), k)
    is_exact = np.array_equal(indices, expected) and np.array_equal(selected, values[expected])
    report(
        f"top-K, {title}, {name} values, is exact",
        "yes" if is_exact else "NO",
        met=is_exact,
        required="exact",
    )
    free(gpu)
    return int(not is_exact)


def largest(magnitudes: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest, ascending; of equal ones the lowest."""
    border = np.partition(magnitudes, magnitudes.size - k)[magnitudes.size - k]
    above = np.flatnonzero(magnitudes > border)
    return np.sort(np.append(above, np.flatnonzero(magnitudes == border)[: k - above.size]))


if __name__ == "__main__":
    sys.exit(main())
