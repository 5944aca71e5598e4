# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs that are ready to be launched, with the priorities of the streams they were captured on.

What lives here: the begin and end of a capture, and launches. What does not: what is captured (capture.py).

cupy makes graphs executable without CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY. All kernels of such a graph have the
priority of the stream that it is launched on, so that nothing would go before the backward pass: not the kernels of
PACK and UNPACK (Note [streams] in streams.py), and not NCCL's.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import suppress
from typing import Any

import cupy

from ... import _native
from ...errors import DeviceError, GraphError

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
USE_NODE_PRIORITY = 8  # CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY, of CUDA 11.7


def begin_capture(stream: Any) -> None:
    """Capture what a cupy stream is given from now on, instead of running it."""
    cupy.cuda.runtime.streamBeginCapture(stream.ptr, cupy.cuda.runtime.streamCaptureModeRelaxed)


def discard_capture(stream: Any) -> None:
    """End a stream's capture without a graph."""
    with suppress(RuntimeError):  # CUDA's, of a collective that nobody will wait for
        cupy.cuda.runtime.graphDestroy(cupy.cuda.runtime.streamEndCapture(stream.ptr))


class ExecutableGraph:
    """The graph of what a stream was given since its capture began; ends the capture.

    Args:
        stream: cupy's, which is captured.
    """

    def __init__(self, stream: Any) -> None:
        runtime = cupy.cuda.runtime
        graph = runtime.streamEndCapture(stream.ptr)
        try:
            self._handle = instantiate(graph)
        finally:
            runtime.graphDestroy(graph)
        weakref.finalize(self, runtime.graphExecDestroy, self._handle).atexit = False

    def launch(self, stream: Any) -> None:
        """Give the graph's work to a cupy stream."""
        cupy.cuda.runtime.graphLaunch(self._handle, stream.ptr)


def instantiate(graph: int) -> int:
    """Return the handle of an executable graph whose kernels keep their priorities; ``graph``: a handle too."""
    function = open_driver().cuGraphInstantiateWithFlags
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong]
    function.restype = ctypes.c_int
    made = ctypes.c_void_p()
    status = function(ctypes.byref(made), graph, USE_NODE_PRIORITY)
    if status == OUT_OF_MEMORY:
        raise GraphError("the GPU has no memory for its CUDA graph")
    if status != 0 or made.value is None:
        raise DeviceError(
            f"cuGraphInstantiateWithFlags: expected status 0, got {status}; it needs a driver of CUDA 11.7 or later"
        )
    return made.value


def open_driver() -> ctypes.CDLL:
    """Open the driver, as comm/nccl.py does."""
    reasons = []
    for name in _native.library_names("SINGA_LITE_CUDA_LIB", "nvidia.cuda_driver", "libcuda.so.1"):
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    raise DeviceError(f"CUDA graphs need the driver of an NVIDIA GPU: {'; '.join(reasons)}")
