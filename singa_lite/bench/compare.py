# SPDX-License-Identifier: Apache-2.0
"""Compare two results of `singa-lite bench sync`: ratios B / A of each option, and whether B is worse."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import OptionError, check_number
from .command import markdown_table, run_command
from .report import Figure
from .runs import FORMAT, TABLE

# what two tables must have alike, and what may differ, as a comparison may be of two versions; both are said
REFUSED = ("machine", "devices", "environment", "settings", "inputs", "data", "seeds")
STATED = ("software",)
EPILOG = """
A and B are folders of bench sync, or their table.json. An option is worse in B where a figure is larger by more than
the tolerance (0.2: 1.2 times) and no seed of B is as good as the worst of A; where it is NaN; or where fewer of its
runs reached the target. The exit code is then 1. Errors are 100 % minus the accuracy. Results of other machines,
settings, data or seeds are refused; --anyway compares them, and says what differs. Other software is always said.
"""


@dataclass(frozen=True)
class Change:
    """A figure of an option in A and in B; less is better.

    Attributes:
        before, after: that of A and of B; None where no run has it, as none reached the target.
        is_lost: whether fewer runs of B than of A have it.
    """

    before: Figure | None
    after: Figure | None
    is_lost: bool = False

    @property
    def ratio(self) -> float | None:
        """B's mean by A's; None if one is missing, or if A's is not above 0 and B's differs."""
        if self.before is None or self.after is None:
            return None
        if self.before.mean <= 0:
            return 1.0 if self.after.mean == self.before.mean else None
        return self.after.mean / self.before.mean

    def is_worse(self, tolerance: float) -> bool:
        """Return whether B's is worse, beyond the tolerance and the spread of the seeds."""
        if self.is_lost:
            return True
        if self.before is None or self.after is None:
            return False
        if math.isnan(self.after.mean):  # it has diverged; NaN is not larger than anything
            return not math.isnan(self.before.mean)
        is_beyond = self.after.mean > self.before.mean + tolerance * abs(self.before.mean)
        return is_beyond and self.after.lowest > self.before.highest

    def text(self, tolerance: float) -> str:
        """Return the ratio, behind it both means, and whether that is worse."""
        if self.before is None and self.after is None:
            return "-"
        means = ["-" if figure is None else f"{figure.mean:.4g}" for figure in (self.before, self.after)]
        ratio = "-" if self.ratio is None else f"{self.ratio:.3f}"
        return f"{ratio} ({' to '.join(means)}){', WORSE' if self.is_worse(tolerance) else ''}"


def main(arguments: Sequence[str]) -> int:
    """Run ``singa-lite bench compare`` with these arguments; returns the exit code."""
    parser = argparse.ArgumentParser(prog="singa-lite bench compare", description=__doc__, epilog=EPILOG)
    parser.add_argument("a", type=Path, metavar="A", help="folder, or its table.json")
    parser.add_argument("b", type=Path, metavar="B", help="likewise")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="how much worse does not matter (default 0.2)",
    )
    parser.add_argument(
        "--anyway", action="store_true", help="compare results that differ in more than software"
    )
    given = parser.parse_args(arguments)
    return run_command(parser, lambda: compare(given.a, given.b, given.tolerance, is_anyway=given.anyway))


def compare(a: Path, b: Path, tolerance: float, *, is_anyway: bool = False) -> int:
    """Print the ratios; return 1 where B is worse, else 0.

    Args:
        a, b: folders of bench sync, or files as its table.json.
        tolerance: >= 0.
        is_anyway: whether results of other machines, settings, data or seeds are compared.

    Raises:
        OptionError: there is no such table, the two may not be compared, or have no option in common.
    """
    check_number("bench compare", "tolerance", tolerance, 0)
    before, after = read_table(a), read_table(b)
    refused = differences(before, after, REFUSED)
    if refused and not is_anyway:
        raise OptionError(
            "bench compare: A and B are not results of the same runs; --anyway compares them all the same. They differ "
            "in\n  " + "\n  ".join(refused)
        )
    changes = _changes(before, after)
    for line in (*refused, *differences(before, after, STATED)):
        print(f"differs: {line}")
    for line in _left_out(before, after):
        print(f"left out: {line}")
    print(f"A: {a}\nB: {b}\nB / A (mean of A to mean of B), less is better\n\n{_table(changes, tolerance)}")
    worse = [
        f"{option}: {name}"
        for option, found in changes.items()
        for name, change in found.items()
        if change.is_worse(tolerance)
    ]
    print(
        f"\nworse in B by more than {100 * tolerance:g} % and the seeds' spread: {'; '.join(worse) or 'nothing'}"
    )
    return 1 if worse else 0


