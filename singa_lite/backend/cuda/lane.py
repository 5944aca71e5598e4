# SPDX-License-Identifier: Apache-2.0
"""A stream of a GPU, and the memory that the kernels on it hand to one another.

Note [lanes]: a backend has three. All computes on ``MAIN``. What brings gradients into a message runs on ``PACK``, and
what makes means of what came back on ``UNPACK``, so that both go on beside the backward pass and the reduction, which
has a stream of its own (comm/nccl.py). Events alone order them. Kernels of one lane run one after the other, so what
they share - scratch memory, counters that are zero between kernels, cuBLAS's workspace - is the lane's.
Each stream has memory of its own in cupy's pools, which is given out again as soon as Python lets go of it: to work
that comes later on the same stream. So arrays of one lane that another reads are kept until the lanes have met.
"""

from __future__ import annotations

from functools import cached_property

import cupy
import numpy as np

from ..base import Array
from .cublas import Cublas

MAIN, PACK, UNPACK = range(3)


class Lane:
    """One of a backend's streams; made while its GPU is the current one.

    Attributes:
        stream: a cupy stream.
        address: its handle.
        ticket: zero between kernels, see is_last_block in common.cuh.
    """

    def __init__(self) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.address = self.stream.ptr
        self.stream.use()
        self.ticket = cupy.zeros(1, np.uint32)
        self._scratch = [cupy.empty(1 << 16, np.uint8)]

    def scratch(self, num_bytes: int) -> Array:
        """Memory for one kernel method, until the next asks; outgrown memory stays, as a graph may have its address."""
        if self._scratch[-1].size < num_bytes:
            self._scratch.append(cupy.empty(2 * num_bytes, np.uint8))
        return self._scratch[-1]

    @cached_property
    def cublas(self) -> Cublas:
        """cuBLAS on this stream."""
        return Cublas(self.address)

    def mark(self) -> cupy.cuda.Event:
        """An event that happens once all that the stream was given so far is done."""
        event = cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event
