# SPDX-License-Identifier: Apache-2.0
"""What singa_lite uses of cupy, on the memory and processor of the host: for tests on machines without a GPU.

Kernels are compiled by g++ (../emulation.h) and really run. It is stricter than cupy: arrays refuse to become numpy
arrays unasked, new memory holds NaNs, memory beside an array is watched, a launch checks the kind and size of every
argument, that arrays are row-major, and that a stream other than the default one is current.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import cuda
from ._array import ndarray
from ._kernels import ElementwiseKernel, RawModule

__version__ = "14.0.1"


def get_default_memory_pool() -> cuda.MemoryPool:
    return cuda.DEFAULT_POOL


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    made = ndarray(shape, dtype)
    cuda.do(lambda host=made.host: host.fill(0))
    return made


def ones(shape: Any, dtype: Any = float) -> ndarray:
    made = ndarray(shape, dtype)
    cuda.do(lambda host=made.host: host.fill(1))
    return made


def array(obj: np.ndarray, order: str = "K") -> ndarray:
    assert not cuda.is_capturing(), "a graph would copy from memory of the host that is gone by then"
    made = ndarray(obj.shape, obj.dtype)
    host, staged = made.host, obj
    if not (obj.flags.c_contiguous and obj.ndim and cuda.pinned_memory.is_memory_pinned(obj.ctypes.data)):
        staged = obj.copy()
    cuda.do(lambda: np.copyto(host, staged))
    return made


__all__ = [
    "ElementwiseKernel",
    "RawModule",
    "array",
    "cuda",
    "empty",
    "get_default_memory_pool",
    "ndarray",
    "ones",
    "zeros",
]
