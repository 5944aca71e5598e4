# SPDX-License-Identifier: Apache-2.0
"""partialUpdate: every rank takes its local step, then one chunk of whole parameters is averaged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..comm.base import Communicator
from ..errors import CheckpointError
from ..tensor import Tensor
from .base import Bucket, StepOptions, SyncStrategy
from .bucket import group_all


class PartialUpdate(SyncStrategy):
    """Averages chunk 0 after the first step, chunk 1 after the second, and so on, round and round.

    Chunks are groups of ``threshold`` elements. Between its turns a parameter drifts on each rank, as do
    momentum buffers always: call ``DistOpt.synchronize(model)`` before evaluation and saving.
    """

    names = ("partialUpdate",)

    def __init__(self, communicator: Communicator, threshold: int, bucket_bytes: int) -> None:
        super().__init__(communicator, threshold, bucket_bytes)
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._params: list[Tensor] = []  # what the chunks were cut from
        self._chunks: list[Bucket] = []
        self._turn = 0

    def begin(self, options: StepOptions) -> None:
        super().begin(options)
        self._pairs = []

    def push(self, param: Tensor, grad: Tensor) -> None:
        self._pairs.append((param, grad))

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self._pairs

    def record_key(self) -> int:
        return self._turn

    def after_update(self, params: list[Tensor]) -> None:
        if self._params != params:
            self._params, self._chunks = list(params), self._cut(params)
        if not self._chunks:
            return
        chunk = self._chunks[self._turn % len(self._chunks)]
        self._turn = (self._turn + 1) % len(self._chunks)
        chunk.backend.run("pack", *(param.data for param in chunk.params), out=chunk.flat)
        self.wait(self.send(self.communicator.all_reduce(chunk.flat, "mean", name=chunk.name)))
        for param, mean in chunk.views(chunk.flat):
            chunk.backend.run("copy", mean, out=param.data)

    def _cut(self, params: list[Tensor]) -> list[Bucket]:
        groups = []
        for dtype in dict.fromkeys(param.dtype for param in params):
            same = [param for param in params if param.dtype == dtype]
            groups += group_all(same, [param.size() for param in same], self.threshold)
        return [Bucket(group, self.communicator) for group in groups]

    def state_dict(self, names: dict[Tensor, str]) -> dict[str, np.ndarray]:
        return {"turn": np.array(self._turn)}

    def load_state_dict(self, states: dict[str, np.ndarray], names: dict[Tensor, str]) -> None:
        if set(states) != {"turn"}:
            raise CheckpointError(f"partialUpdate: expected the state 'turn', got {sorted(states)[:3]}")
        self._turn = int(states["turn"])
