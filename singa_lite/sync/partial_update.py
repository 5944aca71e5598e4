# SPDX-License-Identifier: Apache-2.0
"""partialUpdate: every rank takes its local step, then one chunk of whole parameters is averaged."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

from ..graph.recorder import bookkeep, break_graph, guard_ahead, steps_since_start
from ..tensor import Tensor
from .base import Scheme
from .grouping import group_all

MAX_UPDATES = 64  # of a recorded step
ChunkNames = tuple[tuple[str, ...], ...]  # the names of the parameters of each chunk of a step


class PartialUpdate(Scheme):
    """Averages chunk 0 after the first step, chunk 1 after the second, and so on, round and round.

    Chunks are groups of ``threshold`` elements. Where steps have different parameters the next chunk is the one
    with the parameter that was updated most often since its average. Until then a parameter drifts on each rank, as do
    momentum buffers always: call ``DistOpt.synchronize(model)`` before evaluation and saving.
    """

    names = ("partialUpdate",)
    counter_kinds = "iu"
    is_recordable = True
    keeps_equal = False
    counter_prefix = "updates since the average of "

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # by the parameters of a step, which may change (two losses, two models), and their dtypes
        self._chunks: dict[tuple[tuple[Tensor, Any], ...], list[list[Tensor]]] = {}
        self._num_updates = 0
        self._latest: deque[ChunkNames] = deque(maxlen=MAX_UPDATES)  # what the last of them had

    def after_update(self, params: list[Tensor]) -> None:
        if not params:
            return
        chunks = self._chunks_of(params)
        names = tuple(tuple(map(self.optimizer.name_of, chunk)) for chunk in chunks)
        ahead = steps_since_start(self, self._num_updates)
        if ahead > len(self._latest):
            break_graph(f"partialUpdate: it has more than {MAX_UPDATES} updates")
        before = list(self._latest)[len(self._latest) - ahead :]
        guard_ahead(self, ahead, partial(self._next_chunk_after, before, names))
        self.average(chunks[_next_chunk(names, self.param_counters)])
        bookkeep(self._count, names)

    def _next_chunk_after(self, updates: list[ChunkNames], names: ChunkNames, ahead: int) -> int:
        """Return the number of the chunk to average now or, if updates are ``ahead``, after all of ``updates``."""
        ages = dict(self.param_counters)
        for others in updates[:ahead]:
            _update(ages, others)
        return _next_chunk(names, ages)

    def _count(self, names: ChunkNames) -> None:
        _update(self.param_counters, names)
        self._num_updates += 1
        self._latest.append(names)

    def _chunks_of(self, params: list[Tensor]) -> list[list[Tensor]]:
        key = tuple((param, param.dtype) for param in params)
        if key not in self._chunks:
            self._chunks[key] = []
            for dtype in dict.fromkeys(param.dtype for param in params):
                same = [param for param in params if param.dtype == dtype]
                self._chunks[key] += group_all(same, [param.size() for param in same], self.threshold)
        return self._chunks[key]


def _next_chunk(names: ChunkNames, ages: Mapping[str, int]) -> int:
    """Return the number of the first chunk with the oldest parameter."""
    return max(range(len(names)), key=lambda number: max(ages.get(name, 0) for name in names[number]))


def _update(ages: dict[str, int], names: ChunkNames) -> None:
    """Count an update of all chunks, and the average of the next one."""
    averaged = names[_next_chunk(names, ages)]
    for name in chain.from_iterable(names):
        ages[name] = ages.get(name, 0) + 1
    ages.update(dict.fromkeys(averaged, 0))
