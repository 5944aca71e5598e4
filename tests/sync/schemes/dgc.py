# SPDX-License-Identifier: Apache-2.0
"""Deep Gradient Compression: the largest elements of momentum-corrected gradients are sent (Lin et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .base import Bucket, BucketedSync, Exchange
from .sparse import SparseMessage
from .sparse_top_k import check_share, send_top_k
from .state import Slot


class Dgc(BucketedSync):
    """u = m u + g, v += u; the largest of v are sent, and both forget what was sent.

    What a rank keeps is a velocity, so the optimizer must not apply momentum again.
    """

    names = ("dgc",)
    is_selective = True
    slots = MappingProxyType({"u": Slot(), "v": Slot()})

    @dataclass(frozen=True)
    class Options:
        """spars: share of the elements to send; mask: whether u forgets what was sent."""

        spars: float = 0.25
        mask: bool = True

        def __post_init__(self) -> None:
            check_share(self.spars)

    @classmethod
    def takes_momentum(cls, options: Any) -> bool:
        return True

    def exchange(self, bucket: Bucket) -> Exchange:
        u, v = self.state.of(bucket)
        run, momentum = bucket.backend.run, self.scalar(lambda step: step.rule.momentum)
        # u = m u + g, v += u
        run("momentum_update", bucket.flat, out=(v, u), lr=-1.0, momentum=momentum, gain=1.0)
        run("copy", v, out=bucket.flat)
        message = SparseMessage(self.communicator, bucket.backend, bucket.flat, v, bucket.name)
        work = send_top_k(message, self.options.spars)
        if self.options.mask:
            run("scatter_fill", message.indices, out=u, value=0.0)
        yield work
        message.merge(1.0 / self.communicator.size)
