# SPDX-License-Identifier: Apache-2.0
"""Deep Gradient Compression in its shortest form: the largest of momentum-corrected gradients (Lin et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .buckets import Bucket, BucketedSync, Exchange
from .sparse import SparseMessage
from .sparse_top_k import check_share, send_top_k
from .state import Slot


class ShortDgc(BucketedSync):
    """u = m u + g, v += u; the largest of v are sent, and both forget what was sent."""

    names = ("shortDgc",)
    is_recordable = True
    is_selective = True
    keeps_velocity = True
    slots = MappingProxyType({"velocity": Slot(), "residual": Slot()})

    @dataclass(frozen=True)
    class Options:
        """density: share of the elements to send."""

        density: float = 0.3

        def __post_init__(self) -> None:
            check_share("shortDgc", "density", self.density)

    @classmethod
    def takes_momentum(cls, options: Any) -> bool:
        return True

    def exchange(self, bucket: Bucket) -> Exchange:
        run, flat = bucket.backend.run, bucket.flat
        velocity, residual = self.state.of(bucket)
        momentum = self.scalar(lambda step: step.rule.momentum)
        run("momentum_update", flat, out=(residual, velocity), lr=-1.0, momentum=momentum, gain=1.0)
        message = SparseMessage(self.communicator, bucket.backend, flat, None, bucket.name, "own", residual)
        work = send_top_k(message, self.options.density)
        for kept in (residual, velocity):
            run("scatter_fill", message.indices, out=kept, value=0.0)
        yield work
        message.merge(1.0 / self.communicator.size)
