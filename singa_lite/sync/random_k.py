# SPDX-License-Identifier: Apache-2.0
"""randomK: a random choice of elements, the same on all ranks, is averaged; no index travels.

The choice is the beginning of a permutation that the group's name and the number of the step decide (the kernel
``random_indices``), so a resumed, a recorded and a GPU's step choose the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..users_line import warn
from .base import StepContext
from .buckets import Bucket, BucketedSync, Exchange
from .sparse_top_k import check_share, count_of_share
from .state import Slot

LEAST_SAFE = 0.05  # 1 % did not learn MNIST at the learning rates that all other schemes take


class RandomK(BucketedSync):
    """The same K = ceil(``density`` n) elements of each group on all ranks, others at every step.

    Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", 2018; the permutation: ``random_indices``.
    """

    names = ("randomK",)
    is_recordable = True
    sums_residuals = True
    is_selective = True
    slots = MappingProxyType({"residual": Slot()})

    @dataclass(frozen=True)
    class Options:
        """Options of randomK.

        Attributes:
            density: share of the elements to send, 0 < density <= 1.
            corr: keep what was not sent and add it to the next step's gradient; False drops it.
        """

        density: float = 0.1
        corr: bool = True

        def __post_init__(self) -> None:
            check_share("randomK", "density", self.density)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._has_warned = False

    def begin(self, step: StepContext, read: Callable[[], StepContext] | None = None) -> None:
        super().begin(step, read)
        density = self.options.density
        if density < LEAST_SAFE and not self._has_warned:
            self._has_warned = True
            warn(
                f"randomK: density = {density} has an element wait for {1 / density:.0f} steps on average, and may "
                f"diverge then; use {LEAST_SAFE} or more, a smaller learning rate, or sparseTopK"
            )

    def exchange(self, bucket: Bucket) -> Exchange:
        run, empty, flat = bucket.backend.run, bucket.backend.empty, bucket.flat
        [residual] = self.state.of(bucket)
        if self.options.corr:
            run("add", flat, residual, out=flat)
        k = count_of_share(self.options.density, flat.size)
        indices, values = empty((k,), "int32" if flat.size < 2**31 else "int64"), empty((k,), bucket.dtype)
        seed, step = zlib.crc32(bucket.key.encode()), self.scalar(lambda step: step.step)
        run("random_indices", out=indices, n=flat.size, seed=seed, counter=step)
        run("gather", flat, indices, out=values, axis=0)
        # if any element is not finite, which may not be among the chosen, every value is sent as NaN: largest - largest
        # is NaN then, and else 0
        largest, zero = empty((1,), bucket.dtype), empty((1,), bucket.dtype)
        run("max_abs", flat, out=largest)
        run("sub", largest, largest, out=zero)
        run("add", values, zero, out=values)
        work = self.communicator.all_reduce(values, "mean", name=bucket.name)
        if self.options.corr:
            run("finite_or_zero", flat, out=residual)
            run("scatter_fill", indices, out=residual, value=0.0)
        yield work
        run("fill", out=flat, value=0.0)
        run("scatter_add", indices, values, out=flat)
