# SPDX-License-Identifier: Apache-2.0
"""localSGD: every rank takes its own steps, and after every so many all parameters are averaged."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import check_int
from ..graph.recorder import bookkeep, guard_ahead, steps_since_start
from ..tensor import Tensor
from .base import Scheme, StepContext
from .buckets import Bucket, BucketedSync, Exchange


class LocalSgd(BucketedSync):
    """Averages a parameter after every ``period`` updates of it; before ``start``, it is fp32.

    Until they are averaged parameters drift on each rank, as momentum does always: call ``DistOpt.synchronize(model)``
    before evaluation and saving.

    Source: Stich, "Local SGD converges fast and communicates little", 2019; ``start``: Lin et al., "Don't use large
    mini-batches, use local SGD", 2020.
    """

    names = ("localSGD",)
    counter_kinds = "iu"
    is_recordable = True
    keeps_equal = False
    changes_one_rank = False
    counter_prefix = "updates of "  # local ones

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
        period, by_name = int(self.options.period), {self.optimizer.name_of(param): param for param in params}
        with_ahead: dict[int, list[str]] = {}
        for name in by_name:
            ahead = steps_since_start((self, name), self.param_counters.get(name, 0))
            with_ahead.setdefault(ahead, []).append(name)
        due = set[str]()
        for ahead, names in with_ahead.items():
            guard_ahead((self, *names), ahead, partial(self._due, names, period))
            due.update(self._due(names, period))
        averaged = [param for name, param in by_name.items() if name in due]
        for kind in dict.fromkeys((param.dtype, param.device) for param in averaged):
            self.average([param for param in averaged if (param.dtype, param.device) == kind])
        bookkeep(self._count, tuple(by_name))

    def _due(self, names: list[str], period: int, ahead: int = 0) -> tuple[str, ...]:
        """Return which parameters are averaged after the update of ``names`` that comes after ``ahead`` others."""
        return tuple(name for name in names if (self.param_counters.get(name, 0) + ahead + 1) % period == 0)

    def _count(self, names: tuple[str, ...]) -> None:
        for name in names:
            self.param_counters[name] = self.param_counters.get(name, 0) + 1
