# SPDX-License-Identifier: Apache-2.0
"""partialUpdate: every rank takes its local step, then one chunk of whole parameters is averaged."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

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
        # by the parameters of a step, which may alternate (two losses, two models)
        self._chunks: dict[tuple[Tensor, ...], list[Bucket]] = {}
        self._turns: dict[tuple[Tensor, ...], int] = {}
        self._restored: dict[str, int] = {}  # loaded, and not yet met

    def begin(self, options: StepOptions) -> None:
        super().begin(options)
        self._pairs = []

    def push(self, param: Tensor, grad: Tensor) -> None:
        self._pairs.append((param, grad))

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self._pairs

    def record_key(self, options: StepOptions) -> Hashable:
        return tuple(self._turns.values())

    def remember(self) -> Callable[[], None]:
        turns = dict(self._turns)
        return lambda: self._turns.update(turns)

    def after_update(self, params: list[Tensor]) -> None:
        if not params:
            return
        key = tuple(params)
        if key not in self._chunks:
            self._chunks[key] = self._cut(params)
            self._turns[key] = self._restored.pop(_label(params[0].name, len(params)), 0)
        chunks = self._chunks[key]
        chunk = chunks[self._turns[key] % len(chunks)]
        chunk.backend.run("pack", *(param.data for param in chunk.params), out=chunk.flat)
        self.wait(self.send(self.communicator.all_reduce(chunk.flat, "mean", name=chunk.name)))
        chunk.backend.run("unpack", chunk.flat, out=tuple(param.data for param in chunk.params))
        self._turns[key] = (self._turns[key] + 1) % len(chunks)

    def _cut(self, params: list[Tensor]) -> list[Bucket]:
        groups = []
        for dtype in dict.fromkeys(param.dtype for param in params):
            same = [param for param in params if param.dtype == dtype]
            groups += group_all(same, [param.size() for param in same], self.threshold)
        return [Bucket(group, self.communicator) for group in groups]

    def state_dict(self, names: dict[Tensor, str]) -> dict[str, np.ndarray]:
        turns = {_label(params[0].name, len(params)): turn for params, turn in self._turns.items()}
        return {label: np.array(turn) for label, turn in {**self._restored, **turns}.items()}

    def load_state_dict(self, states: dict[str, np.ndarray], names: dict[Tensor, str]) -> None:
        wrong = [key for key in states if not key.startswith("turn of ")]
        if wrong:
            raise CheckpointError(f"partialUpdate: {wrong[:3]} are no turns")
        self._restored = {key: int(turn) for key, turn in states.items()}
        self._chunks.clear()
        self._turns.clear()


def _label(first_name: str | None, count: int) -> str:
    return f"turn of {count} parameters from {first_name}"
