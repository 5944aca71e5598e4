# SPDX-License-Identifier: Apache-2.0
"""Where the time of replayed steps went: sums that records add to and a device prints, in SINGA's words."""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import check_choice

SKIP_ITERATION = 5  # SINGA's default: the first replays are slower


@dataclass
class Entry:
    """One call of a record: its phase ("Forward", "Backward" or "Dist"), its name, and its seconds in all."""

    phase: str
    name: str
    seconds: float = 0.0


@dataclass
class TimeProfile:
    """The times that a device measured.

    Attributes:
        verbosity: 0 measures nothing; 1 prints phases, 2 every call, 3 the calls of synchronisation only.
        skip_iteration: replays not counted at the start of each record.
        entries: by record and position in it.
        iterations: replays of each record.
        counted: those whose seconds the entries have.
    """

    verbosity: int = 0
    skip_iteration: int = SKIP_ITERATION
    entries: dict[int, list[Entry]] = field(default_factory=dict)
    iterations: dict[int, int] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)

    def set_verbosity(self, verbosity: int) -> None:
        """Choose what is measured from the next replay on; what was measured is forgotten."""
        check_choice("SetVerbosity", "verbosity", verbosity, (0, 1, 2, 3))
        self.verbosity = verbosity
        self.entries.clear()
        self.iterations.clear()
        self.counted.clear()

    def add(self, record: int, names: list[tuple[str, str]], seconds: list[float]) -> None:
        """Add one replay: (phase, name) and seconds of each call."""
        entries = self.entries.setdefault(record, [Entry(phase, name) for phase, name in names])
        count = self.iterations[record] = self.iterations.get(record, 0) + 1
        if count > self.skip_iteration:
            self.counted[record] = self.counted.get(record, 0) + 1
            for entry, spent in zip(entries, seconds, strict=True):
                entry.seconds += spent

    def text(self) -> str:
        """Return the table, seconds per replay."""
        lines = ["Time Profiling:"]
        for record, entries in self.entries.items():
            count = self.counted.get(record, 0)
            if count == 0:
                lines.append(f"(no replay counted yet: the first {self.skip_iteration} are skipped)")
                continue
            if self.verbosity == 1:
                for phase, label in (
                    ("Forward", "Forward Propagation"),
                    ("Backward", "Backward Propagation"),
                    ("Dist", "Dist"),
                ):
                    spent = sum(entry.seconds for entry in entries if entry.phase == phase) / count
                    lines.append(f"{label} Time : {spent:.6f} sec")
            for number, entry in enumerate(entries):
                if self.verbosity == 2 or (self.verbosity == 3 and entry.phase == "Dist"):
                    lines.append(f"OP_ID{number}. {entry.name} : {entry.seconds / count:.6f} sec")
        return "\n".join(lines)
