# SPDX-License-Identifier: Apache-2.0
"""Devices, streams and pinned memory of the stand-in: two GPUs, whose work is done when a call returns.

Where STANDIN_STREAMS names the stand-in libcuda (native/tests/standin_cuda.cc), work is done some time after the call,
by its streams, which NCCL's stand-in knows as well; and a graph runs its work in another order each time.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .._array import MemoryPointer, MemoryPool, UnownedMemory
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

    def add(self, what: Callable[[], None]) -> None:
        if self.tape is None:
            what()
        else:
            self.tape.append(what)

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


class Queues:
    """The stand-in libcuda, as Python sees it."""

    def __init__(self, library: str) -> None:
        self.cuda = ctypes.CDLL(library)
        self.cuda.standin_end_capture.restype = ctypes.c_void_p
        self.cuda.cuCtxPushCurrent_v2(None)
        self.errors: list[BaseException] = []
        self.callbacks: list[Any] = []  # of what no graph keeps; they end with the process

    def new(self) -> int:
        stream = ctypes.c_void_p()
        assert self.cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, -5) == 0
        assert stream.value
        return stream.value

    def callback(self, what: Callable[[], None]) -> Any:
        def call(_: object) -> None:
            try:
                what()
            except BaseException as error:
                self.errors.append(error)

        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call)

    def check(self, status: int) -> None:
        if self.errors:
            raise self.errors[0]
        if status:
            raise runtime.CUDARuntimeError(f"the stand-in libcuda answers with {status}")


class QueuedGraph:
    """A CUDA graph in the stand-in libcuda."""

    def __init__(self, handle: int | None, kept: list[Any]) -> None:
        assert handle, "a stream that took part in the capture was not joined"
        self.handle, self.kept, self.launches = handle, kept, 0

    def launch(self, stream: QueuedStream) -> None:
        self.launches += 1
        QUEUES.check(QUEUES.cuda.standin_launch(ctypes.c_void_p(self.handle), ctypes.c_void_p(stream.ptr)))

    def __del__(self) -> None:
        QUEUES.callbacks += self.kept  # it may still run
        QUEUES.cuda.standin_destroy(ctypes.c_void_p(self.handle))


class QueuedStream(Stream):
    """A stream of the stand-in libcuda; ``tape`` keeps the callbacks of a capture."""

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        super().__init__(null, non_blocking)
        self.ptr = 0 if null else QUEUES.new()

    def add(self, what: Callable[[], None]) -> None:
        assert self.ptr, "work for the default stream"
        callback = QUEUES.callback(what)
        (QUEUES.callbacks if self.tape is None else self.tape).append(callback)
        QUEUES.check(QUEUES.cuda.cuLaunchHostFunc(ctypes.c_void_p(self.ptr), callback, None))

    def begin_capture(self) -> None:
        super().begin_capture()
        QUEUES.check(QUEUES.cuda.standin_begin_capture(ctypes.c_void_p(self.ptr)))

    def end_capture(self) -> Any:
        kept, self.tape = self.tape, None
        assert kept is not None
        return QueuedGraph(QUEUES.cuda.standin_end_capture(ctypes.c_void_p(self.ptr)), kept)

    def synchronize(self) -> None:
        super().synchronize()
        QUEUES.check(QUEUES.cuda.cuStreamSynchronize(ctypes.c_void_p(self.ptr)))


if "STANDIN_STREAMS" in os.environ:
    QUEUES = Queues(os.environ["STANDIN_STREAMS"])
    Stream = QueuedStream  # type: ignore[misc]


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
    get_current_stream().add(what)


def is_capturing() -> bool:
    return get_current_stream().tape is not None


DEFAULT_POOL = MemoryPool()


def malloc(num_bytes: int) -> MemoryPointer:
    allocate = getattr(_LOCAL, "allocate", None) or DEFAULT_POOL.malloc
    return allocate(num_bytes)


@contextmanager
def using_allocator(allocate: Callable[[int], MemoryPointer]) -> Iterator[None]:
    before = getattr(_LOCAL, "allocate", None)
    _LOCAL.allocate = allocate
    try:
        yield
    finally:
        _LOCAL.allocate = before


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
    "UnownedMemory",
    "alloc_pinned_memory",
    "do",
    "get_current_stream",
    "is_capturing",
    "runtime",
    "using_allocator",
]
