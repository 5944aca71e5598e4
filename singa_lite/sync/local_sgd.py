# SPDX-License-Identifier: Apache-2.0
"""localSGD: every rank takes its own steps, and after every so many all parameters are averaged."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import CheckpointError, check_int
from ..graph.recorder import bookkeep, guard_ahead, steps_since_start
from ..tensor import Tensor
from .base import Scheme, StepContext
from .buckets import Bucket, BucketedSync, Exchange

PREFIX = "local updates of "


class LocalSgd(BucketedSync):
    """Averages all parameters of a step after every ``period`` updates of them; before ``start``, it is fp32.

    Until they are averaged parameters drift on each rank, as momentum does always: call ``DistOpt.synchronize(model)``
    before evaluation and saving.

    Source: Stich, "Local SGD converges fast and communicates little", 2019; ``start``: Lin et al., "Don't use large
    mini-batches, use local SGD", 2020.
    """

    names = ("localSGD",)
    is_recordable = True
    keeps_equal = False
    changes_one_rank = False

    @dataclass(frozen=True)
    class Options:
        """Options of localSGD.

        Attributes:
            period: updates from one average to the next, >= 1.
            start: number of the first step that is local; before it gradients are averaged.
        """

        period: int = 8
        start: int = 0

        def __post_init__(self) -> None:
            check_int("localSGD", "period", self.period, 1)
            check_int("localSGD", "start", self.start, 0)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._updates: dict[str, int] = {}  # local ones, by what the parameters of a step are called
        self._is_local = True

    def step_key(self, step: StepContext) -> Hashable:
        return step.step >= step.options.start

    def begin(self, step: StepContext, read: Callable[[], StepContext] | None = None) -> None:
        super().begin(step, read)
        self._is_local = step.step >= step.options.start

    def add_gradient(self, param: Tensor, grad: Tensor) -> None:
        if self._is_local:
            Scheme.add_gradient(self, param, grad)
        else:
            super().add_gradient(param, grad)

    def exchange(self, bucket: Bucket) -> Exchange:
        yield self.communicator.all_reduce(bucket.flat, "mean", name=bucket.name)

    def after_update(self, params: list[Tensor]) -> None:
        if not params or not self._is_local:
            return
        label, period = self.label_of(params), int(self.options.period)
        ahead = steps_since_start((self, label), self._updates.get(label, 0))
        guard_ahead((self, label), ahead, partial(self._is_due, label, period))
        if self._is_due(label, period):
            for kind in dict.fromkeys((param.dtype, param.device) for param in params):
                self.average([param for param in params if (param.dtype, param.device) == kind])
        bookkeep(self._count, label)

    def _is_due(self, label: str, period: int, ahead: int = 0) -> bool:
        """Return whether an average comes after the update of ``label`` that comes after ``ahead`` others."""
        return (self._updates.get(label, 0) + ahead + 1) % period == 0

    def _count(self, label: str) -> None:
        self._updates[label] = self._updates.get(label, 0) + 1

    def counters(self) -> dict[str, float]:
        return {PREFIX + label: count for label, count in self._updates.items()}

    def set_counters(self, counters: dict[str, Any]) -> None:
        wrong = [name for name in counters if not name.startswith(PREFIX)]
        if wrong:
            raise CheckpointError(f"localSGD: {wrong[:3]} do not count updates")
        self._updates = {name.removeprefix(PREFIX): int(count) for name, count in counters.items()}
