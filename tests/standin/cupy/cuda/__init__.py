# SPDX-License-Identifier: Apache-2.0
"""Devices, streams and pinned memory of the stand-in: two GPUs, whose work is done when a call returns."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

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


class Stream:
    number = 0x5000

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        Stream.number += 0x10
        self.ptr = 0 if null else Stream.number
        self.device_id = _current()[-1]

    def use(self) -> Stream:
        _current()[self.device_id] = self
        return self

    def synchronize(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False


NULL = Stream(null=True)


def get_current_stream() -> Stream:
    streams = _current()
    return streams.get(streams[-1], NULL)


class _Pinned(bytearray):
    @property
    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


def alloc_pinned_memory(num_bytes: int) -> Any:
    return _Pinned(num_bytes)


__all__ = ["Device", "Stream", "alloc_pinned_memory", "get_current_stream", "runtime"]
