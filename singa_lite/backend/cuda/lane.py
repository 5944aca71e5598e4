# SPDX-License-Identifier: Apache-2.0
"""The streams of a GPU's backend, and the memory that the kernels on each hand to one another.

Note [lanes]: a backend has three. All computes on ``MAIN``. What brings gradients into a message runs on ``PACK``, and
what makes means of what came back on ``UNPACK``, so that both go on beside the backward pass and the reduction, which
has a stream of its own (comm/nccl.py). Events alone order them. Kernels of one lane run one after the other, so what
they share - scratch memory, counters that are zero between kernels, cuBLAS's workspace - is the lane's.
Each stream has memory of its own in cupy's pools, which is given out again as soon as Python lets go of it: to work
that comes later on the same stream. So what kernels of PACK and UNPACK read or write is kept until MAIN was told to
wait for them (``join``), with which every ``unpacking`` ends. PACK goes on only behind what MAIN was given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import cupy
import numpy as np

from ...graph import is_repeating
from ..base import Array
from .cublas import Cublas

MAIN, PACK, UNPACK = range(3)


class Lane:
    """One of a backend's streams; made while its GPU is the current one.

    Args:
        priority: CUDA's; a lower number goes first where the GPU is full.

    Attributes:
        stream: a cupy stream.
        address: its handle.
        ticket: zero between kernels, see is_last_block in common.cuh.
    """

    def __init__(self, priority: int) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True, priority=priority)
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


class Lanes:
    """The lanes of a backend, and which of them a thread's kernels go to.

    Args:
        device: cupy's.
        turn: held while a stream is given something.

    Attributes:
        all: the lanes, in the order of their names.
    """

    def __init__(self, device: Any, turn: AbstractContextManager[None]) -> None:
        self._device, self._turn = device, turn
        self.all = [Lane(priority) for priority in (0, -1, -1)]  # small kernels that others wait for
        self._kept: dict[int, list[Any]] = {}  # by lane that MAIN has not waited for: what its kernels use
        self._of_thread = threading.local()
        self.activate()

    @property
    def number(self) -> int:
        """Of the lane that this thread's kernels go to."""
        return getattr(self._of_thread, "number", MAIN)

    @property
    def current(self) -> Lane:
        """That lane."""
        return self.all[self.number]

    def activate(self) -> None:
        """Make the device and that lane's stream the thread's current ones, which cupy then uses."""
        lane = self.current
        # a stream's handle tells its device as well
        if cupy.cuda.get_current_stream().ptr != lane.address and not is_repeating():
            self._device.use()
            lane.stream.use()

    @contextmanager
    def on(self, number: int, event: Callable[[], Any]) -> Iterator[None]:
        """Let this thread's kernels go to a lane, behind what ``event`` gives."""
        before = self.number
        try:
            if not is_repeating():
                with self._turn:
                    self.activate()
                    self.all[number].stream.wait_event(event())
            self._of_thread.number = number
            self.activate()
            self.keep()
            yield
            self.keep()  # again, if what is inside has joined
        finally:
            self._of_thread.number = before
            self.activate()

    def keep(self, *arrays: Any) -> None:
        """Let MAIN's next ``join`` wait for this thread's lane, and keep ``arrays`` until then."""
        if self.number != MAIN and not is_repeating():
            with self._turn:
                self._kept.setdefault(self.number, []).extend(arrays)

    def join(self) -> None:
        """Let what MAIN is given from now on come after all that the others were given."""
        if is_repeating():
            return
        with self._turn:
            self.activate()
            for number in self._kept:
                self.all[MAIN].stream.wait_event(self.all[number].mark())
            self._kept.clear()
