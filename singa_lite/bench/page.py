# SPDX-License-Identifier: Apache-2.0
"""The comparison as one HTML file: the table, and charts as SVG within; no script, nothing loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from .report import Result, Results, Row, cells_of

WIDTH, HEIGHT, LEFT, BOTTOM, MARGIN = 460, 320, 56, 44, 12  # of a chart, in CSS pixels
# six of Okabe and Ito, and two more
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#555555")
# what the error is drawn over: label, name in an evaluation, factor
CHARTS = (
    ("seconds of training", "seconds", 1.0),
    ("MB sent by all ranks", "bytes_sent", 1e-6),
    ("steps", "step", 1.0),
)
LEAST_ERROR = 0.01  # %: an error of 0 has no logarithm
STYLE = (
    "body{font:15px/1.5 sans-serif;margin:2em auto;max-width:72em;padding:0 1em;color:#222;background:#fff}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:.25em .7em;border-bottom:1px solid #ccc;"
    "text-align:right}td:first-child,th:first-child{text-align:left}svg{margin:1em 1em 0 0}.scroll{overflow-x:auto}"
    "text{font:12px sans-serif;fill:#222}pre{white-space:pre-wrap;font-size:13px}"
)


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis.

    Attributes:
        low, high: the values at its ends, 0 < low < high.
        start, end: their positions, in pixels.
    """

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> Axis:
        """Return an axis that holds all of ``values`` > 0; of none, one from 1 to 10."""
        low, high = min(values, default=1.0), max(values, default=10.0)
        return cls(low / 1.1, high * 1.1, start, end)

    def position(self, value: float) -> float:
        """Return the position of a value, in pixels."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return the values 1, 2 and 5 times a power of ten that are on the axis."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        return [value for value in found if self.low <= value <= self.high]


def page(rows: Sequence[Row], results: Results, heading: str, target: float | None) -> str:
    """Return the HTML text.

    Args:
        rows: of the table, at least one.
        results: what the charts show.
        heading: lines that say how the runs were made.
        target: accuracy, 0 to 1, that the table has columns of; None: it has none.
    """
    charts = [_chart(label, results, name, scale) for label, name, scale in CHARTS]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>dist_options</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>dist_options compared</h1>\n<pre>{escape(heading)}</pre>\n"
        f"{_table(cells_of(rows, target))}\n"
        "<p>Evaluation error over what it took, a line a seed. Both axes are logarithmic; an error below "
        f"{LEAST_ERROR} % is drawn there.</p>\n<p>{_legend(list(results))}</p>\n{chr(10).join(charts)}\n"
        "</body></html>\n"
    )


def _table(lines: Sequence[Mapping[str, str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in lines[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line.values()) + "</tr>\n" for line in lines
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _legend(options: Sequence[str]) -> str:
    marks = (
        f'<span style="color:{colour_of(number)}">&#9632;</span> {escape(option)}'
        for number, option in enumerate(options)
    )
    return " &#160; ".join(marks)


def _chart(label: str, results: Results, name: str, scale: float) -> str:
    """Return an SVG of the error over one of the numbers of evaluations."""
    lines = [
        (number, points_of(run, name, scale)) for number, runs in enumerate(results.values()) for run in runs
    ]
    across = Axis.over([x for _, points in lines for x, _ in points], LEFT, WIDTH - MARGIN)
    up = Axis.over([y for _, points in lines for _, y in points], HEIGHT - BOTTOM, MARGIN)
    drawn = "\n".join(
        f'<polyline fill="none" stroke="{colour_of(number)}" stroke-opacity="0.8" stroke-width="1.5" points="'
        + " ".join(f"{across.position(x):.1f},{up.position(y):.1f}" for x, y in points)
        + '"/>'
        for number, points in lines
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="evaluation error over {escape(label)}">\n{_grid(across, up)}\n'
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(label)}</text>\n'
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">'
        f"evaluation error, %</text>\n{drawn}\n</svg>"
    )


def _grid(across: Axis, up: Axis) -> str:
    """Return lines and numbers at the ticks of both axes."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - MARGIN
    parts = []
    for value in across.ticks():
        x = f"{across.position(value):.1f}"
        parts.append(f'<line x1="{x}" x2="{x}" y1="{MARGIN}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>')
    for value in up.ticks():
        y = up.position(value)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    return "".join(parts)


def points_of(run: Result, name: str, scale: float) -> list[tuple[float, float]]:
    """Return (number, error in %) of each evaluation; one before anything was sent has no place on the axis."""
    found = ((scale * each[name], 100 * (1 - each["accuracy"])) for each in run["evaluations"])
    return [(x, max(error, LEAST_ERROR)) for x, error in found if x > 0]


def colour_of(number: int) -> str:
    """Return the colour of an option by its place among all."""
    return COLOURS[number % len(COLOURS)]
