# SPDX-License-Identifier: Apache-2.0
"""sparseThreshold: every element of at least a given magnitude travels."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

from ..comm.base import Communicator, Work
from ..errors import OptionError
from ..tensor import Tensor
from .base import Array, Bucket, Exchange, StepOptions
from .sparse import SparseMessage, SparseSync


def check_magnitude(spars: float) -> None:
    """Raise OptionError unless spars >= 0."""
    if not spars >= 0.0:
        raise OptionError(f"sparseThreshold: spars = {spars} must be >= 0, the least magnitude to send")


def count_threshold(message: SparseMessage, spars: float) -> Array:
    """How many elements reach ``spars`` here, (1,) int64."""
    count = message.backend.empty((1,), "int64")
    message.backend.run("threshold_count", message.flat, out=count, threshold=spars)
    return count


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

    Ranks select different numbers of elements. They tell each other how many, all groups at once and after the
    last gradient, so that the host looks at values once a step; then all send as many as the one with most.
    """

    names = ("sparseThreshold",)
    capture = "split"

    def __init__(self, communicator: Communicator, threshold: int, bucket_bytes: int) -> None:
        super().__init__(communicator, threshold, bucket_bytes)
        self._counted: list[Exchange] = []  # that have yielded their count

    def check(self, options: StepOptions) -> None:
        check_magnitude(options.spars)

    def begin(self, options: StepOptions) -> None:
        super().begin(options)
        self._counted.clear()

    def start(self, exchange: Exchange, gather: Callable[[], None]) -> None:
        exchange.go_on(gather)
        self._counted.append(exchange)

    def exchange(self, bucket: Bucket) -> Generator[Any, list[int], None]:
        """Gives this rank's count first, and wants those of all ranks sent in before it starts the Work."""
        message = self.message(bucket)
        counts = yield count_threshold(message, self.options.spars)
        yield self.send(select_threshold(message, self.options.spars, counts))
        message.merge(1.0 / self.communicator.size)

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.flush()
        counts = self._agree()
        for exchange, of_ranks in zip(self._counted, counts, strict=True):
            exchange.go_on(partial(list, of_ranks))
            self._in_flight.append(exchange)
        self._counted.clear()
        yield from super().finish()

    def _agree(self) -> list[list[int]]:
        """For every group the number of elements that each rank selects."""
        if not self._counted:
            return []
        backend = self._counted[0].bucket.backend
        with backend.packing():
            mine = backend.empty((len(self._counted),), "int64")
            backend.run("pack", *(exchange.work for exchange in self._counted), out=mine)
            gather = self.send(self.communicator.all_gather(mine, name="numbers of selected elements"))
        of_ranks: list[list[int]] = backend.to_numpy(self.wait(gather)).T.tolist()
        return of_ranks
