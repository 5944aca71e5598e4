# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: every kernel on one GPU. Imports cupy, so it is imported only when a CUDA device is made.

One file per family of kernels, each a class whose methods are kernels (see Note [kernel form] in ../base.py) and, for
our own, ``.cu`` files beside it; launch.py starts those. cupy gives memory, streams, cuBLAS and the compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np

from ...errors import GraphError
from ...graph.nodes import ClockCall, Node
from ..base import Array
from ..layout import choose_formats
from .capture import CapturedPart, split
from .conv import ConvKernels, preferred_formats, takes_formats
from .elementwise import ElementwiseKernels
from .fuse import fuse
from .graph_memory import GraphMemory
from .loss import LossKernels
from .message import MessageKernels
from .move import MoveKernels
from .norm import NormKernels
from .pool import PoolKernels
from .random import RandomKernels
from .recurrent import RecurrentKernels
from .select import SelectKernels
from .streams import COMPUTE
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
    MessageKernels,
    UpdateKernels,
    SelectKernels,
):
    """The kernels of one GPU, on streams of its own that do not wait for the default stream, see Note [streams].

    Arrays are row-major cupy arrays. A call makes this GPU and one of its streams the thread's current ones, and they
    stay so; the host waits in ``to_numpy`` and ``synchronize`` alone.

    Args:
        device_id: number of the GPU.
    """

    name = "cuda"

    alignment_bytes = 128  # of a cache line; as NCCL, cuBLAS and vector loads need
    runs_behind_host = True

    def execute(
        self,
        kernel: str,
        inputs: tuple[Array, ...],
        out: Array | tuple[Array, ...],
        attributes: dict[str, Any],
    ) -> None:
        method = self.find(kernel)
        with self.lock:
            self.activate()
            self.streams.keep(inputs, out)
            method(*inputs, out=out, **attributes)

    def allocate(self, shape: Sequence[int], dtype: Any) -> Array:
        self.activate()
        return cupy.empty(tuple(shape), dtype)

    def allocate_zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        with self.lock:
            self.activate()
            return cupy.zeros(tuple(shape), dtype)

    def asarray(self, values: np.ndarray[Any, Any]) -> Array:
        self._check_not_capturing("brings values of the host to the device")
        with self.lock:
            self.activate()
            if cupy.cuda.pinned_memory.is_memory_pinned(values.ctypes.data):
                # cupy reads such memory some time later, when the caller may have filled it again
                source, values = values, self.host_array(values.shape, values.dtype)
                np.copyto(values, source)
            return cupy.array(values, order="C")  # by way of page-locked memory: the host continues at once

    def release_cached_memory(self) -> None:
        self.activate()
        cupy.get_default_memory_pool().free_all_blocks()

    def lower(self, nodes: list[Node]) -> list[Node]:
        return fuse(choose_formats(nodes, preferred_formats, takes_formats))

    def compile(self, nodes: list[Node]) -> list[Callable[[], None]]:
        memory = GraphMemory(self.device_id)
        # no clock: the host is far ahead of the device
        nodes = [node for node in nodes if not isinstance(node, ClockCall)]
        return [CapturedPart(self, part, memory) if isinstance(part, list) else part for part in split(nodes)]

    def host_array(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        count = math.prod(shape)
        memory = cupy.cuda.alloc_pinned_memory(max(1, count * np.dtype(dtype).itemsize))
        return np.frombuffer(memory, dtype, count).reshape(tuple(shape))

    def copy_to_host(self, array: Array, out: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
        self._check_not_capturing("reads values of the device")
        self.synchronize()
        with self.lock:
            self.activate()
            values: np.ndarray[Any, Any] = array.get(stream=self.stream, order="C", out=out)
        return values

    def may_share_memory(self, a: Array, b: Array) -> bool:
        (a_start, a_end), (b_start, b_end) = ((x.data.ptr, x.data.ptr + x.nbytes) for x in (a, b))
        return bool(a_start < b_end and b_start < a_end)

    def synchronize(self) -> None:
        self._check_not_capturing("waits for the device")
        with self.lock:  # CUDA forbids to wait for a stream while another thread captures it
            self.join()
            done = cupy.cuda.Event(disable_timing=True)
            done.record(self.streams.all[COMPUTE].stream)
        try:
            done.synchronize()
        except Exception:
            self._check()  # what a collective that was aborted left behind may be why
            raise
        self._check()

    def _check(self) -> None:
        """Raise what went wrong on the device while the host went on: a bad label, a collective that was aborted."""
        self.check_faults()
        self.check_communicators()

    def _check_not_capturing(self, what: str) -> None:
        if self.capture is not None:
            raise GraphError(f"a kernel of the step {what}, which a CUDA graph cannot repeat")
