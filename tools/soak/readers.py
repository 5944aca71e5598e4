# SPDX-License-Identifier: Apache-2.0
"""Give damaged files to every reader of the package: each read must give the right value or a typed error.

    python -m tools.soak.readers --files 1000 --seed 0
    python -m tools.soak.readers --minutes 30
    python -m tools.soak.readers --only "bench run" --index 123

Files are damaged by damage.py, readers are in file_readers/. A read is *right* if it gives the value of the file as it
was, or of another whole one, such as an older checkpoint; *typed* if it raises a SingaLiteError or what its
documentation names; *other* if it gives another value where no checksum could tell. All else is a finding: another
exception, the end of the process, no end within DEADLINE_S, more than SPARE_BYTES of memory, files written elsewhere,
an error after a part was loaded, and another value although there is a checksum. Readers run in processes of their
own, which are started again if they die.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.soak.file_readers import READERS
from tools.soak.file_readers.reader import Reader
from tools.soak.reading import OTHER, RIGHT, TYPED, Outcome, read_files

DEADLINE_S = 20.0  # of a read, which takes milliseconds


@dataclass
class Row:
    """What came of all reads by a reader."""

    reader: Reader
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[int, Outcome]] = field(default_factory=list)

    def add(self, index: int, outcome: Outcome) -> None:
        self.counts["finding" if outcome.is_finding else outcome.kind] += 1
        if outcome.is_finding:
            self.findings.append((index, outcome))


def outcomes(
    reader: Reader, root: Path, indices: range, seed: int, deadline_s: float
) -> Iterator[tuple[int, Outcome]]:
    """Yield the outcome of each index, of as many processes as that needs."""
    context = multiprocessing.get_context("fork")
    left = list(indices)
    while left:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=read_files, args=(there, reader, root, left, seed), daemon=True)
        process.start()
        there.close()
        index, why = None, "no end within the deadline"
        try:
            while left and here.poll(deadline_s if index is not None else 10 * deadline_s):
                message = here.recv()
                if isinstance(message, Outcome):
                    yield left.pop(0), message
                index = None if isinstance(message, Outcome) else message
        except EOFError:
            process.join()
            code = process.exitcode or 0
            why = f"the process ended: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
        process.kill()
        process.join()
        here.close()
        if left and index is None:
            raise SystemExit(f"{reader.name}: valid files cannot be made or read: {why}")
        if left:
            yield left.pop(0), Outcome(why, "see --only and --index")


def soak(
    file_readers: Sequence[Reader],
    num_files: int,
    seed: int,
    root: Path,
    deadline_s: float = DEADLINE_S,
    first: int = 0,
) -> list[Row]:
    """Read ``num_files`` damaged files of each reader."""
    rows = []
    for number, reader in enumerate(file_readers):
        row, place = Row(reader), root / str(number)
        place.mkdir(exist_ok=True)
        for index, outcome in outcomes(reader, place, range(first, first + num_files), seed, deadline_s):
            row.add(index, outcome)
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return counts as a table in Markdown."""
    lines = ["| files | read by | checksum, or what is free | read | right | typed | other | findings |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in rows:
        counts = [row.counts.total(), *(row.counts[kind] for kind in (RIGHT, TYPED, OTHER, "finding"))]
        cells = [
            row.reader.name,
            row.reader.module,
            row.reader.protects or row.reader.free,
            *map(str, counts),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Give damaged files to every reader")
    parser.add_argument("--files", type=int, default=1000, help="for each reader (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with other seeds for so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the files of one row of the table")
    parser.add_argument("--index", type=int, help="one damaged file alone")
    given = parser.parse_args()
    file_readers = [reader for reader in READERS if given.only in (None, reader.name)]
    rows, end = [Row(reader) for reader in file_readers], time.monotonic() + 60 * given.minutes
    num_files, first = (given.files, 0) if given.index is None else (1, given.index)
    for seed in range(given.seed, sys.maxsize):
        with tempfile.TemporaryDirectory(prefix="singa_lite-soak-") as name:
            for row, more in zip(
                rows, soak(file_readers, num_files, seed, Path(name), first=first), strict=True
            ):
                row.counts += more.counts
                row.findings += more.findings
                for index, outcome in more.findings:
                    print(
                        f"FINDING {row.reader.name!r} --seed {seed} --index {index}: {outcome.how}: {outcome.kind}"
                    )
        if time.monotonic() >= end:
            break
    print(table(rows))
    print(
        f"{sum(row.counts.total() for row in rows)} files, {sum(len(row.findings) for row in rows)} findings"
    )
    return 1 if any(row.findings for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
