# SPDX-License-Identifier: Apache-2.0
"""Compare what the cost model predicts with training steps of processes of this host: `plan --validate`.

What lives here: starting the ranks, predicting, and the table. What does not: what a rank times (validation_rank.py).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..comm.link import Link
from ..errors import CommError, OptionError
from ..launch.one_host import LaunchOptions, launch
from .command import rank_command
from .cost import Cluster, Network, Transfer
from .plan import predict
from .validation_rank import Found, Trial, read_found
from .wire_bytes import Message, options_of, word_of

MEDIAN_LIMIT, WORST_LIMIT = 0.15, 0.30  # relative errors


class Row(NamedTuple):
    """A step of an option, in seconds and bytes that a rank sends.

    Attributes:
        option, size: which dist_option on how many ranks.
        predicted, measured: seconds.
        predicted_bytes, sent: bytes.
    """

    option: str
    size: int
    predicted: float
    measured: float
    predicted_bytes: float
    sent: float

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class HostCluster(Cluster):
    """The ranks of this host, of which each has an emulated link or none.

    Attributes:
        transport, call_s: see ``Found``.
    """

    transport: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    call_s: float = 0.0

    @classmethod
    def of(cls, found: Found, link: Link | None) -> HostCluster:
        """Return the cluster with the transport times ``found``; ``link`` None: without an emulated link."""
        none = Network(0.0, 0.0)
        outer = none if link is None else Network.of_link(link)
        return cls(none, outer, 1, found.transport, found.call_s)

    def collective(self, message: Message, size: int) -> Transfer:
        """Return the time of a collective: the link's, unless this host takes longer to move the data."""
        on_link = super().collective(message, size)
        on_link = on_link._replace(latency_s=on_link.latency_s + self.call_s)
        short_s, byte_s = self.transport[message.kind]
        return max(on_link, Transfer(byte_s * message.payload, short_s), key=lambda one: one.total_s)


def check_trial(trial: Trial) -> None:
    """Raise OptionError for an option that cannot be validated on one host."""
    for option in trial.options:
        if word_of(option) == "hierarchical":
            raise OptionError(f"plan --validate: {option} sends nothing on one host; leave it out")
        for name in ("warmup", "start"):
            if getattr(options_of(option), name, 0):
                raise OptionError(
                    f"plan --validate: {option} sends other messages at first, and a step after that is predicted; "
                    f"leave {name} out"
                )


def validate(trial: Trial, sizes: Sequence[int], link: Link | None) -> bool:
    """Measure and predict steps on each number of ranks, and print both; return whether the errors are small enough.

    Args:
        trial: what is measured.
        sizes: numbers of ranks, each >= 1.
        link: emulated for each rank; None: the transport of this host.

    Raises:
        OptionError: see ``check_trial``. CommError: the ranks failed.
    """
    check_trial(trial)
    rows: list[Row] = []
    for size in sizes:
        found = _find(trial, size, link)
        of_size = compare(trial, found, size, link)
        rows += of_size
        print(table(of_size, found), flush=True)
    print(summary(rows), flush=True)
    return is_valid(rows)


def compare(trial: Trial, found: Found, size: int, link: Link | None) -> list[Row]:
    """Return a Row for each option of ``trial``."""
    rows, cluster = [], HostCluster.of(found, link)
    for option in trial.options:
        _, _, sent, seconds = predict(found.calibration, cluster, option, size)
        rows.append(Row(option, size, seconds, found.measured[option], sent, found.sent[option]))
    return rows


def is_valid(rows: Sequence[Row]) -> bool:
    """Return whether bytes are those predicted, and times to the accuracy that is asked for."""
    errors = [abs(row.error) for row in rows]
    is_exact = all(row.predicted_bytes == row.sent for row in rows)
    return is_exact and statistics.median(errors) <= MEDIAN_LIMIT and max(errors) <= WORST_LIMIT


def table(rows: Sequence[Row], found: Found) -> str:
    """Return a table of the rows of one number of ranks."""
    lines = [
        f"{rows[0].size} ranks (calibrated in {found.calibrating_s:.0f} s, load {found.load:.1f})",
        f"  {'option':18} {'bytes a step':>14} {'predicted ms':>13} {'measured ms':>12} {'error':>8}",
    ]
    for row in rows:
        lines.append(
            f"  {row.option:18} {row.sent:14,.0f} {1000 * row.predicted:13.3f} {1000 * row.measured:12.3f} "
            f"{100 * row.error:+7.1f} %"
        )
        if row.predicted_bytes != row.sent:
            lines.append(f"    predicted were {row.predicted_bytes:,.1f} bytes, sent {row.sent:,.1f}")
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Row]) -> str:
    """Return the errors of all rows beside what they may be."""
    worst = max(rows, key=lambda row: abs(row.error))
    median = statistics.median(abs(row.error) for row in rows)
    return (
        f"error: median {100 * median:.1f} % (at most {100 * MEDIAN_LIMIT:.0f} %), "
        f"worst {100 * abs(worst.error):.1f} % (at most {100 * WORST_LIMIT:.0f} %): "
        f"{worst.option} on {worst.size} ranks; {'within' if is_valid(rows) else 'beyond'} the limits"
    )


def _find(trial: Trial, size: int, link: Link | None) -> Found:
    """Return what ``size`` ranks find, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = rank_command("validation_rank", json.dumps(asdict(trial)), str(path))
        text = None if link is None else str(link)
        code = launch(command, size, LaunchOptions(num_servers=0, link=text))
        if code != 0 or not path.exists():
            raise CommError(f"plan --validate: {size} ranks ended with exit code {code}, see above")
        return read_found(path)
