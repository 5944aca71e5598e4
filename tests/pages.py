# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/ for scripts of other frameworks: rows of (their name, ours), and which names these give."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import singa_lite

DOCS = Path(__file__).parents[1] / "docs"
Rows = list[tuple[str, str]]


def read_page(name: str) -> tuple[str, Rows]:
    """The text of docs/``name``.md, and the rows of its tables of two columns."""
    text = (DOCS / f"{name}.md").read_text()
    return text, re.findall(r"^\| (.*) \| (.*) \|$", text, re.MULTILINE)


def dotted_names(rows: Rows) -> set[str]:
    """Each dotted name of the right-hand column."""
    return {
        name
        for _, ours in rows
        for quoted in re.findall(r"`([^`]*)`", ours)
        for name in re.findall(r"^[A-Za-z_.]+$", quoted.replace(" ", "\n"), re.MULTILINE)
        if "." in name
    }


def exists(name: str, starts: Mapping[str, object]) -> bool:
    """Whether there is a dotted name, whose first part is one of ``starts`` or of the package."""
    first, *rest = name.split(".")
    value = starts.get(first) or getattr(singa_lite, first)
    for part in rest:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def script_of(text: str) -> str:
    """The one script on a page."""
    [source] = re.findall(r"```python\n(import .*?)```", text, re.DOTALL)
    return str(source)


def lines_of_ranks(output: str) -> list[str]:
    """What each rank has printed, without the launcher's label."""
    return [line.split("] ")[-1] for line in output.splitlines()]
