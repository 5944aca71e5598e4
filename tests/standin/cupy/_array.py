# SPDX-License-Identifier: Apache-2.0
"""Arrays of the stand-in."""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from typing import Any, ClassVar

import numpy as np

from . import cuda

GUARD = 256  # bytes watched on both sides, and the alignment of memory
PATTERN = 0xA5
# memory that work given to streams may still use: cudaFree would wait for that, here the host's next wait frees it
GRAVES: list[Block] = []
LEAKED: list[DeviceMemory] = []  # what pools that have ended still held


class Block:
    """Bytes with a guard on both sides, NaNs at first."""

    def __init__(self, num_bytes: int) -> None:
        whole = np.full(num_bytes + 3 * GUARD, PATTERN, np.uint8)
        start = -whole.ctypes.data % GUARD + GUARD
        self.bytes = whole[start : start + num_bytes]
        self.ptr = whole.ctypes.data + start
        self.sides = whole[:start], whole[start + num_bytes :]

    def check(self) -> None:
        """Fail if something wrote beside the memory."""
        assert all((side == PATTERN).all() for side in self.sides), "a kernel wrote beside an array"


class DeviceMemory:
    """What cudaMalloc gives, until nothing refers to it; cupy calls it Memory.

    Python's collector may finish what is in a circle in any order and more than once, numpy's arrays only when nothing
    refers to them: so one of these says when the memory is freed.

    Attributes:
        allocated_bytes: of all that is not yet freed.
        limit_bytes: which these may not exceed, STANDIN_MEMORY_BYTES if that is set; None: there is no limit.
    """

    allocated_bytes: ClassVar[int] = 0
    limit_bytes: ClassVar[int | None] = int(os.environ.get("STANDIN_MEMORY_BYTES", "0")) or None

    def __init__(self, num_bytes: int) -> None:
        limit = DeviceMemory.limit_bytes
        if limit is not None and DeviceMemory.allocated_bytes + num_bytes > limit:
            raise cuda.runtime.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.block = Block(num_bytes)
        self.ptr, self.device_id = self.block.ptr, cuda.current()[-1]
        self._last_reference = np.empty(0)
        DeviceMemory.allocated_bytes += num_bytes
        weakref.finalize(self._last_reference, self._free, self.block).atexit = False

    @staticmethod
    def _free(block: Block) -> None:
        DeviceMemory.allocated_bytes -= len(block.bytes)
        GRAVES.append(block)


class MemoryPool:
    """Memory that no array lies in, by device, stream and size. As in cupy's, the next array of a stream gets what
    its last one had, though work that was given to the stream may not have come to it yet: right for that stream's work
    alone.

    As in cupy's from 14.1 on, a pool frees what is unused on the current device when it is told to or has no more
    memory, and not when it ends; memory of an array that outlives its pool is freed with the array.
    """

    def __init__(self, allocator: Any = None) -> None:
        self.allocator = allocator or (lambda num_bytes: MemoryPointer(DeviceMemory(num_bytes)))
        self.free: dict[tuple[int, int, int], list[DeviceMemory]] = {}
        # one for all arrays: collected with an array it would say that the pool is gone
        self.weak = weakref.ref(self)

    def malloc(self, num_bytes: int) -> MemoryPointer:
        place = cuda.current()[-1], cuda.get_current_stream().ptr, num_bytes
        return MemoryPointer(Memory(self, place, self.take(place)))

    def take(self, place: tuple[int, int, int]) -> DeviceMemory:
        if unused := self.free.get(place):
            return unused.pop()
        num_bytes = place[-1]
        try:
            return self.allocator(num_bytes).mem
        except cuda.runtime.CUDARuntimeError:
            self.free_all_blocks()
        try:
            return self.allocator(num_bytes).mem
        except cuda.runtime.CUDARuntimeError as error:
            raise MemoryError(str(error)) from error

    def take_back(self, place: tuple[int, int, int], memory: DeviceMemory) -> None:
        self.free.setdefault(place, []).append(memory)

    def free_all_blocks(self) -> None:
        # not items(): pairs are allocated, and a collection may give memory back then
        for place in tuple(self.free):
            while self.free[place] and place[0] == cuda.current()[-1]:
                self.free[place].pop()

    def __del__(self, leaked: list[DeviceMemory] = LEAKED) -> None:  # a default outlives the module
        for unused in self.free.values():
            leaked += unused


