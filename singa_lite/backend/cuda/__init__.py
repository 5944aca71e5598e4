# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: every kernel on one GPU. Imports cupy, so it is imported only when a CUDA device is made.

One file per family of kernels, each a class whose methods are kernels (see Note [kernel form] in ../base.py) and, for
our own, a ``.cu`` file beside it; launch.py starts those. cupy gives memory, streams, cuBLAS and the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from ...graph import View
from ..base import Array
from .conv import ConvKernels
from .elementwise import ElementwiseKernels
from .loss import LossKernels
from .move import MoveKernels
from .norm import NormKernels
from .pool import PoolKernels
from .random import RandomKernels
from .select import SelectKernels
from .update import UpdateKernels


class CudaBackend(
    ElementwiseKernels,
    MoveKernels,
    ConvKernels,
    PoolKernels,
    NormKernels,
    LossKernels,
    RandomKernels,
    UpdateKernels,
    SelectKernels,
):
    """The kernels of one GPU, on a stream of its own that does not wait for the default stream.

    Arrays are row-major cupy arrays. A call makes this GPU and stream the thread's current ones, and they stay so;
    the host waits in ``to_numpy`` and ``synchronize`` alone.

    Args:
        device_id: number of the GPU.
    """

    name = "cuda"

    def execute(
        self,
        kernel: str,
        inputs: tuple[Array, ...],
        out: Array | tuple[Array, ...],
        attributes: dict[str, Any],
    ) -> None:
        self.activate()
        self.find(kernel)(*inputs, out=out, **attributes)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        self.activate()
        return cupy.empty(tuple(shape), dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        self.activate()
        return cupy.zeros(tuple(shape), dtype)

    def asarray(self, values: np.ndarray[Any, Any]) -> Array:
        self.activate()
        return cupy.array(values, order="C")  # by way of pinned memory, so the host goes on at once

    def root(self, array: Array) -> Array:
        while array.base is not None:
            array = array.base
        return array

    def offset(self, array: Array) -> int:
        return int(array.data.ptr - self.root(array).data.ptr)

    def view(self, root: Array, view: View) -> Array:
        return cupy.ndarray(view.shape, view.dtype, root.data + view.offset, view.strides)

    def give_back(self) -> None:
        self.activate()
        cupy.get_default_memory_pool().free_all_blocks()

    def to_numpy(self, array: Array) -> np.ndarray[Any, Any]:
        self.activate()
        values: np.ndarray[Any, Any] = array.get(stream=self.stream, order="C")
        self.synchronize()
        return values

    def may_share_memory(self, a: Array, b: Array) -> bool:
        (a_start, a_end), (b_start, b_end) = ((x.data.ptr, x.data.ptr + x.nbytes) for x in (a, b))
        return bool(a_start < b_end and b_start < a_end)

    def synchronize(self) -> None:
        self.stream.synchronize()
        self.check_faults()


__all__ = ["CudaBackend"]
