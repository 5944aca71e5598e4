# SPDX-License-Identifier: Apache-2.0
"""The streams of a GPU's backend, and the memory that the kernels on each hand to one another.

Note [streams]: a backend has three. All computes on ``COMPUTE``. What brings gradients into a message runs on ``PACK``,
and what makes means of what came back on ``UNPACK``, so that both run beside the backward pass and the reduction,
which has a stream of its own (comm/nccl.py). Events alone order them. Kernels of one stream run one after the other, so
what they share - scratch memory, counters that are zero between kernels, cuBLAS's workspace - is the stream's.
Each stream has memory of its own in cupy's pools, which is reused as soon as Python releases it: by work that
comes later on the same stream. So what kernels of PACK and UNPACK read or write is kept until COMPUTE was made to
wait for them (``join``), with which every ``unpacking`` ends. PACK runs only behind what COMPUTE was given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import cupy
import numpy as np

from ..base import Array
from .cublas import Cublas

COMPUTE, PACK, UNPACK = range(3)


class DeviceStream:
    """One of a backend's streams; made while its GPU is the current one.

    Args:
        priority: CUDA's; a lower number goes first where the GPU is full.

    Attributes:
        stream: a cupy stream.
        address: its handle.
        block_counter: zero between kernels, see is_last_block in common.cuh.
    """

    def __init__(self, priority: int) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True, priority=priority)
        self.address = self.stream.ptr
        self.stream.use()
        self.block_counter = cupy.zeros(1, np.uint32)
        self._scratch = [cupy.empty(1 << 16, np.uint8)]

    def scratch(self, num_bytes: int) -> Array:
        """Return memory for one kernel method, until the next call; outgrown memory stays, as a graph may use it."""
        if self._scratch[-1].size < num_bytes:
            self._scratch.append(cupy.empty(2 * num_bytes, np.uint8))
        return self._scratch[-1]

    @cached_property
    def cublas(self) -> Cublas:
        """cuBLAS on this stream."""
        return Cublas(self.address)

    def record_event(self) -> cupy.cuda.Event:
        """Return an event that happens once all that the stream was given so far is done."""
        event = cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event


class StreamSet:
    """The streams of a backend, and which of them a thread's kernels go to.

    Args:
        device: cupy's.
        lock: held while a stream is given something.

    Attributes:
        all: the streams, in the order of their names.
    """

    def __init__(self, device: Any, lock: AbstractContextManager[None]) -> None:
        self._device, self._lock = device, lock
        self.all = [DeviceStream(priority) for priority in (0, -1, -1)]  # small kernels that others wait for
        # by stream that COMPUTE has not waited for: what its kernels use
        self._kept: dict[int, list[Any]] = {}
        self._of_thread = threading.local()
        self.activate()

    @property
    def number(self) -> int:
        """Of the stream that this thread's kernels go to."""
        return getattr(self._of_thread, "number", COMPUTE)

    @property
    def current(self) -> DeviceStream:
        """That stream."""
        return self.all[self.number]

    def activate(self) -> None:
        """Make the device and that stream the thread's current ones, which cupy then uses."""
        current = self.current
        if cupy.cuda.get_current_stream().ptr != current.address:  # the handle identifies the device as well
            self._device.use()
            current.stream.use()

    def enter(self, number: int, event: Callable[[], Any]) -> None:
        """Direct this thread's kernels to stream ``number``, which waits for the event that ``event`` returns."""
        with self._lock:
            self.activate()
            self.all[number].stream.wait_event(event())
        self._of_thread.number = number
        self.activate()
        self.keep()

    def leave(self) -> None:
        """Direct this thread's kernels to COMPUTE again."""
        self.keep()  # again, if what came in between has joined
        self._of_thread.number = COMPUTE
        self.activate()

    def keep(self, *arrays: Any) -> None:
        """Register this thread's stream, for which COMPUTE's next ``join`` waits; keep ``arrays`` until then."""
        if self.number != COMPUTE:
            with self._lock:
                self._kept.setdefault(self.number, []).extend(arrays)

    def join(self) -> None:
        """Order all later work of COMPUTE after all work that the other streams were given."""
        with self._lock:
            self.activate()
            for number in self._kept:
                self.all[COMPUTE].stream.wait_event(self.all[number].record_event())
            self._kept.clear()
