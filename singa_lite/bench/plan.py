# SPDX-License-Identifier: Apache-2.0
"""Predict step time and bytes of each dist_option on a cluster, from a calibration and the cost model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from .calibration import Calibration
from .cost import Bucket, Cluster, Transfer, collective, local_sgd_step_s, step_s, together
from .wire_bytes import Message, bytes_sent, messages_of, options_of, word_of

MOST_HOSTS = 1 << 14  # until here it is searched where an option stops paying
TIE = 1e-9  # share of a step: what is nearer to another than this differs by rounding


class Prediction(NamedTuple):
    """A step of an option.

    Attributes:
        option: its text.
        size: number of ranks.
        sent: bytes that a rank puts on a ring, the mean over steps.
        seconds: the mean time of a step.
    """

    option: str
    size: int
    sent: float
    seconds: float


def predict(calibration: Calibration, cluster: Cluster, option: str, size: int) -> Prediction:
    """Return what a step of ``option`` sends and takes on ``size`` ranks.

    Raises:
        OptionError: an option that the calibration has no times of, or ranks that fill no whole number of hosts.
    """
    times, groups = calibration.options[option], calibration.buckets_of(option)
    if word_of(option) == "localSGD":  # all parameters in one collective
        period = options_of(option).period
        wire, sent = _exchange(cluster, option, [shape for group in groups for shape in group.shapes], size)
        seconds = local_sgd_step_s(calibration.compute_s, calibration.update_s, wire, period)
        return Prediction(option, size, sent / period, seconds)
    buckets, sent = [], 0
    num_elements = sum(_elements(group.shapes) for group in groups)
    for group in groups:
        transfer, num_bytes = _exchange(cluster, option, group.shapes, size)
        sent += num_bytes
        share = _elements(group.shapes) / num_elements
        buckets.append(Bucket(group.ready_s, share * times.compress_s, transfer))
    num_merged = cluster.num_hosts(size) if word_of(option) == "hierarchical" else size
    seconds = step_s(calibration.compute_s, buckets, num_merged * times.merge_s, calibration.update_s)
    return Prediction(option, size, sent, seconds)


def _exchange(
    cluster: Cluster, option: str, shapes: Sequence[tuple[int, ...]], size: int
) -> tuple[Transfer, int]:
    """Return the time of a bucket's collectives and the bytes that a rank sends; of hierarchical, a leader."""
    if word_of(option) != "hierarchical":
        messages = messages_of(option, shapes, size)
        return together(cluster.collective(message, size) for message in messages), bytes_sent(messages, size)
    hosts = cluster.num_hosts(size)
    between = messages_of(option, shapes, hosts)
    within = [Message(kind, 4 * _elements(shapes)) for kind in ("reduce", "broadcast")]
    transfers = [collective(cluster.inner, message, size // hosts) for message in within]
    transfers += [collective(cluster.outer, message, hosts) for message in between]
    return together(transfers), bytes_sent(within, size // hosts) + bytes_sent(between, hosts)


def is_shorter(one: Prediction, other: Prediction) -> bool:
    """Return whether a step is shorter than another by more than rounding."""
    return one.seconds < other.seconds * (1 - TIE)


def shortest(found: Sequence[Prediction]) -> Prediction:
    """Return the prediction of the shortest step: fp32's where none is shorter, else the first of equal ones."""
    best = next((one for one in found if one.option == "fp32"), found[0])
    for one in found:
        if is_shorter(one, best):
            best = one
    return best


def paying_ranges(calibration: Calibration, cluster: Cluster, option: str) -> list[tuple[int, int | None]]:
    """Return from which numbers of ranks an option's step is shorter than fp32's, and at which it no longer is.

    There may be several such ranges, as a collective of few bytes takes another way from some number on. The second
    number is None if it is up to MOST_HOSTS hosts. Ranks fill whole hosts, at least two; beyond 256 hosts the search
    goes in steps of 1 %.
    """

    def is_paying(size: int) -> bool:
        own, plain = (predict(calibration, cluster, name, size) for name in (option, "fp32"))
        return is_shorter(own, plain)

    sizes = (hosts * cluster.per_host for hosts in _host_counts())
    firsts = [(pays, next(group)) for pays, group in groupby(sizes, is_paying)]
    ends = [*(first for _, first in firsts[1:]), None]
    return [(first, end) for (pays, first), end in zip(firsts, ends, strict=True) if pays]


def report(calibration: Calibration, cluster: Cluster, sizes: Sequence[int]) -> str:
    """Return a table of all options for each number of ranks, and where each pays.

    Raises:
        OptionError: see ``predict``.
    """
    lines = [calibration.about] if calibration.about else []
    best = []
    for size in sizes:
        found = [predict(calibration, cluster, option, size) for option in calibration.options]
        plain = next(one.seconds for one in found if one.option == "fp32")
        fastest = shortest(found)
        best.append(f"{size} ranks: {fastest.option}")
        lines += [
            "",
            f"{size} ranks",
            f"  {'option':18} {'bytes a step':>16} {'step ms':>12} {'times fp32':>11}",
        ]
        for one in found:
            mark = "  <- shortest" if one is fastest else ""
            ratio = plain / one.seconds if one.seconds else math.inf
            lines.append(
                f"  {one.option:18} {one.sent:16,.0f} {1000 * one.seconds:12.3f} {ratio:11.2f}{mark}"
            )
    lines += ["", "shortest step"] + [f"  {line}" for line in best]
    lines += ["", "shorter than fp32 (over two hosts and more)"]
    for option in calibration.options:
        if option != "fp32":
            ranges = paying_ranges(calibration, cluster, option)
            lines.append(f"  {option:18} {_ranges_text(ranges, cluster)}")
    return "\n".join(lines)


def _ranges_text(found: Sequence[tuple[int, int | None]], cluster: Cluster) -> str:
    most = MOST_HOSTS * cluster.per_host
    texts = [
        f"from {first} ranks "
        + (f"on, as far as {most}" if end is None else f"until it stops paying at {end}")
        for first, end in found
    ]
    return "; again ".join(texts) or "never"


def _host_counts() -> Iterable[int]:
    hosts = 2
    while hosts <= MOST_HOSTS:
        yield hosts
        hosts += max(1, hosts // 100) if hosts >= 256 else 1


def _elements(shapes: Iterable[Sequence[int]]) -> int:
    return sum(map(math.prod, shapes))
