# SPDX-License-Identifier: Apache-2.0
"""The comparison's charts as a PNG, by matplotlib, which is optional."""

from __future__ import annotations

import io

import numpy as np

from .page import CHARTS, colour_of, points_of
from .report import Results

INCHES, DPI = (15.0, 5.5), 100


def picture(results: Results, heading: str) -> bytes | None:
    """Return a PNG with the charts of ``page`` below the heading; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogFormatter
    except ImportError:
        return None
    figure = Figure(figsize=INCHES, dpi=DPI)
    figure.subplots_adjust(left=0.05, right=0.99, top=0.86, wspace=0.2)
    figure.suptitle(heading, fontsize=7, x=0.01, horizontalalignment="left", wrap=True)
    for axes, (label, name, scale) in zip(figure.subplots(1, len(CHARTS)), CHARTS, strict=True):
        for number, (option, runs) in enumerate(results.items()):
            for run in runs:
                xs, ys = np.array(points_of(run, name, scale)).reshape(-1, 2).T
                legend = option if run is runs[0] else None  # a line for an option, not for each seed
                axes.plot(xs, ys, color=colour_of(number), alpha=0.8, marker=".", label=legend)
        axes.set(xlabel=label, ylabel="evaluation error, %")
        if any(line.get_xdata().size for line in axes.lines):  # a world of one sends no bytes
            axes.set(xscale="log", yscale="log")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(LogFormatter())
                axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.2, 0.5)))
        axes.grid(which="both", color="#eeeeee")
    figure.axes[0].legend(fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
