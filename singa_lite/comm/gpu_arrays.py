# SPDX-License-Identifier: Apache-2.0
"""What a communicator does itself with arrays on a GPU: make, cast, find them. NCCL is not here, but in nccl.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .wire import BFLOAT16

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
    """Arrays on one GPU: made, cast and found on the current stream, without waiting for it.

    New ones are cupy's. Those of other libraries are asked by their ``__cuda_array_interface__``; cupy's are not, since
    cupy builds that anew whenever it is asked for.

    Args:
        device: number of the GPU.

    Attributes:
        kind: the type of cupy's arrays; all of it can be written.
    """

    def __init__(self, device: int) -> None:
        import cupy

        self.device = device
        self.kind: type[Any] = cupy.ndarray
        self._cupy = cupy
        self._kernels = {name: cupy.ElementwiseKernel(*kernel, name) for name, kernel in KERNELS.items()}
        self._current_stream = cupy.cuda.get_current_stream

    def address(self, array: Any) -> int:
        """Where ``array`` lies."""
        if type(array) is self.kind:
            return array.data.ptr  # type: ignore[no-any-return]
        return int(array.__cuda_array_interface__["data"][0])

    def stream(self, array: Any) -> int:
        """Handle of the stream that is current for ``array``'s library; 1 is CUDA's default one."""
        if type(array) is self.kind:
            return self._current_stream(self.device).ptr or 1
        return array.__cuda_array_interface__.get("stream") or 1

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """A new array of undefined content."""
        return self._cupy.empty(tuple(shape), dtype)

    def wrap(self, address: int, count: int, dtype: Any, owner: object) -> Any:
        """An array of zeros, shape (count,), in memory of the GPU that ``owner`` keeps."""
        cuda, num_bytes = self._cupy.cuda, count * np.dtype(dtype).itemsize
        place = cuda.MemoryPointer(cuda.UnownedMemory(address, num_bytes, owner, self.device), 0)
        place.memset_async(0, num_bytes)
        return self._cupy.ndarray((count,), dtype, place)

    def narrow(self, array: Any, wire: np.dtype[Any]) -> Any:
        """A copy of a float32 array as wire.py's ``narrow`` makes it."""
        return self._kernels["narrow_to_bfloat16"](array) if wire == BFLOAT16 else array.astype(wire)

    def widen(self, half: Any, divisor: float, out: Any) -> None:
        """Write what ``narrow`` made, divided by ``divisor``, into float32 ``out``."""
        name = "widen_bfloat16" if half.dtype == BFLOAT16 else "widen_float16"
        self._kernels[name](half, np.float32(divisor), out)