class Memory:
    """Memory of a pool while an array lies in it; cupy calls it PooledMemory."""

    def __init__(self, pool: MemoryPool, place: tuple[int, int, int], memory: DeviceMemory) -> None:
        self.pool, self.place, self.memory, self.block = pool.weak, place, memory, memory.block
        self.bytes, self.ptr, self.device_id = self.block.bytes, self.block.ptr, place[0]
        cuda.do(lambda values=self.bytes: values.fill(0xFF))

    def __del__(self) -> None:
        if (pool := self.pool()) is not None:
            pool.take_back(self.place, self.memory)


class UnownedMemory:
    """Memory of somebody else."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.owner = ptr, owner
        self.device_id = cuda.current()[-1] if device_id < 0 else device_id
        self.bytes = np.frombuffer((ctypes.c_char * size).from_address(ptr), np.uint8)


class MemoryPointer:
    """A place in memory."""

    def __init__(self, mem: Memory | UnownedMemory, offset: int = 0) -> None:
        self.mem, self.offset, self.device_id = mem, offset, mem.device_id

    @property
    def ptr(self) -> int:
        return self.mem.ptr + self.offset

    def __add__(self, num_bytes: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.offset + num_bytes)

    def copy_from_device_async(self, source: MemoryPointer, num_bytes: int, stream: Any = None) -> None:
        to = self.mem.bytes[self.offset : self.offset + num_bytes]
        values = source.mem.bytes[source.offset : source.offset + num_bytes]
        assert len(to) == len(values) == num_bytes
        cuda.do(lambda: np.copyto(to, values))

    def memset_async(self, value: int, num_bytes: int) -> None:
        to = self.mem.bytes[self.offset : self.offset + num_bytes]
        cuda.do(lambda: to.fill(value))


def _elementwise(function: Any) -> Any:
    """A method of arrays that applies a function of numpy's, and gives a new array."""

    def call(self: ndarray, *others: Any) -> ndarray:
        given = [x.host if isinstance(x, ndarray) else x for x in (self, *others)]
        sample = function(
            *(np.ones((1,) * x.ndim, x.dtype) if isinstance(x, np.ndarray) else x for x in given)
        )
        made = ndarray(np.broadcast_shapes(*(np.shape(x) for x in given)), sample.dtype)
        to = made.host
        cuda.do(lambda: np.copyto(to, function(*given)))
        return made

    return call


class ndarray:
    """An array "on the device"; ``host`` is its memory as numpy sees it, for the stand-in itself."""

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None, strides: Any = None
    ) -> None:
        shape, dtype = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,), np.dtype(dtype)
        self.data = memptr or cuda.malloc(math.prod(shape) * dtype.itemsize)
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

    __add__ = _elementwise(np.add)
    __mul__ = _elementwise(np.multiply)
    __truediv__ = _elementwise(np.divide)
    __and__ = _elementwise(np.bitwise_and)
    __or__ = _elementwise(np.bitwise_or)
    __lshift__ = _elementwise(np.left_shift)
    __rshift__ = _elementwise(np.right_shift)
    __invert__ = _elementwise(np.invert)
    __ne__ = _elementwise(np.not_equal)
    __hash__ = object.__hash__

    def __itruediv__(self, divisor: Any) -> ndarray:
        to = self.host
        cuda.do(lambda: np.divide(to, divisor, out=to))
        return self

    def reshape(self, *shape: Any) -> ndarray:
        return self._view(self.host.reshape(*shape))

    def transpose(self, *axes: int) -> ndarray:
        return self._view(self.host.transpose(*axes))

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def view(self, dtype: Any) -> ndarray:
        return self._view(self.host.view(dtype))

    def __getitem__(self, place: Any) -> ndarray:
        places = place if isinstance(place, tuple) else (place,)
        return self._view(self.host[places if Ellipsis in places else (*places, ...)])

    def __setitem__(self, place: Any, values: ndarray) -> None:
        target, given = self[place].host, values.host
        cuda.do(lambda: np.copyto(target, given, casting="same_kind"))

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        made = ndarray(self.shape, dtype)
        to, values = made.host, self.host
        cuda.do(lambda: np.copyto(to, values, casting="unsafe"))
        return made

    def copy(self) -> ndarray:
        return self.astype(self.dtype)

    def __deepcopy__(self, memo: object) -> ndarray:
        return self.copy()

    def __len__(self) -> int:
        return len(self.host)

    def get(self, stream: Any = None, order: str = "C", out: np.ndarray | None = None) -> np.ndarray:
        cuda.get_current_stream().synchronize()
        if out is None:
            return np.array(self.host, order="C")
        if out.shape != self.shape or out.dtype != self.dtype or not out.flags.c_contiguous:
            raise ValueError("get: out must be contiguous and of the array's shape and dtype")
        np.copyto(out, self.host)
        return out

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