def read_table(path: Path) -> Mapping[str, Any]:
    """Return what bench sync wrote.

    Args:
        path: its folder, or the file.

    Raises:
        OptionError: there is no such file, or bench sync has not written it.
    """
    file = path / TABLE if os.path.isdir(path) else path
    try:
        found = json.loads(file.read_bytes())
        if found["format"] != FORMAT or not all(name in found for name in (*REFUSED, *STATED)):
            raise ValueError("another format")
        for row in found["rows"]:
            if not isinstance(row["option"], str):
                raise ValueError("an option that is not text")
            for change in changes_of(row, row, found["target"]).values():
                for value in () if change.before is None else asdict(change.before).values():
                    f"{value:.4g}"  # any number, also infinity and NaN
                change.text(0.0)
    except OSError as error:
        raise OptionError(
            f"bench compare: {file}: {error.strerror}; expected a folder of `bench sync --out`"
        ) from error
    except (ValueError, KeyError, TypeError, ArithmeticError, AttributeError, RecursionError) as error:
        raise OptionError(
            f"bench compare: {file} is not a {TABLE} of this version of `bench sync` ({error!r}); call bench sync "
            "again to write it"
        ) from error
    return found  # type: ignore[no-any-return]


def differences(a: Mapping[str, Any], b: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return a line for each value under ``names`` that two tables have not alike."""
    lines = []
    for name in names:
        before, after = a[name], b[name]
        if not (isinstance(before, dict) and isinstance(after, dict)):
            before, after = {"": before}, {"": after}
        for key in dict.fromkeys([*before, *after]):
            values = [each.get(key, "nothing") for each in (before, after)]
            if values[0] != values[1]:
                lines.append(f"{' '.join(filter(None, (name, key)))}: {values[0]} in A, {values[1]} in B")
    return lines


def changes_of(
    before: Mapping[str, Any], after: Mapping[str, Any], target: float | None
) -> dict[str, Change]:
    """Return the changes of an option by their names.

    Args:
        before, after: its rows in A and in B, of JSON.
        target: accuracy whose time is one of them, 0 to 1; None: it is not.
    """
    rows = (before, after)

    def change(name: str) -> Change:
        return Change(_figure(before[name]), _figure(after[name]))

    found = {
        "step ms": change("step_ms"),
        "bytes of the run": change("run_bytes"),
        "loss": change("loss"),
        "error %": Change(_error(before), _error(after)),
    }
    if target is not None:
        times = [None if row["target_s"] is None else _figure(row["target_s"]) for row in rows]
        shares = [row["num_reached"] / row["num_runs"] for row in rows]
        found[f"s to {100 * target:g} %"] = Change(times[0], times[1], shares[1] < shares[0])
    return found


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, dict[str, Change]]:
    """Return the changes of each option that both tables have; OptionError if there is none."""
    rows = {row["option"]: row for row in b["rows"]}
    target = a["target"] if a["target"] == b["target"] else None
    found = {
        row["option"]: changes_of(row, rows[row["option"]], target)
        for row in a["rows"]
        if row["option"] in rows
    }
    if not found:
        raise OptionError("bench compare: A and B have no option in common")
    return found


def _left_out(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return a line for each thing that one table alone has."""
    options = [[row["option"] for row in table["rows"]] for table in (a, b)]
    lines = [f"{option}, which B has not" for option in options[0] if option not in options[1]]
    lines += [f"{option}, which A has not" for option in options[1] if option not in options[0]]
    if a["target"] != b["target"]:
        lines.append(f"seconds to the target, which is {a['target']} in A and {b['target']} in B")
    return lines


def _figure(numbers: Mapping[str, float | None]) -> Figure:
    """Return a figure of JSON, NaN where bench sync wrote null, for NaN or an infinity."""
    return Figure(**{name: math.nan if value is None else value for name, value in numbers.items()})


def _error(row: Mapping[str, Any]) -> Figure:
    """Return 100 % minus the accuracy."""
    accuracy = _figure(row["accuracy"])
    return Figure(*(100 * (1 - value) for value in (accuracy.mean, accuracy.highest, accuracy.lowest)))


def _table(changes: Mapping[str, Mapping[str, Change]], tolerance: float) -> str:
    names = ["option", *next(iter(changes.values()))]
    rows = [
        [option, *(change.text(tolerance) for change in found.values())] for option, found in changes.items()
    ]
    return markdown_table(names, rows)
