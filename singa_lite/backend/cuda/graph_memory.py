# SPDX-License-Identifier: Apache-2.0
"""The memory that kernels of captured graphs allocate for themselves.

Note [memory of graphs]: such memory belongs to the graph from then on, so it comes from a pool that nobody else uses;
all graphs of a step share it, as they run one after the other. The pool's own memory must outlive the graphs even where
the pool frees it, which cupy's does when the device has no more, so it is kept here. And it must not outlive them:
cupy's pool (14.1 and later) never releases what is free in it when it ends, so it is emptied before. What is in use
then is freed with its arrays, but only if they find the pool gone: so nothing else keeps it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy


class GraphMemory:
    """A pool of memory that stays where it is until this object ends.

    Args:
        device_id: number of the GPU.
    """

    def __init__(self, device_id: int) -> None:
        kept: list[Any] = []

        def malloc(num_bytes: int) -> Any:
            try:
                memory = cupy.cuda.Memory(num_bytes)
            except cupy.cuda.runtime.CUDARuntimeError:  # perhaps other pools have what is missing
                cupy.get_default_memory_pool().free_all_blocks()
                memory = cupy.cuda.Memory(num_bytes)
            kept.append(memory)
            return cupy.cuda.MemoryPointer(memory, 0)

        self._pools = [cupy.cuda.MemoryPool(malloc)]
        # not at the interpreter's end: cudaFree would wait for collectives, before NCCL is left
        weakref.finalize(self, _release, device_id, self._pools, kept).atexit = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside the ``with`` block this thread allocates here."""
        with cupy.cuda.using_allocator(self._pools[0].malloc):
            yield


def _release(device_id: int, pools: list[Any], kept: list[Any]) -> None:
    with cupy.cuda.Device(device_id):  # a pool frees what it has on the current device
        pools.pop().free_all_blocks()
    kept.clear()
