# SPDX-License-Identifier: Apache-2.0
"""Sums of a rank's gradients in fixed order, which have the same bits on any number of ranks.

The tree that these sums are part of is in sync/fixed_order.py, Note [fixed order].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..device import get_num_threads
from ..errors import CheckpointError, OptionError
from ..graph.recorder import bookkeep, guard_ahead, steps_since_start
from ..tensor import Tensor
from ..tensor.checks import as_dtype
from ..users_line import warn
from .accumulate import PREFIX, Gradients, GradientSums

LEVEL = f"{PREFIX}level/"
NEEDS = "DistOpt: order='fixed' needs a gradient of every parameter in each microbatch"
THREADS = "num_threads"  # among the settings of a DistOpt


class FixedOrderSums(GradientSums):
    """Sums of the gradients of a rank's neighbouring microbatches, two by two.

    A parameter has log2(num_batches) arrays at most: a sum of 2**k microbatches waits for its neighbour at level k.

    Args:
        num_batches: microbatches of this rank, a power of two.
        wire_dtype: what sums are rounded to, as they are sent so; None where that is their own dtype.
    """

    def __init__(self, num_batches: int, wire_dtype: str | None) -> None:
        super().__init__(num_batches)
        self._wire_dtype = wire_dtype

    def guard(self) -> None:
        """Guard, at the start of a call, which one of the sum it is."""
        if self.num_batches > 1:
            ahead = steps_since_start(self, self._calls)
            guard_ahead(self, ahead, lambda others: (self._calls + others) % self.num_batches)

    def add(self, gradients: Gradients) -> None:
        """Add the gradients of a call that makes no update."""
        number, pairs = self.num_calls, list(gradients)
        self._check_same(dict(pairs))
        for param, grad in pairs:
            level = self._carry(param, grad, number)
            param.device.backend.run("copy", grad.array, out=self._sum_of(param, level))
        bookkeep(self._count, [param for param, _ in pairs])

    def means(self, gradients: Gradients, params: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the sums of the call that makes the update; the scheme divides by the number of microbatches.

        Every call has gradients of all parameters, so ``params`` is not used.
        """
        if self.num_batches == 1:
            yield from gradients
            return
        seen: dict[Tensor, Tensor] = {}
        for param, grad in gradients:
            self._check_known(param)
            self._carry(param, grad, self.num_batches - 1)
            seen[param] = grad
            yield param, grad
        self._check_same(seen)

    def end(self) -> None:
        if self.num_batches > 1:
            bookkeep(self._clear)

    def _carry(self, param: Tensor, grad: Tensor, number: int) -> int:
        """Add to ``grad`` the sums that microbatch ``number`` is the last neighbour of; return the level it is of."""
        level, run = 0, param.device.backend.run
        self._rounded(grad)
        while number >> level & 1:
            run("add", self._sum_of(param, level), grad.array, out=grad.array)
            self._rounded(grad)
            level += 1
        return level

    def _rounded(self, grad: Tensor) -> None:
        if self._wire_dtype is not None:
            backend = grad.device.backend
            backend.run("cast", backend.astype(grad.array, as_dtype(self._wire_dtype)), out=grad.array)

    def _dtype_of(self, param: Tensor) -> np.dtype[Any]:
        return param.dtype

    def _check_known(self, param: Tensor) -> None:
        if param not in self._pending:
            raise OptionError(f"{NEEDS}; {param.name!r} has one in this one, but had none in the one before")

    def _check_same(self, params: Mapping[Tensor, Any]) -> None:
        if not self.num_calls:
            return
        for param in params:
            self._check_known(param)
        for param in self._pending:
            if param not in params:
                raise OptionError(f"{NEEDS}; {param.name!r} has none in this one")

    def _keys(self, names: Mapping[Tensor, str]) -> dict[str, tuple[Tensor, int]]:
        return {
            f"{LEVEL}{level}/{name}": (param, level)
            for param, name in names.items()
            for level in range(self.num_batches.bit_length())
        }

    def _is_pending(self, param: Tensor, level: int) -> bool:
        return (param, level) in self._sums and bool(self.num_calls >> level & 1)


def threads_of(params: Iterable[Tensor]) -> int | None:
    """Return on how many threads this rank computes with ``params``; None where all of them are on GPUs.

    Compiled kernels add up a product in an order that depends on it.
    """
    return get_num_threads() if any(param.device.kind == "cpu" for param in params) else None


def check_threads(saved: Mapping[str, Any], mine: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError if a job of order="fixed" goes on with another number of threads, so with other bits.

    ``saved`` and ``mine`` are ``DistOpt.settings()`` when the job was saved, and now.
    """
    if saved.get("order") != "fixed" or mine.get("order") != "fixed":
        return
    before, now = saved.get(THREADS), mine.get(THREADS)
    if THREADS not in saved:
        warn(
            f"{where}: it does not say on how many threads a rank computed, and order='fixed' has the same bits only "
            f"with as many as then; here there are {now}"
        )
    elif before is not None and now is not None and before != now:
        raise CheckpointError(
            f"{where}: with order='fixed', {before} threads computed on each rank when it was saved, and here there "
            f"are {now}, which would give other bits; export OMP_NUM_THREADS={before}"
        )
