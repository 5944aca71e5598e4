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
from ._array import MemoryPointer, ndarray
from ._kernels import RawModule


class _Pool:
    """The memory pool: counts how often it was emptied."""

    emptied = 0

    def free_all_blocks(self) -> None:
        self.emptied += 1


_POOL = _Pool()


def get_default_memory_pool() -> _Pool:
    return _POOL


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    made = ndarray(shape, dtype)
    made.host[...] = 0
    return made


def array(values: np.ndarray, order: str = "K") -> ndarray:
    made = ndarray(values.shape, values.dtype)
    made.host[...] = values
    return made


__all__ = [
    "MemoryPointer",
    "RawModule",
    "array",
    "cuda",
    "empty",
    "get_default_memory_pool",
    "ndarray",
    "zeros",
]
