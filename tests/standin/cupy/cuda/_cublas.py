# SPDX-License-Identifier: Apache-2.0
"""libcublas of the stand-in: the contracts of the functions used, in numpy, called through C as the real ones."""

from __future__ import annotations

import ctypes
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from . import do, get_current_stream

# CUDA_R_16F, CUDA_R_16BF, CUDA_R_32F, CUDA_R_64F
DTYPES = {2: np.float16, 14: ml_dtypes.bfloat16, 0: np.float32, 1: np.float64}
# of what is multiplied and of the result, with sums in float32, in its table of them
FLOAT_PAIRS = {(2, 2), (2, 0), (14, 14), (14, 0), (0, 0)}
IN_WIDE_SUMS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
SUMS = {68: np.float32, 77: np.float32, 70: np.float64}  # CUBLAS_COMPUTE_32F, _32F_FAST_TF32, _64F
computes: list[int] = []  # how each product was asked to be computed
settings: dict[str, int] = {}  # of the last handle
math_modes: list[int] = []  # of each handle
streams: list[int] = []  # of each handle; handles are counted from 1


def _matrix(
    address: int, kind: int, rows: int, columns: int, stride: int, batch: int, step: int
) -> np.ndarray:
    """(batch, rows, columns) of column-major matrices."""
    assert stride >= max(1, rows), f"leading dimension {stride} of {rows} rows"
    dtype = np.dtype(DTYPES[kind])
    count = step * (batch - 1) + stride * max(columns - 1, 0) + rows
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    strides = tuple(dtype.itemsize * n for n in (step, 1, stride))
    return np.ndarray((batch, rows, columns), dtype, memory, 0, strides)


def cublasGemmStridedBatchedEx(
    handle, transa, transb, m, n, k, alpha, A, Atype, lda, strideA, B, Btype, ldb, strideB,
    beta, C, Ctype, ldc, strideC, batchCount, computeType, algo,
):  # fmt: skip
    assert streams[handle - 1] == get_current_stream().ptr, "a handle of another stream"
    assert algo == -1 and min(m, n, batchCount) > 0 and k >= 0
    wide = SUMS[computeType]
    computes.append(computeType)
    size = np.dtype(wide).itemsize
    factor, kept = (np.frombuffer((ctypes.c_char * size).from_address(x), wide)[0] for x in (alpha, beta))
    assert factor == 1 and kept in (0, 1)
    assert Atype == Btype and (
        (Atype, Ctype) in FLOAT_PAIRS if computeType != 70 else (Atype, Ctype) == (1, 1)
    )
    do(lambda: _product(
        transa, transb, m, n, k, wide, (A, Atype, lda, strideA), (B, Btype, ldb, strideB),
        (C, Ctype, ldc, strideC), batchCount, math_modes[handle - 1], kept,
    ))  # fmt: skip


def _product(transa, transb, m, n, k, wide, left, right, result, batchCount, math_mode, kept):
    (A, Atype, lda, strideA), (B, Btype, ldb, strideB), (C, Ctype, ldc, strideC) = left, right, result
    c = _matrix(C, Ctype, m, n, ldc, batchCount, strideC)
    before = c.astype(wide) if kept else 0
    if k == 0:
        c[...] = before
        return
    a = _matrix(A, Atype, *((k, m) if transa else (m, k)), lda, batchCount, strideA).astype(wide)
    b = _matrix(B, Btype, *((n, k) if transb else (k, n)), ldb, batchCount, strideB).astype(wide)
    a, b = (x.swapaxes(1, 2) if flag else x for x, flag in ((a, transa), (b, transb)))
    # the real one has other kernels where it cannot load 16 bytes at once: other sums of the same numbers
    if C % 16:
        a, b = a[:, :, ::-1], b[:, ::-1]
    half = 0 if math_mode & IN_WIDE_SUMS else k // 2  # the real one may join parts of long sums in C's type
    c[...] = (a[:, :, :half] @ b[:, :half]).astype(c.dtype) + a[:, :, half:] @ b[:, half:] + before


def cublasGemmEx(
    handle, transa, transb, m, n, k, alpha, A, Atype, lda, B, Btype, ldb, beta, C, Ctype, ldc, computeType, algo,
):  # fmt: skip
    cublasGemmStridedBatchedEx(
        handle, transa, transb, m, n, k, alpha, A, Atype, lda, 0, B, Btype, ldb, 0,
        beta, C, Ctype, ldc, 0, 1, computeType, algo,
    )  # fmt: skip


def cublasCreate_v2(handle):
    streams.append(0)
    math_modes.append(0)
    ctypes.c_void_p.from_address(handle).value = len(streams)


def cublasSetStream_v2(handle, stream):
    assert stream
    streams[handle - 1] = settings["stream"] = stream
    settings["workspace"] = 0


def cublasSetMathMode(handle, mode):
    assert mode in (0, IN_WIDE_SUMS)
    math_modes[handle - 1] = mode


def cublasSetWorkspace_v2(handle, workspace, num_bytes):
    assert streams[handle - 1] and workspace and num_bytes
    settings["workspace"] = num_bytes


def install() -> None:
    """Let singa_lite open this as libcublas.so, as it can what cupy has opened."""
    opener: Any = sys.modules["singa_lite.backend.cuda.cublas"]
    opener.WORKSPACE_BYTES = 1 << 16  # filled with NaNs
    library = SimpleNamespace(**{name: _through_c(name, types) for name, types in opener.PROTOTYPES.items()})
    opener.ctypes = SimpleNamespace(CDLL=lambda name: library, byref=ctypes.byref)


def _through_c(name: str, types: list[Any]) -> Any:
    def call(*arguments: Any) -> int:
        try:
            globals()[name](*arguments)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            return 13  # CUBLAS_STATUS_EXECUTION_FAILED
        return 0

    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(call)
