# SPDX-License-Identifier: Apache-2.0
"""Page-locked memory of the stand-in, which work given to streams reads without a copy."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any


class _Pinned(bytearray):
    @property
    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


_ALL: weakref.WeakValueDictionary[int, _Pinned] = weakref.WeakValueDictionary()  # by address


def alloc_pinned_memory(num_bytes: int) -> Any:
    made = _Pinned(num_bytes)
    _ALL[made.ptr] = made
    return made


def is_memory_pinned(ptr: int) -> bool:
    return any(start <= ptr < start + len(memory) for start, memory in list(_ALL.items()))
