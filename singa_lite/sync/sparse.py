# SPDX-License-Identifier: Apache-2.0
"""What the sparse schemes share: select some elements, gather them from all ranks, keep the rest as residual.

Note [residual]: what a rank does not send stays in its residual and is added to the next step's gradient, so
that sent + kept = gradient + residual before, element by element. Selection, rounding and residuals happen
at every world size, one included.
"""

from __future__ import annotations

from types import MappingProxyType

from ..backend.base import Backend
from ..comm.base import Communicator, WorkList
from .base import Array, Bucket, BucketedSync
from .state import Slot


class SparseMessage:
    """Selected elements of one flat array on their way to all ranks.

    Args:
        flat: values to select from, shape (n,), replaced by the sum of what all ranks selected.
        residual: receives what this rank did not select, shape (n,); None drops it.

    Attributes:
        indices: what this rank has selected, padded; once it was sent.
    """

    indices: Array

    def __init__(
        self, communicator: Communicator, backend: Backend, flat: Array, residual: Array | None, name: str
    ) -> None:
        self.communicator, self.backend, self.name = communicator, backend, name
        self.flat, self.residual = flat, residual
        self.index_dtype = "int32" if flat.size < 2**31 else "int64"

    def send(self, indices: Array, values: Array, counts: list[int]) -> WorkList:
        """Keep the rest, and start to send ``indices`` and ``values``, padded alike on all ranks.

        Args:
            counts: how many elements each rank selected.
        """
        self._counts, self.indices = counts, indices
        if self.residual is not None:
            mine = indices[: counts[self.communicator.rank]]
            self.backend.run("copy", self.flat, out=self.residual)
            self.backend.run("scatter_fill", mine, out=self.residual, value=0.0)
        self._gathers = [self.communicator.all_gather(part, name=self.name) for part in (indices, values)]
        return WorkList(list(self._gathers), self.name)

    def merge(self, scale: float) -> None:
        """Leave ``scale`` times the sum in ``flat``, added rank by rank; waits for what was sent."""
        indices, values = (work.wait() for work in self._gathers)
        assert indices is not None and values is not None
        self.backend.run("fill", out=self.flat, value=0.0)
        for rank, count in enumerate(self._counts):
            self.backend.run("scatter_add", indices[rank, :count], values[rank, :count], out=self.flat)
        if scale != 1.0:
            factor = self.backend.empty((1,), self.flat.dtype)
            self.backend.run("fill", out=factor, value=scale)
            self.backend.run("mul", self.flat, factor, out=self.flat)


class SparseSync(BucketedSync):
    """Base of the sparse schemes. ``Options`` must have ``corr``: whether what is not sent is kept."""

    is_selective = True
    slots = MappingProxyType({"residual": Slot()})

    def message(self, bucket: Bucket) -> SparseMessage:
        """Add the residual to the bucket, and return a message to select its elements for."""
        [residual] = self.state.of(bucket) if self.options.corr else [None]
        if residual is not None:
            bucket.backend.run("add", bucket.flat, residual, out=bucket.flat)
        return SparseMessage(self.communicator, bucket.backend, bucket.flat, residual, bucket.name)
