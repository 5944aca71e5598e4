# SPDX-License-Identifier: Apache-2.0
"""Streams and graphs of the stand-in: those of the stand-in libcuda, whose work here is Python's."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.standin import compiling

from .._array import GRAVES
from . import runtime

_LOCAL = threading.local()


def current() -> dict[int, Any]:
    """Device number -> the thread's current stream; -1 -> the number of its current device."""
    if not hasattr(_LOCAL, "streams"):
        _LOCAL.streams = {-1: 0}
    found: dict[int, Any] = _LOCAL.streams
    return found


class Queues:
    """The stand-in libcuda, as Python sees it."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL(str(compiling.driver()))
        for function in (self.cuda.standin_end_capture, self.cuda.standin_stream):
            function.restype = ctypes.c_void_p
        self._entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._run)
        self._numbers = itertools.count(1)
        self._works: dict[int, tuple[Callable[[], None], bool]] = {}
        self._errors: list[BaseException] = []

    def use_primary_context(self, device_id: int) -> None:
        """Make a GPU's context the thread's own, as CUDA's runtime does."""
        context = ctypes.c_void_p()
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device_id))
        self.check(self.cuda.cuCtxSetCurrent(context))

    def add(self, stream: int, what: Callable[[], None], is_captured: bool) -> None:
        number = next(self._numbers)
        self._works[number] = what, is_captured
        self.check(self.cuda.cuLaunchHostFunc(ctypes.c_void_p(stream), self._entry, ctypes.c_void_p(number)))

    def _run(self, number: int) -> None:
        what, is_captured = self._works[number]
        if not is_captured:  # else a graph may run it again, even one that Python has let go
            del self._works[number]
        try:
            with np.errstate(all="ignore"):
                what()
        except BaseException as error:
            self._errors.append(error)

    def check(self, status: int) -> None:
        if self._errors:
            raise self._errors.pop()
        if status:
            raise runtime.CUDARuntimeError(f"the stand-in libcuda answers with {status}")


class Graph:
    """What ``end_capture`` gives: a CUDA graph, made executable without flags."""

    def __init__(self, graph: int) -> None:
        self.graphExec = runtime.graphInstantiate(graph)
        runtime.graphDestroy(graph)

    def launch(self, stream: Stream) -> None:
        runtime.graphLaunch(self.graphExec, stream.ptr)

    def __del__(self) -> None:
        if hasattr(self, "graphExec"):
            runtime.graphExecDestroy(self.graphExec)


class Stream:
    """A stream of the stand-in libcuda."""

    def __init__(self, null: bool = False, non_blocking: bool = False, priority: int = 0) -> None:
        address = ctypes.c_void_p()
        if not null:
            QUEUES.use_primary_context(current()[-1])
            assert non_blocking
            address.value = QUEUES.cuda.standin_stream(priority)
        self.ptr, self.device_id = address.value or 0, current()[-1]

    def use(self) -> Stream:
        current()[self.device_id] = self
        return self

    def add(self, what: Callable[[], None]) -> None:
        assert self.ptr, "work for the default stream"
        QUEUES.add(self.ptr, what, self.is_capturing())

    def begin_capture(self) -> None:
        runtime.streamBeginCapture(self.ptr)

    def end_capture(self) -> Graph:
        assert self.is_capturing()
        return Graph(runtime.streamEndCapture(self.ptr))

    def is_capturing(self) -> bool:
        status = ctypes.c_int()
        QUEUES.check(QUEUES.cuda.cuStreamIsCapturing(ctypes.c_void_p(self.ptr), ctypes.byref(status)))
        return bool(status.value)

    def wait_event(self, event: Event) -> None:
        QUEUES.check(QUEUES.cuda.cuStreamWaitEvent(ctypes.c_void_p(self.ptr), event.handle, 0))

    def synchronize(self) -> None:
        assert not self.is_capturing(), "a captured stream cannot be waited for"
        unused = []  # each held by one thread, until it has waited
        while GRAVES:
            unused.append(GRAVES.pop())
        QUEUES.check(QUEUES.cuda.cuStreamSynchronize(ctypes.c_void_p(self.ptr)))


class Event:
    """An event of the stand-in libcuda."""

    def __init__(self, disable_timing: bool = False) -> None:
        assert disable_timing, "slow"
        self.handle = ctypes.c_void_p()
        QUEUES.use_primary_context(current()[-1])
        QUEUES.check(QUEUES.cuda.cuEventCreate(ctypes.byref(self.handle), 2))

    def record(self, stream: Stream) -> None:
        self._stream = stream
        QUEUES.check(QUEUES.cuda.cuEventRecord(self.handle, ctypes.c_void_p(stream.ptr)))

    def synchronize(self) -> None:
        self._stream.synchronize()

    def __del__(self) -> None:
        QUEUES.cuda.cuEventDestroy_v2(self.handle)


QUEUES = Queues()
