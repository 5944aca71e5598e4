# SPDX-License-Identifier: Apache-2.0
"""What a communicator does itself with arrays on a GPU: make, cast, find them. NCCL is not here, but in nccl.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .wire import BFLOAT16


class GpuArrays(Protocol):
    """What happens to arrays on the way: on the current stream, without waiting for it.

    Attributes:
        kind: the arrays' type; all of it can be written. Other types are asked by their __cuda_array_interface__.
    """

    @property
    def kind(self) -> type[Any]: ...

    def address(self, array: Any) -> int:
        """Where the array lies."""

    def stream(self, device: int) -> int:
        """Handle of the stream that is current for GPU ``device``; 1 is CUDA's default one."""

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """A new array of undefined content."""

    def wrap(self, address: int, count: int, dtype: Any, owner: object, device: int) -> Any:
        """An array of zeros, shape (count,), in memory of GPU ``device`` that ``owner`` keeps."""

    def narrow(self, array: Any, wire: np.dtype[Any]) -> Any:
        """A copy of a float32 array as wire.py's ``narrow`` makes it."""

    def widen(self, half: Any, divisor: float, out: Any) -> None:
        """Write what ``narrow`` made, divided by ``divisor``, into float32 ``out``."""


# Of wire.py, in one kernel each: name -> what it takes, what it gives, and how
KERNELS = {
    "narrow_to_bfloat16": (
        "float32 value",
        "uint16 wire",
        """
        unsigned bits = __float_as_uint(value);
        wire = value != value ? bits >> 16 | 0x40 : (bits + (bits >> 16 & 1) + 0x7fff) >> 16;
        """,
    ),
    "widen_bfloat16": (
        "uint16 wire, float32 divisor",
        "float32 value",
        "value = __uint_as_float((unsigned)wire << 16) / divisor",
    ),
    "widen_float16": ("float16 wire, float32 divisor", "float32 value", "value = (float)wire / divisor"),
}


class CupyArrays:
    """cupy's arrays, without their __cuda_array_interface__: cupy builds that anew whenever it is asked for."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._kernels = {name: cupy.ElementwiseKernel(*kernel, name) for name, kernel in KERNELS.items()}
        self.kind: type[Any] = cupy.ndarray
        self._current_stream = cupy.cuda.get_current_stream

    def address(self, array: Any) -> int:
        return array.data.ptr  # type: ignore[no-any-return]

    def stream(self, device: int) -> int:
        return self._current_stream(device).ptr or 1

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._cupy.empty(tuple(shape), dtype)

    def wrap(self, address: int, count: int, dtype: Any, owner: object, device: int) -> Any:
        cuda, num_bytes = self._cupy.cuda, count * np.dtype(dtype).itemsize
        place = cuda.MemoryPointer(cuda.UnownedMemory(address, num_bytes, owner, device), 0)
        place.memset_async(0, num_bytes)
        return self._cupy.ndarray((count,), dtype, place)

    def narrow(self, array: Any, wire: np.dtype[Any]) -> Any:
        return self._kernels["narrow_to_bfloat16"](array) if wire == BFLOAT16 else array.astype(wire)

    def widen(self, half: Any, divisor: float, out: Any) -> None:
        name = "widen_bfloat16" if half.dtype == BFLOAT16 else "widen_float16"
        self._kernels[name](half, np.float32(divisor), out)
