# SPDX-License-Identifier: Apache-2.0
"""Devices, streams and pinned memory of the stand-in: two GPUs.

Work is done some time after the call, by streams of the stand-in libcuda (../../cuda/driver.cc), which NCCL's
stand-in knows as well. An error in it is raised by a later call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .._array import DeviceMemory as Memory
from .._array import MemoryPointer, MemoryPool, UnownedMemory
from . import pinned_memory, runtime
from ._streams import Event, Stream, current
from .pinned_memory import alloc_pinned_memory

_LOCAL = threading.local()


class Device:
    def __init__(self, device: int = 0) -> None:
        self.id = device
        self.compute_capability = "90"
        self.attributes = {"MultiProcessorCount": 2}
        self.mem_info = (3 << 30, 4 << 30)

    def use(self) -> None:
        current()[-1] = self.id

    def __enter__(self) -> Device:
        self._before = current()[-1]
        self.use()
        return self

    def __exit__(self, *error: object) -> None:
        current()[-1] = self._before


NULL = Stream(null=True)


def get_current_stream(device_id: int = -1) -> Stream:
    streams = current()
    return streams.get(streams[-1] if device_id < 0 else device_id, NULL)


def do(what: Callable[[], None]) -> None:
    """Work for the current stream: done some time later, or captured."""
    get_current_stream().add(what)


def is_capturing() -> bool:
    return get_current_stream().is_capturing()


DEFAULT_POOL = MemoryPool()


def malloc(num_bytes: int) -> MemoryPointer:
    allocate = getattr(_LOCAL, "allocate", None) or DEFAULT_POOL.malloc
    return allocate(num_bytes)


@contextmanager
def using_allocator(allocator: Callable[[int], MemoryPointer]) -> Iterator[None]:
    before = getattr(_LOCAL, "allocate", None)
    _LOCAL.allocate = allocator
    try:
        yield
    finally:
        _LOCAL.allocate = before


from . import _cublas  # noqa: E402 - it gives its work to do()


def __getattr__(name: str) -> Any:
    if name != "cublas":
        raise AttributeError(name)
    _cublas.install()
    return _cublas


__all__ = [
    "Device",
    "Event",
    "Memory",
    "MemoryPointer",
    "MemoryPool",
    "Stream",
    "UnownedMemory",
    "alloc_pinned_memory",
    "do",
    "get_current_stream",
    "is_capturing",
    "pinned_memory",
    "runtime",
    "using_allocator",
]
