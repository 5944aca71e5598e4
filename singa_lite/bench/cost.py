# SPDX-License-Identifier: Apache-2.0
"""How long collectives and training steps take: closed formulas, nothing measured.

What lives here: times of one collective, and of a step whose buckets leave as they become ready. What does not: which
messages an option sends (wire_bytes.py).

Note [symbols]: N ranks; B the payload in bytes; α seconds from a rank to the next (latency and the overhead of sending
and receiving); β seconds for a byte on a rank's link; adding costs nothing. A collective's time is in two
parts, as collectives in flight share a link but not latency: how long it holds the link, and how long after it ends.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..comm.base import KINDS
from ..comm.link import Link
from ..errors import OptionError, check_choice, check_int, check_number
from .wire_bytes import Message

ALGORITHMS = ("ring", "doubling", "smaller")


@dataclass(frozen=True)
class Network:
    """The links of all ranks.

    Attributes:
        hop_s: α, seconds from a rank to the next.
        byte_s: β, seconds for a byte.
        algorithm: of all-reduce: "ring" and "doubling" always that one, "smaller" the one that takes less time, as MPI
            and NCCL choose. The emulated link of comm/link.py is a ring.
    """

    hop_s: float
    byte_s: float
    algorithm: str = "ring"

    def __post_init__(self) -> None:
        for name in ("hop_s", "byte_s"):
            check_number("Network", name, getattr(self, name), 0)
        check_choice("Network", "algorithm", self.algorithm, ALGORITHMS)

    @classmethod
    def of_link(cls, link: Link, algorithm: str = "ring") -> Network:
        """Return the network of ranks that each have such a link."""
        return cls(link.latency_ns / 1e9, 8 / link.bits_per_s, algorithm=algorithm)


class Transfer(NamedTuple):
    """The time of a collective, see Note [symbols].

    Attributes:
        link_s: seconds that it holds the link.
        latency_s: seconds from then to its end.
    """

    link_s: float
    latency_s: float

    @property
    def total_s(self) -> float:
        return self.link_s + self.latency_s


def together(transfers: Iterable[Transfer]) -> Transfer:
    """Return the time of transfers of which each waits for the one before."""
    listed = list(transfers)
    return Transfer(sum(one.link_s for one in listed), sum(one.latency_s for one in listed))


# ---- collectives -------------------------------------------------------------------------------------


def ring_all_reduce(network: Network, payload: float, size: int) -> Transfer:
    """Return the time of an all-reduce on a ring: 2(N-1) α + 2(N-1)/N β B."""
    steps, share = 2 * (_check(payload, size) - 1), payload / size
    return Transfer(steps * share * network.byte_s, steps * network.hop_s)


def doubling_all_reduce(network: Network, payload: float, size: int) -> Transfer:
    """Return the time of an all-reduce by recursive doubling: ceil(log2 N) (α + β B)."""
    rounds = (_check(payload, size) - 1).bit_length()  # ceil(log2 N)
    return Transfer(rounds * network.byte_s * payload, rounds * network.hop_s)


def all_reduce(network: Network, payload: float, size: int) -> Transfer:
    """Return the time of an all-reduce by the network's algorithm."""
    ring = ring_all_reduce(network, payload, size)
    doubling = doubling_all_reduce(network, payload, size)
    smaller = min(ring, doubling, key=lambda one: one.total_s)
    return {"ring": ring, "doubling": doubling, "smaller": smaller}[network.algorithm]


def all_gather(network: Network, payload: float, size: int) -> Transfer:
    """Return the time of an all-gather on a ring: (N-1) (α + β B), which grows with N."""
    steps = _check(payload, size) - 1
    return Transfer(steps * network.byte_s * payload, steps * network.hop_s)


def scatter(network: Network, payload: float, size: int) -> Transfer:
    """Return the time of a reduce-scatter, all-to-all, broadcast or reduce: (N-1) α + (N-1)/N β B."""
    steps = _check(payload, size) - 1
    return Transfer(steps * network.byte_s * payload / size, steps * network.hop_s)


def collective(network: Network, message: Message, size: int) -> Transfer:
    """Return the time of a collective by its kind."""
    check_choice("collective", "kind", message.kind, KINDS)
    formula = {"all_reduce": all_reduce, "all_gather": all_gather}.get(message.kind, scatter)
    return formula(network, message.payload, size)


