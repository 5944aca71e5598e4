# SPDX-License-Identifier: Apache-2.0
"""Matrix products by cuBLAS, on a handle and in a workspace of our own.

What lives here: opening cuBLAS, its prototypes, one handle for a device. What does not: which product a kernel needs
(move.py).

cupy has the same calls, but raises while a stream is captured into a CUDA graph ("calling cuBLAS API during
stream capture is currently unsupported"). cuBLAS itself permits it. Its results depend on the workspace it may use, so
captured and eager products have the same one.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_longlong, c_size_t, c_void_p
from typing import Any

import cupy
import numpy as np

from ...errors import DeviceError

WORKSPACE_BYTES = 32 << 20  # what cuBLAS takes for itself on a GPU of compute capability 9; less elsewhere
WIDE_REDUCTION = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION; TF32 is each product's choice
_FACTOR = [c_void_p, c_int, c_int]  # address, element type, leading dimension
PROTOTYPES: dict[str, list[Any]] = {
    "cublasCreate_v2": [c_void_p],
    "cublasSetMathMode": [c_void_p, c_int],
    "cublasSetStream_v2": [c_void_p, c_void_p],
    "cublasSetWorkspace_v2": [c_void_p, c_void_p, c_size_t],
    # handle, transpose a and b, m, n, k, alpha; a, b, beta, c; compute type, algorithm
    "cublasGemmEx": [
        *(c_void_p, *[c_int] * 5, c_void_p),
        *(*_FACTOR, *_FACTOR, c_void_p, *_FACTOR),
        *(c_int, c_int),
    ],
    # the same, with a distance between matrices after each, and their number
    "cublasGemmStridedBatchedEx": [
        *(c_void_p, *[c_int] * 5, c_void_p),
        *(*_FACTOR, c_longlong, *_FACTOR, c_longlong, c_void_p, *_FACTOR, c_longlong),
        *(c_int, c_int, c_int),
    ],
}


def open_library() -> Any:
    """Return the cuBLAS of cupy's CUDA with typed functions; DeviceError where it is missing."""
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    try:
        # cupy finds the library in the packages of pip too, and opens it; then its bare name is enough
        cupy.cuda.cublas  # noqa: B018
        library = ctypes.CDLL(f"libcublas.so.{major}")
    except (ImportError, OSError) as error:
        raise DeviceError(
            f"matrix products on CUDA need cuBLAS of CUDA {major} ({error}): pip install nvidia-cublas"
            + ("-cu12" if major == 12 else "")
        ) from None
    for name, types in PROTOTYPES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, c_int
    return library


class Cublas:
    """cuBLAS on the current device, with all its work on one stream.

    Args:
        stream: address of that stream.
    """

    def __init__(self, stream: int) -> None:
        self._library, self._handle = open_library(), c_void_p()  # for the life of the process, as its device
        self._workspace = cupy.empty(WORKSPACE_BYTES, np.uint8)
        check(self._library.cublasCreate_v2(ctypes.byref(self._handle)), "cublasCreate_v2")
        # else cuBLAS may join parts of a long sum in the 16 bits of the result
        self.call("cublasSetMathMode", WIDE_REDUCTION)
        self.call("cublasSetStream_v2", stream)
        # in this order: a new stream takes the workspace away
        self.call("cublasSetWorkspace_v2", self._workspace.data.ptr, WORKSPACE_BYTES)

    def call(self, function: str, *arguments: int) -> None:
        """Call a function of PROTOTYPES with what follows its handle."""
        check(getattr(self._library, function)(self._handle, *arguments), function)


def check(status: int, call: str) -> None:
    if status != 0:
        raise DeviceError(f"{call}: cuBLAS answers with status {status}")
