# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: every kernel on one GPU. Imports cupy, so it is imported only when a CUDA device is made.

One file per family of kernels, each a class whose methods are kernels (see Note [kernel form] in ../base.py) and, for
our own, a ``.cu`` file beside it; launch.py starts those. cupy gives memory, streams, cuBLAS and the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np

from ...config import state
from ...errors import GraphError
from ...graph import View, made
from ..base import Array, Call
from ..layout import lay_out
from .capture import CapturedStep
from .conv import ConvKernels, blocks_wanted, uses_tensor_cores
from .elementwise import ElementwiseKernels
from .fuse import fuse
from .lane import MAIN
from .loss import LossKernels
from .move import MoveKernels
from .norm import NormKernels
from .pool import PoolKernels
from .random import RandomKernels
from .recurrent import RecurrentKernels
from .select import SelectKernels
from .update import UpdateKernels


class CudaBackend(
    ElementwiseKernels,
    MoveKernels,
    ConvKernels,
    PoolKernels,
    NormKernels,
    RecurrentKernels,
    LossKernels,
    RandomKernels,
    UpdateKernels,
    SelectKernels,
):
    """The kernels of one GPU, on streams of its own that do not wait for the default stream, see Note [lanes].

    Arrays are row-major cupy arrays. A call makes this GPU and the lane's stream the thread's current ones, and they
    stay so; the host waits in ``to_numpy`` and ``synchronize`` alone.

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
        method = self.find(kernel)
        with self.turn:
            self.activate()
            self.lanes.keep(inputs, out)
            if self.rehearsal is None:
                method(*inputs, out=out, **attributes)
            else:
                arrays = (*inputs, *(out if isinstance(out, tuple) else (out,)))
                self.rehearsal.execute(
                    lambda: method(*inputs, out=out, **attributes), kernel, arrays, attributes
                )

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        self.activate()
        return made(lambda: cupy.empty(tuple(shape), dtype))

    def zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        with self.turn:
            self.activate()
            return made(lambda: cupy.zeros(tuple(shape), dtype))

    def asarray(self, values: np.ndarray[Any, Any]) -> Array:
        self._refuse_in_capture("brings values of the host to the device")
        with self.turn:
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

    def lower(self, calls: list[Call]) -> list[Call]:
        return fuse(lay_out(calls, blocks_wanted, uses_tensor_cores))

    def bake(self, calls: list[Call]) -> list[Callable[[], None]]:
        return [CapturedStep(self, calls)]

    def to_numpy(self, array: Array) -> np.ndarray[Any, Any]:
        self._refuse_in_capture("reads values of the device")
        self.synchronize()
        with self.turn:
            self.activate()
            values: np.ndarray[Any, Any] = array.get(stream=self.stream, order="C")
        return values

    def may_share_memory(self, a: Array, b: Array) -> bool:
        (a_start, a_end), (b_start, b_end) = ((x.data.ptr, x.data.ptr + x.nbytes) for x in (a, b))
        return bool(a_start < b_end and b_start < a_end)

    def synchronize(self) -> None:
        self._refuse_in_capture("waits for the device")
        with self.turn:  # CUDA forbids to wait for a stream while another thread captures it
            self.join()
            done = cupy.cuda.Event(disable_timing=True)
            done.record(self.lanes.all[MAIN].stream)
        try:
            done.synchronize()
        except Exception:
            self._check()  # what a collective that was aborted left behind may be why
            raise
        self._check()

    def _check(self) -> None:
        """Raise what went wrong on the device while the host went on: a bad label, a collective that was aborted."""
        self.check_faults()
        for known in state.gpu_communicators:
            if (communicator := known()) is not None:
                communicator.check()

    def _refuse_in_capture(self, what: str) -> None:
        if self.rehearsal is not None:
            raise GraphError(
                f"Python in its update or exchange {what}, which a CUDA graph cannot repeat; a scheme that must do so "
                'says capture = "split"'
            )


__all__ = ["CudaBackend"]
