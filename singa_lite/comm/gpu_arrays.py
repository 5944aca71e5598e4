# SPDX-License-Identifier: Apache-2.0
"""What a communicator does itself with arrays on a GPU: make, cast, find them. NCCL is not here, but in nccl.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .wire import BFLOAT16

UNKNOWN_DEVICE = -1  # kUnknownDevice of native/comm/nccl.h
# Of wire.py, in one kernel each: name -> what it takes, what it gives, and how
KERNELS = {
    "narrow_to_bfloat16": (
        "float32 given, raw float32 scale",
        "uint16 wire",
        """
        const float value = given * scale[0];
        unsigned bits = __float_as_uint(value);
        wire = value != value ? bits >> 16 | 0x40 : (bits + (bits >> 16 & 1) + 0x7fff) >> 16;
        """,
    ),
    "narrow_to_float16": ("float32 given, raw float32 scale", "float16 wire", "wire = given * scale[0]"),
    "widen_bfloat16": (
        "uint16 wire, float32 divisor, raw float32 scale",
        "float32 value",
        "value = __uint_as_float((unsigned)wire << 16) / divisor / scale[0]",
    ),
    "widen_float16": (
        "float16 wire, float32 divisor, raw float32 scale",
        "float32 value",
        "value = (float)wire / divisor / scale[0]",
    ),
}


def is_cuda_array(array: object) -> bool:
    """Return whether ``array`` is in a GPU's memory, by CUDA's array interface."""
    return type(array) is not np.ndarray and hasattr(array, "__cuda_array_interface__")


def address_of(array: Any) -> int:
    """Return the address of the first byte of a numpy or CUDA array."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    return int(array.__cuda_array_interface__["data"][0])


class CupyArrays:
    """Arrays on one GPU: made, cast and found on the current stream, without waiting for it.

    New ones are cupy's. Those of other libraries are read by their ``__cuda_array_interface__``; cupy's are not, since
    cupy builds that again at every read.

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
        self._one = cupy.ones(1, np.float32)  # wire_scale where there is none
        self._current_stream = cupy.cuda.get_current_stream
        self._current_stream().synchronize()  # kernels on any other stream read that 1

    def locate(self, array: Any) -> tuple[int, int, int]:
        """Return the address of ``array``, the number of its GPU and the handle of its stream.

        The GPU is UNKNOWN_DEVICE for an array of another library, whose interface does not name it.
        """
        if type(array) is self.kind:
            memory = array.data
            return memory.ptr, memory.device_id, self._current_stream(self.device).ptr or 1
        return address_of(array), UNKNOWN_DEVICE, self.stream(array)

    def stream(self, array: Any) -> int:
        """Handle of the stream that is current for ``array``'s library; 1 is CUDA's default one."""
        if type(array) is self.kind:
            return self._current_stream(self.device).ptr or 1
        return array.__cuda_array_interface__.get("stream") or 1

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return a new array of undefined content."""
        with self._cupy.cuda.Device(self.device):
            return self._cupy.empty(tuple(shape), dtype)

    def narrow(self, array: Any, wire: np.dtype[Any], scale: Any = None) -> Any:
        """Return a copy of a float32 array as wire.py's ``narrow`` makes it."""
        name = "narrow_to_bfloat16" if wire == BFLOAT16 else "narrow_to_float16"
        return self._kernels[name](array, self._one if scale is None else scale)

    def widen(self, half: Any, divisor: float, scale: Any, out: Any) -> None:
        """Write what ``narrow`` made, divided by ``divisor`` and by ``scale``, into float32 ``out``."""
        name = "widen_bfloat16" if half.dtype == BFLOAT16 else "widen_float16"
        self._kernels[name](half, np.float32(divisor), self._one if scale is None else scale, out)
