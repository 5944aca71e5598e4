# SPDX-License-Identifier: Apache-2.0
"""Time to find the 1 % of largest magnitude of 25 million float32 elements: the kernel top_k beside numpy.

    python benchmarks/top_k.py
    python benchmarks/top_k.py --elements 1000000 --share 0.05 --rounds 30

One thread, one process, both alternately on the same values (gradients: normal; equal: many elements of the border's
size). Taking magnitudes is timed on both sides: numpy does np.abs and np.argpartition and takes the chosen values,
the kernel writes indices and values into arrays it is given. The choice is compared with a stable full sort: same
elements, ties at the lowest index. Exits 1 when it is not the same. Printed: medians and their ratio.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when the kernels are loaded

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from interleaved import machine

from singa_lite import _native
from singa_lite.backend.cpu import CpuBackend


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--share", type=float, default=0.01, help="of the elements, 0 to 1")
    parser.add_argument("--rounds", type=int, default=9, help="calls of each")
    arguments = parser.parse_args()
    k = max(1, round(arguments.elements * arguments.share))
    kernels, reason = _native.load("_kernels")
    print(f"{machine()}; numpy {np.__version__}; kernels: {'native' if kernels else reason}")
    print(f"{'values':8} {'numpy ms':>9} {'ours ms':>9} {'share':>6}  exact")
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(arguments.elements, dtype=np.float32)
    cases = {"normal": normal, "equal": np.round(normal, 1)}
    return max([report(name, values, k, arguments.rounds) for name, values in cases.items()])


def report(name: str, values: np.ndarray, k: int, rounds: int) -> int:
    """Print a row; 1 if the kernel chose otherwise than a sort."""
    backend = CpuBackend()
    out = np.empty(k, np.int32), np.empty(k, np.float32)

    def theirs() -> tuple[np.ndarray, np.ndarray]:
        indices = np.argpartition(np.abs(values), values.size - k)[values.size - k :]
        return indices, values[indices]

    times = time_alternately([theirs, lambda: backend.run("top_k", values, out=out, k=k)], rounds)
    is_exact = is_same_as_sort(values, k, *out)
    numpy_ms, our_ms = map(statistics.median, times)
    print(f"{name:8} {numpy_ms:9.1f} {our_ms:9.1f} {our_ms / numpy_ms:6.3f}  {'yes' if is_exact else 'NO'}")
    return int(not is_exact)


def time_alternately(calls: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Times of each call in ms; the first round is not counted."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        for call, ms in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            if number:
                ms.append((time.perf_counter() - begin) * 1e3)
    return times


def is_same_as_sort(values: np.ndarray, k: int, indices: np.ndarray, selected: np.ndarray) -> bool:
    """Whether the indices, ascending, are the first k of a stable sort by falling magnitude."""
    expected = np.sort(np.argsort(-np.abs(values), kind="stable")[:k])
    return np.array_equal(indices, expected) and np.array_equal(selected, values[expected])


if __name__ == "__main__":
    sys.exit(main())
