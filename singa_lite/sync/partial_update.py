# SPDX-License-Identifier: Apache-2.0
"""partialUpdate: every rank takes its local step, then one chunk of whole parameters is averaged."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..errors import CheckpointError
from ..graph.recorder import bookkeep
from ..tensor import Tensor
from .base import Scheme
from .grouping import group_all

PREFIX = "next chunk of "


class PartialUpdate(Scheme):
    """Averages chunk 0 after the first step, chunk 1 after the second, and so on, round and round.

    Chunks are groups of ``threshold`` elements. Until it is averaged again a parameter drifts on each rank, as do
    momentum buffers always: call ``DistOpt.synchronize(model)`` before evaluation and saving.
    """

    names = ("partialUpdate",)
    is_recordable = True
    keeps_equal = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # by the parameters of a step, which may alternate (two losses, two models)
        self._chunks: dict[tuple[Tensor, ...], list[list[Tensor]]] = {}
        self._next: dict[str, int] = {}  # number of the next chunk, by what the parameters are called

    def graph_key(self) -> Hashable:
        return frozenset((label, number) for label, number in self._next.items() if number)

    def after_update(self, params: list[Tensor]) -> None:
        if not params:
            return
        chunks, label = self._chunks_of(params), self.label_of(params)
        chunk = chunks[self._next.get(label, 0) % len(chunks)]
        self.average(chunk)
        bookkeep(self._count, label, len(chunks))

    def _count(self, label: str, num_chunks: int) -> None:
        self._next[label] = (self._next.get(label, 0) + 1) % num_chunks

    def _chunks_of(self, params: list[Tensor]) -> list[list[Tensor]]:
        key = tuple(params)
        if key not in self._chunks:
            self._chunks[key] = []
            for dtype in dict.fromkeys(param.dtype for param in params):
                same = [param for param in params if param.dtype == dtype]
                self._chunks[key] += group_all(same, [param.size() for param in same], self.threshold)
        return self._chunks[key]

    def counters(self) -> dict[str, float]:
        return {PREFIX + label: number for label, number in self._next.items()}

    def set_counters(self, counters: dict[str, Any]) -> None:
        wrong = [name for name in counters if not name.startswith(PREFIX)]
        if wrong:
            raise CheckpointError(f"partialUpdate: {wrong[:3]} do not give the next chunk")
        self._next = {name.removeprefix(PREFIX): int(number) for name, number in counters.items()}