def hierarchical_all_reduce(
    inner: Network, outer: Network, payload: float, per_host: int, hosts: int
) -> Transfer:
    """Return the time of an all-reduce within hosts, then among hosts, whose ranks share one network card.

    2(p-1) (α_i + β_i B/p) + 2(H-1) α_e + 2(H-1)/H β_e B, with p ranks a host and H hosts.
    """
    within, among = _check(payload, per_host) - 1, _check(payload, hosts) - 1
    return Transfer(
        2 * within * inner.byte_s * payload / per_host + 2 * among * outer.byte_s * payload / hosts,
        2 * within * inner.hop_s + 2 * among * outer.hop_s,
    )


@dataclass(frozen=True)
class Cluster:
    """Hosts of several ranks each, which share the host's network card.

    Attributes:
        inner: between ranks of a host.
        outer: between hosts.
        per_host: ranks a host, >= 1.
    """

    inner: Network
    outer: Network
    per_host: int = 1

    def num_hosts(self, size: int) -> int:
        """Return how many hosts ``size`` ranks are on, which fill whole hosts or a part of one; else OptionError."""
        if size > self.per_host and size % self.per_host:
            raise OptionError(f"cluster: {size} ranks do not fill hosts of {self.per_host}; give a multiple")
        return max(1, size // self.per_host)

    def collective(self, message: Message, size: int) -> Transfer:
        """Return the time of a collective of ``size`` ranks, which fill whole hosts or a part of one.

        An all-reduce is hierarchical; an all-gather is one ring, whose edges between hosts are the slowest; of an
        all-to-all a card sends what all ranks of its host have for other hosts, (N-1) α + p(N-p)/N β B.

        Raises:
            OptionError: the ranks fill no whole number of hosts.
        """
        hosts = self.num_hosts(size)
        if hosts == 1:
            return collective(self.inner, message, size)
        if self.per_host == 1:
            return collective(self.outer, message, size)
        if message.kind == "all_reduce":
            return hierarchical_all_reduce(self.inner, self.outer, message.payload, self.per_host, hosts)
        if message.kind == "all_to_all":
            share = self.per_host * (size - self.per_host) / size
            return Transfer(share * self.outer.byte_s * message.payload, (size - 1) * self.outer.hop_s)
        return collective(self.outer, message, size)


# ---- steps -------------------------------------------------------------------------------------------


class Bucket(NamedTuple):
    """Gradients that are exchanged together.

    Attributes:
        ready_s: when backward has computed them, from the step's start, compression apart.
        compress_s: seconds to pack and compress them, on the core that computes.
        transfer: of their messages.
    """

    ready_s: float
    compress_s: float
    transfer: Transfer


def step_s(
    compute_s: float, buckets: Sequence[Bucket], decompress_s: float = 0.0, update_s: float = 0.0
) -> float:
    """Return the seconds of a step whose buckets leave, in order, as they become ready.

    Compressing a bucket delays what is computed after it, so bucket b can leave at r_b + c_1 + ... + c_b. It starts
    when the link is free, holds it for its ``link_s`` and ends ``latency_s`` later. The step is
    max(compute + sum of c_b, last end + decompress) + update.

    Args:
        compute_s: seconds of forward and backward.
        buckets: in the order in which they become ready.
        decompress_s: seconds from the last end to gradients that can be applied.
        update_s: seconds of the optimizer.

    Raises:
        OptionError: a bucket is ready after the end of backward, or before the one in front of it.
    """
    free, compressing, last_end, before = 0.0, 0.0, 0.0, 0.0
    for number, bucket in enumerate(buckets):
        if not before <= bucket.ready_s <= compute_s:
            raise OptionError(
                f"step_s: bucket {number} is ready at {bucket.ready_s} s, expected {before} to {compute_s} s; give "
                "buckets in the order of backward"
            )
        before = bucket.ready_s
        compressing += bucket.compress_s
        free = max(bucket.ready_s + compressing, free) + bucket.transfer.link_s
        last_end = max(last_end, free + bucket.transfer.latency_s)
    waits = last_end + decompress_s if buckets else 0.0
    return max(compute_s + compressing, waits) + update_s


def local_sgd_step_s(compute_s: float, update_s: float, transfer: Transfer, period: int) -> float:
    """Return the mean seconds of a step that averages parameters every H = ``period``: compute + update + wire/H."""
    return compute_s + update_s + transfer.total_s / check_int("local_sgd_step_s", "period", period, 1)


def _check(payload: float, size: int) -> int:
    check_number("cost", "payload", payload, 0, math.inf)
    return check_int("cost", "size", size, 1)
