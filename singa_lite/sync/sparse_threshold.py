# SPDX-License-Identifier: Apache-2.0
"""sparseThreshold: every element of at least a given magnitude travels."""

from __future__ import annotations

from ..comm.base import Work
from ..errors import OptionError
from .base import StepOptions
from .sparse import SparseMessage, SparseSync


def check_magnitude(spars: float) -> None:
    """Raise OptionError unless spars >= 0."""
    if not spars >= 0.0:
        raise OptionError(f"sparseThreshold: spars = {spars} must be >= 0, the least magnitude to send")


def count_threshold(message: SparseMessage, spars: float) -> Work:
    """Tell all ranks how many elements reach ``spars`` here; the Work's result is (size, 1) int64."""
    count = message.backend.empty((1,), "int64")
    message.backend.run("threshold_count", message.flat, out=count, threshold=spars)
    return message.communicator.all_gather(count, name=message.name)


def select_threshold(message: SparseMessage, spars: float, counts: list[int]) -> Work:
    """Send every element of at least ``spars``, padded to the rank with most; ``counts`` are all ranks'."""
    index_dtype = "int32" if message.flat.size < 2**31 else "int64"
    indices = message.backend.zeros((max(counts),), index_dtype)
    values = message.backend.zeros((max(counts),), message.flat.dtype)
    mine = slice(counts[message.communicator.rank])
    message.backend.run("threshold_select", message.flat, out=(indices[mine], values[mine]), threshold=spars)
    return message.start(indices, values, counts)


class SparseThreshold(SparseSync):
    """Every |gradient + residual| >= ``spars``, the rank's own value before averaging; NaN always travels.

    Ranks select different numbers of elements: they tell each other how many, then all send as many as the
    one with most.
    """

    names = ("sparseThreshold",)
    capture = "split"

    def check(self, options: StepOptions) -> None:
        check_magnitude(options.spars)

    def select(self, message: SparseMessage) -> Work:
        counts = self.wait(self.send(count_threshold(message, self.options.spars)))
        return select_threshold(
            message, self.options.spars, message.backend.to_numpy(counts).ravel().tolist()
        )
