# SPDX-License-Identifier: Apache-2.0
"""sparseThreshold: every element of at least a given magnitude is sent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ..comm.work import Work
from ..errors import check_choice, check_number
from .base import Array
from .buckets import Bucket, Exchange, OnHost
from .sparse import VALUES, SparseMessage, SparseSync


def count_selected(message: SparseMessage, spars: Any) -> Array:
    """Return how many elements reach ``spars`` here, (1,) int64."""
    count = message.backend.empty((1,), "int64")
    message.backend.run("threshold_count", message.flat, out=count, threshold=spars)
    return count


def send_selected(message: SparseMessage, spars: float, counts: list[int]) -> Work:
    """Start to send every element of at least ``spars``, padded to the rank with most; ``counts`` are all ranks'."""
    indices, values = message.allocate(max(counts))
    message.backend.run("fill", out=indices, value=message.flat.size - 1)  # they stay ascending
    message.backend.run("fill", out=values, value=0.0)
    mine = slice(counts[message.communicator.rank])
    message.backend.run("threshold_select", message.flat, out=(indices[mine], values[mine]), threshold=spars)
    return message.send(counts)


class SparseThreshold(SparseSync):
    """Every |gradient + residual| >= ``spars``, the rank's own value before averaging; NaN is always sent.

    Ranks select different numbers of elements. They exchange the counts, and once the last gradient is there the
    host looks at these numbers; then all send as many as the one with most.
    """

    names = ("sparseThreshold",)
    is_recordable = True
    read_again = ("spars",)

    @dataclass(frozen=True)
    class Options:
        """Options of sparseThreshold.

        Attributes:
            spars: least magnitude to send, >= 0.
            corr: keep what was not sent and add it to the next step's gradient; False drops it.
            values: "own" sends them in their dtype, "fp16" rounded; with ``corr`` what that loses is kept.
        """

        spars: float = 0.05
        corr: bool = True
        values: str = "own"

        def __post_init__(self) -> None:
            check_number("sparseThreshold", "spars", self.spars, 0)
            check_choice("sparseThreshold", "values", self.values, VALUES)

    def exchange(self, bucket: Bucket) -> Exchange:
        message = self.message(bucket)
        count = count_selected(message, self.scalar(lambda step: step.options.spars))
        counts = yield self.communicator.all_gather(count, name=f"number selected of {bucket.name}")
        yield OnHost(partial(self._send, message, bucket.name), counts)
        yield OnHost(partial(message.merge, 1.0 / self.communicator.size))

    def _send(self, message: SparseMessage, name: str, counts: Any) -> None:
        spars = self.now().options.spars
        message.name = f"spars={spars} of {name}"  # see Note [options in names]
        send_selected(message, spars, counts.ravel().tolist())
