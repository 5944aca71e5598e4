# SPDX-License-Identifier: Apache-2.0
"""What runs say about dist_options: a row an option, of figures over the seeds, and the table of these rows.

What lives here: arithmetic and text. Results are dicts as ``train.RankTraining.run`` returns them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..sync.text import read_dist_option
from .command import markdown_table
from .train import split_threshold

Result = Mapping[str, Any]  # JSON of a run
Results = Mapping[str, Sequence[Result]]  # option -> those of its seeds, at least one each
PARTS = ("compute", "pack", "compress", "wire", "wait", "decompress", "update")  # with a column each


@dataclass(frozen=True)
class Figure:
    """A number of several runs.

    Attributes:
        mean: over the runs.
        lowest, highest: of a run; equal where there is one run.
    """

    mean: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Return the figure of at least one value."""
        mean = statistics.fmean(values)
        return cls(mean, mean, mean) if math.isnan(mean) else cls(mean, min(values), max(values))

    def text(self, form: str, scale: float = 1) -> str:
        """Return the mean, and behind it lowest and highest where they differ, each in a format such as ".2f"."""
        mean, lowest, highest = (
            format(scale * value, form) for value in (self.mean, self.lowest, self.highest)
        )
        return mean if lowest == highest else f"{mean} ({lowest} to {highest})"


@dataclass(frozen=True)
class Row:
    """The results of one option, each figure over the seeds.

    Attributes:
        option: the dist_option.
        num_runs: seeds.
        accuracy, loss: 0 to 1; mean over the last epoch.
        step_bytes: of a step of a rank: the last epoch's bytes by its steps and the ranks.
        run_bytes: of all steps and ranks.
        fp32_ratio: the mean run_bytes of fp32 by those of this option; None without a row of fp32, or without bytes.
        step_ms: mean over the steps of a run.
        parts_ms: name -> the same of a part of the step (sync/step_seconds.py), where all runs know it.
        overlap: the share of the time on the wire that was hidden, 0 to 1; None if not known, or nothing was sent.
        train_s: seconds without evaluations.
        num_reached: runs that reached the target.
        target_s, target_steps, target_bytes: until they did, over these runs; bytes of all ranks. None: no run did.
        is_synthetic: whether the images were made, not those of a data set.
    """

    option: str
    num_runs: int
    accuracy: Figure
    loss: Figure
    step_bytes: Figure
    run_bytes: Figure
    fp32_ratio: float | None
    step_ms: Figure
    parts_ms: Mapping[str, Figure]
    overlap: Figure | None
    train_s: Figure
    num_reached: int
    target_s: Figure | None
    target_steps: Figure | None
    target_bytes: Figure | None
    is_synthetic: bool = False


def rows_of(runs: Results, target: float | None, is_synthetic: bool = False) -> list[Row]:
    """Return a row for each option; ``target`` is an accuracy, 0 to 1, or None, which no run reaches."""
    plain = [option for option in runs if _is_fp32(option)]
    reference = statistics.fmean(_run_bytes(run) for run in runs[plain[0]]) if plain else None
    return [_row(option, results, reference, target, is_synthetic) for option, results in runs.items()]


def when_reached(result: Result, target: float) -> Mapping[str, Any] | None:
    """Return the first of two consecutive evaluations that reach ``target``; None if there are none."""
    pairs = pairwise(result["evaluations"])
    return next((one for one, two in pairs if min(one["accuracy"], two["accuracy"]) >= target), None)


def table(rows: Sequence[Row], target: float | None) -> str:
    """Return the rows as a table in Markdown, of at least one row; the target's columns only if there is one."""
    columns = cells_of(rows, target)
    return markdown_table(list(columns[0]), [list(cells.values()) for cells in columns])


def _row(
    option: str, results: Sequence[Result], reference: float | None, target: float | None, is_synthetic: bool
) -> Row:
    reached = [when_reached(run, target) for run in results] if target is not None else []
    there = [evaluation for evaluation in reached if evaluation is not None]
    run_bytes = Figure.of([_run_bytes(run) for run in results])
    until = {
        name: Figure.of([each[name] for each in there]) if there else None
        for name in ("seconds", "step", "bytes_sent")
    }
    return Row(
        option=option,
        num_runs=len(results),
        accuracy=Figure.of([run["accuracy"] for run in results]),
        loss=Figure.of([run["loss"] for run in results]),
        step_bytes=Figure.of([_step_bytes(run) for run in results]),
        run_bytes=run_bytes,
        fp32_ratio=reference / run_bytes.mean if reference is not None and run_bytes.mean else None,
        step_ms=Figure.of([run["step_ms"] for run in results]),
        parts_ms={
            name: Figure.of([run["parts_ms"][name] for run in results])
            for name in results[0]["parts_ms"]
            if all(name in run["parts_ms"] for run in results)
        },
        overlap=_overlap(results),
        train_s=Figure.of([run["train_s"] for run in results]),
        num_reached=len(there),
        target_s=until["seconds"],
        target_steps=until["step"],
        target_bytes=until["bytes_sent"],
        is_synthetic=is_synthetic,
    )


def cells_of(rows: Sequence[Row], target: float | None) -> list[dict[str, str]]:
    """Return the cells of each row by the names of their columns, the same in all, the target's only if there is one.

    A part of a step has a column if a row knows it.
    """
    parts = [name for name in PARTS if any(name in row.parts_ms for row in rows)]
    return [_cells(row, parts, target) for row in rows]


def _cells(row: Row, parts: Sequence[str], target: float | None) -> dict[str, str]:
    cells = {
        "option": row.option,
        f"accuracy %{', made images' if row.is_synthetic else ''}": row.accuracy.text(".2f", 100),
        "loss": row.loss.text(".4f"),
        "bytes sent a step and rank": row.step_bytes.text(",.0f"),
        "MB sent by all in the run": row.run_bytes.text(",.2f", 1e-6),
        "fp32's / its": "-" if row.fp32_ratio is None else f"{row.fp32_ratio:.1f}",
        "step ms": row.step_ms.text(".1f"),
        **{f"{name} ms": row.parts_ms[name].text(".2f") if name in row.parts_ms else "-" for name in parts},
        "overlap %": "-" if row.overlap is None else row.overlap.text(".0f", 100),
    }
    if target is not None:
        some = "" if row.num_reached in (0, row.num_runs) else f", {row.num_reached} of {row.num_runs} runs"
        cells[f"s to {100 * target:g} %"] = f"{row.target_s.text('.1f')}{some}" if row.target_s else "-"
        cells["steps to it"] = row.target_steps.text(".1f") if row.target_steps else "-"
        cells["MB to it"] = row.target_bytes.text(",.2f", 1e-6) if row.target_bytes else "-"
    return cells


def _overlap(results: Sequence[Result]) -> Figure | None:
    parts = [run["parts_ms"] for run in results]
    if not all(each.get("wire") and "hidden" in each for each in parts):
        return None
    return Figure.of([each["hidden"] / each["wire"] for each in parts])


def _run_bytes(result: Result) -> float:
    return float(sum(result["bytes_sent"]))


def _step_bytes(result: Result) -> float:
    last = result["epochs"][-1]
    return float(last["bytes_sent"]) / (last["steps"] * len(result["bytes_sent"]))


def _is_fp32(option: str) -> bool:
    """Return whether the dist_option is fp32 by any of its names; "threshold=x" in it has no effect there."""
    return read_dist_option(split_threshold(option)[0]).scheme.names[0] == "fp32"
