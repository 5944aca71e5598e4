# SPDX-License-Identifier: Apache-2.0
"""What the sparse schemes share: select some elements, gather them from all ranks, keep the rest as residual.

Note [residual]: what a rank does not send stays in its residual and is added to the next step's gradient, so
that sent + kept = gradient + residual before, element by element. Selection, rounding and residuals happen
at every world size, one included. A parameter has one residual: where steps differ in which parameters have gradients,
and so in their groups, it goes from the group that had the parameter last to the one that has it now.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..comm.base import Communicator, Work, WorkList
from ..errors import CheckpointError
from ..tensor import Tensor
from .base import Array, Bucket, BucketedSync, StepOptions


class SparseMessage:
    """Selected elements of one flat array on their way to all ranks.

    Args:
        flat: values to select from, shape (n,), replaced by the sum of what all ranks selected.
        residual: receives what this rank did not select, shape (n,); None drops it.
    """

    def __init__(
        self, communicator: Communicator, backend: Backend, flat: Array, residual: Array | None, name: str
    ) -> None:
        self.communicator, self.backend, self.name = communicator, backend, name
        self.flat, self.residual = flat, residual
        self.counts: list[int] = []  # selected elements per rank

    def start(self, indices: Array, values: Array, counts: list[int]) -> Work:
        """Keep the rest, send ``indices`` and ``values``, padded alike on all ranks."""
        self.counts = counts
        if self.residual is not None:
            mine = indices[: counts[self.communicator.rank]]
            self.backend.run("copy", self.flat, out=self.residual)
            self.backend.run("scatter_fill", mine, out=self.residual, value=0.0)
        self._gathers = [self.communicator.all_gather(part, name=self.name) for part in (indices, values)]
        return WorkList(self._gathers, self.name)

    def merge(self, scale: float) -> None:
        """Leave ``scale`` times the sum in ``flat``, added rank by rank; ``start`` must have ended."""
        indices, values = (work.wait() for work in self._gathers)
        assert indices is not None and values is not None
        self.backend.run("fill", out=self.flat, value=0.0)
        for rank, count in enumerate(self.counts):
            self.backend.run("scatter_add", indices[rank, :count], values[rank, :count], out=self.flat)
        if scale != 1.0:
            factor = self.backend.empty((1,), self.flat.dtype)
            self.backend.run("fill", out=factor, value=scale)
            self.backend.run("mul", self.flat, factor, out=self.flat)


class SparseSync(BucketedSync):
    """Base of the sparse schemes: residuals per parameter, as views into the group's own array."""

    is_selective = True

    def __init__(self, communicator: Communicator, threshold: int, bucket_bytes: int) -> None:
        super().__init__(communicator, threshold, bucket_bytes)
        self._residuals: dict[Bucket, Array] = {}
        self._homes: dict[Tensor, Bucket] = {}  # the group whose array has a parameter's residual now
        self._moved: dict[Tensor, Bucket] = {}  # the same, of those that were in several groups
        self._moving: dict[Tensor, Bucket] = {}  # those that come to another group in this step
        self._restored: dict[Tensor, np.ndarray] = {}  # loaded, and not yet in a group's array

    def begin(self, options: StepOptions) -> None:
        super().begin(options)
        self._moving.clear()

    def record_key(self, options: StepOptions) -> Hashable:
        """Residuals that go from group to group are copied, or are not, as the steps before left them."""
        return super().record_key(options), tuple(map(id, self._moved.values()))

    def message(self, bucket: Bucket) -> SparseMessage:
        """The bucket with its residual added, ready to select from."""
        residual = self._residual(bucket) if self.options.corr else None
        if residual is not None:
            bucket.backend.run("add", bucket.flat, residual, out=bucket.flat)
        return SparseMessage(self.communicator, bucket.backend, bucket.flat, residual, bucket.name)

    def _residual(self, bucket: Bucket) -> Array:
        if bucket not in self._residuals:
            residual = bucket.backend.zeros(bucket.flat.shape, bucket.dtype)
            for param, part in bucket.views(residual):
                if param in self._restored:
                    bucket.backend.run("copy", bucket.backend.asarray(self._restored.pop(param)), out=part)
            self._residuals[bucket] = residual
        if any(self._homes.get(param) is not bucket for param in bucket.params):
            self._bring_home(bucket)
        return self._residuals[bucket]

    def _bring_home(self, bucket: Bucket) -> None:
        """Copy the residuals that other groups have of these parameters."""
        for param, part in bucket.views(self._residuals[bucket]):
            home = self._homes.setdefault(param, bucket)
            if home is not bucket:
                kept = dict(home.views(self._residuals[home]))[param]
                bucket.backend.run("copy", kept, out=part)
                self._moving[param] = bucket

    def remember(self) -> Callable[[], None]:
        homes, moved = dict(self._homes), dict(self._moved)

        def bring_back() -> None:
            self._homes, self._moved = homes, moved

        return bring_back

    def after_update(self, params: list[Tensor]) -> None:
        self._moved.update(self._moving)  # not before: a step that fails or is begun anew finds all as it was
        self._homes.update(self._moving)

    def state_dict(self, names: dict[Tensor, str]) -> dict[str, np.ndarray]:
        states: dict[str, Any] = {names[param]: array for param, array in self._restored.items()}
        for bucket, residual in self._residuals.items():
            for param, part in bucket.views(residual):
                if self._homes[param] is bucket:
                    states[names[param]] = bucket.backend.to_numpy(part)
        return states

    def load_state_dict(self, states: dict[str, np.ndarray], names: dict[Tensor, str]) -> None:
        by_name = {name: param for param, name in names.items()}
        restored = {}
        for name, array in states.items():
            param = by_name.get(name)
            if param is None or param.shape != array.shape:
                raise CheckpointError(f"residual {name!r} of shape {array.shape} fits no parameter")
            restored[param] = np.array(array, param.dtype)
        self._restored = restored
        for known in (self._residuals, self._homes, self._moved, self._moving):
            known.clear()
