# SPDX-License-Identifier: Apache-2.0
"""Devices, streams and pinned memory of the stand-in: two GPUs, whose work is done when a call returns."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .._array import MemoryPointer
from . import runtime

_LOCAL = threading.local()


def _current() -> dict[int, Any]:
    """Device number -> the thread's current stream; -1 -> the number of its current device."""
    if not hasattr(_LOCAL, "streams"):
        _LOCAL.streams = {-1: 0}
    found: dict[int, Any] = _LOCAL.streams
    return found


class Device:
    def __init__(self, device: int = 0) -> None:
        self.id = device
        self.attributes = {"MultiProcessorCount": 2}
        self.mem_info = (3 << 30, 4 << 30)

    def use(self) -> None:
        _current()[-1] = self.id


class CudaGraph:
    """What was captured, to be done at each launch."""

    def __init__(self, tape: list[Callable[[], None]]) -> None:
        self.tape, self.launches = tape, 0

    def launch(self, stream: Stream) -> None:
        assert stream.tape is None, "a graph was launched into a capture"
        self.launches += 1
        for do in self.tape:
            do()


class Stream:
    """``tape`` is what a capture has collected, None outside of one."""

    number = 0x5000

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        Stream.number += 0x10
        self.ptr = 0 if null else Stream.number
        self.device_id = _current()[-1]
        self.tape: list[Callable[[], None]] | None = None

    def begin_capture(self) -> None:
        assert self.ptr and self.tape is None
        self.tape = []

    def end_capture(self) -> CudaGraph:
        tape, self.tape = self.tape, None
        assert tape is not None
        return CudaGraph(tape)

    def use(self) -> Stream:
        _current()[self.device_id] = self
        return self

    def synchronize(self) -> None:
        assert self.tape is None, "a captured stream cannot be waited for"

    def is_capturing(self) -> bool:
        return self.tape is not None


class Event:
    def __init__(self, disable_timing: bool = False) -> None:
        pass

    def record(self, stream: Stream) -> None:
        self._stream = stream

    def synchronize(self) -> None:
        self._stream.synchronize()


NULL = Stream(null=True)


def get_current_stream(device_id: int = -1) -> Stream:
    streams = _current()
    return streams.get(streams[-1] if device_id < 0 else device_id, NULL)


def do(what: Callable[[], None]) -> None:
    """Work for the current stream: done at once, or captured."""
    tape = get_current_stream().tape
    if tape is None:
        what()
    else:
        tape.append(what)


def is_capturing() -> bool:
    return get_current_stream().tape is not None


class MemoryPool:
    def malloc(self, num_bytes: int) -> None:
        raise NotImplementedError("the stand-in makes arrays without it")


@contextmanager
def using_allocator(malloc: Callable[[int], None]) -> Iterator[None]:
    yield


class _Pinned(bytearray):
    @property
    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


def alloc_pinned_memory(num_bytes: int) -> Any:
    return _Pinned(num_bytes)


from . import _cublas  # noqa: E402 - it gives its work to do()


def __getattr__(name: str) -> Any:
    if name != "cublas":
        raise AttributeError(name)
    _cublas.install()
    return _cublas


__all__ = [
    "Device",
    "Event",
    "MemoryPointer",
    "MemoryPool",
    "Stream",
    "alloc_pinned_memory",
    "do",
    "get_current_stream",
    "is_capturing",
    "runtime",
    "using_allocator",
]
