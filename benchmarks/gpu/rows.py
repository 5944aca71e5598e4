# SPDX-License-Identifier: Apache-2.0
"""What the parts of tools/gpu_check/check.py share: rows of its report, and a clock for work that a device does later.

GPU_CHECK_QUICK=1 takes tiny sizes, GPU_CHECK_TORCH=cpu runs PyTorch's side on the CPU: for trying the scripts
themselves on a machine without a GPU, where their figures mean nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

QUICK = os.environ.get("GPU_CHECK_QUICK") == "1"
TORCH_DEVICE = os.environ.get("GPU_CHECK_TORCH", "cuda")
ROUNDS = 2 if QUICK else 11
TURN_S = 0.001 if QUICK else 0.05  # a turn of one step; long enough that its end, a wait, costs nothing
MAX_CALLS = 100  # in a turn
SKIPPED = 77  # exit code of a part that cannot run here, and has said why in a row


def report(
    what: str,
    figure: float | int | str | None,
    limit: float | None = None,
    note: str = "",
    *,
    met: bool | None = None,
    required: str = "",
) -> None:
    """Print a row, and hand it to check.py if that runs this.

    Args:
        what: is measured or tested.
        figure: what came out; None: nothing, and ``note`` says why.
        limit: the figure must not be above it; None: nothing is required, or ``met`` says whether it is met.
        note: in a few words.
        met: whether what is required came out, where it is no limit.
        required: what that is; by default "<= limit".
    """
    if limit is not None:
        met = isinstance(figure, (int, float)) and figure <= limit
        required = required or f"<= {limit:g}"
    row = {"what": what, "figure": figure, "required": required, "met": met, "note": note}
    shown = f"{figure:.4g}" if isinstance(figure, float) else figure
    verdict = {True: "met", False: "MISSED", None: ""}[met]
    print(f"{what}: {shown} {required} {verdict} {note}".rstrip(), flush=True)
    if path := os.environ.get("GPU_CHECK_ROWS"):
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")


def explain(error: BaseException) -> str:
    """An error in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def medians_ms(
    steps: Mapping[str, Callable[[], object]], synchronize: Callable[[], object], rounds: int = ROUNDS
) -> dict[str, float]:
    """Median time of one call in ms; the steps take turns, and each turn ends when the device is idle.

    Args:
        steps: by name, all warm.
        synchronize: waits for the device.
        rounds: turns of each.
    """
    calls = {name: calls_in_turn(step, synchronize) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(turn_s(step, synchronize, calls[name]) / calls[name] * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def calls_in_turn(step: Callable[[], object], synchronize: Callable[[], object]) -> int:
    turn_s(step, synchronize, 1)
    return int(min(MAX_CALLS, max(1, TURN_S // turn_s(step, synchronize, 1))))


def turn_s(step: Callable[[], object], synchronize: Callable[[], object], calls: int) -> float:
    """Seconds of so many calls, from an idle device to an idle device."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    synchronize()
    return time.perf_counter() - begin
