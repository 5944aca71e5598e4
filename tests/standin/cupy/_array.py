# SPDX-License-Identifier: Apache-2.0
"""Arrays of the stand-in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import cuda

GUARD = 256  # bytes watched on both sides, and the alignment of memory
PATTERN = 0xA5


class Memory:
    """Bytes with a guard on both sides, NaNs at first."""

    def __init__(self, num_bytes: int) -> None:
        self.whole = np.full(num_bytes + 3 * GUARD, PATTERN, np.uint8)
        start = -self.whole.ctypes.data % GUARD + GUARD
        self.bytes = self.whole[start : start + num_bytes]
        self.bytes[...] = 0xFF
        self.ptr = self.whole.ctypes.data + start
        self.sides = self.whole[:start], self.whole[start + num_bytes :]

        if cuda.is_capturing():
            cuda.do(
                lambda: self and None
            )  # it lives as long as the graph, as memory of the graph's own pool does

    def check(self) -> None:
        """Fail if something wrote beside the memory."""
        assert all((side == PATTERN).all() for side in self.sides), "a kernel wrote beside an array"


class MemoryPointer:
    """A place in memory."""

    def __init__(self, mem: Memory, offset: int = 0) -> None:
        self.mem, self.offset = mem, offset

    @property
    def ptr(self) -> int:
        return self.mem.ptr + self.offset

    def __add__(self, num_bytes: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.offset + num_bytes)

    def copy_from_device_async(self, source: MemoryPointer, num_bytes: int, stream: Any = None) -> None:
        to, start = self.mem.bytes, source.offset
        assert len(to) >= self.offset + num_bytes and len(source.mem.bytes) >= start + num_bytes

        def copy() -> None:
            to[self.offset : self.offset + num_bytes] = source.mem.bytes[start : start + num_bytes]

        cuda.do(copy)


class ndarray:
    """An array "on the device"; ``host`` is its memory as numpy sees it, for the stand-in itself."""

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None, strides: Any = None
    ) -> None:
        shape, dtype = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,), np.dtype(dtype)
        self.data = memptr or MemoryPointer(Memory(math.prod(shape) * dtype.itemsize))
        self.host = np.ndarray(shape, dtype, self.data.mem.bytes.data, self.data.offset, strides)
        self.base: ndarray | None = None

    def _view(self, host: np.ndarray) -> ndarray:
        assert host.size == 0 or np.shares_memory(host, self.data.mem.bytes), "this would be a copy"
        offset = host.ctypes.data - self.data.mem.ptr if host.size else self.data.offset
        made = ndarray(host.shape, host.dtype, MemoryPointer(self.data.mem, offset), host.strides)
        made.base = self if self.base is None else self.base
        return made

    dtype = property(lambda self: self.host.dtype)
    shape = property(lambda self: self.host.shape)
    strides = property(lambda self: self.host.strides)
    ndim = property(lambda self: self.host.ndim)
    size = property(lambda self: self.host.size)
    nbytes = property(lambda self: self.host.nbytes)
    itemsize = property(lambda self: self.host.itemsize)
    flags = property(lambda self: self.host.flags)

    def reshape(self, *shape: Any) -> ndarray:
        return self._view(self.host.reshape(*shape))

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def view(self, dtype: Any) -> ndarray:
        return self._view(self.host.view(dtype))

    def __getitem__(self, place: Any) -> ndarray:
        places = place if isinstance(place, tuple) else (place,)
        return self._view(self.host[places if Ellipsis in places else (*places, ...)])

    def __setitem__(self, place: Any, values: ndarray) -> None:
        target = self[place]
        cuda.do(lambda: np.copyto(target.host, values.host, casting="same_kind"))

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        made = ndarray(self.shape, dtype)
        cuda.do(lambda: np.copyto(made.host, self.host, casting="unsafe"))
        return made

    def copy(self) -> ndarray:
        return self.astype(self.dtype)

    def __len__(self) -> int:
        return len(self.host)

    def get(self, stream: Any = None, order: str = "C") -> np.ndarray:

        assert not cuda.is_capturing(), "a captured stream cannot be waited for"
        return np.array(self.host, order="C")

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("implicit conversion to a numpy array is not allowed; use get()")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:

        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "version": 3,
            "strides": None if self.flags.c_contiguous else self.strides,
            "stream": cuda.get_current_stream().ptr or 1,
        }
