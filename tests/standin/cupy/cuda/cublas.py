# SPDX-License-Identifier: Apache-2.0
"""cuBLAS of the stand-in: the contract of cublasGemmStridedBatchedEx, in numpy."""

from __future__ import annotations

import ctypes

import numpy as np

DTYPES = {2: np.float16, 0: np.float32, 1: np.float64}  # CUDA_R_16F, CUDA_R_32F, CUDA_R_64F
SUMS = {68: np.float32, 77: np.float32, 70: np.float64}  # CUBLAS_COMPUTE_32F, _32F_FAST_TF32, _64F
computes: list[int] = []  # how each product was asked to be computed


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


def gemmStridedBatchedEx(
    handle, transa, transb, m, n, k, alpha, A, Atype, lda, strideA, B, Btype, ldb, strideB,
    beta, C, Ctype, ldc, strideC, batchCount, computeType, algo,
):  # fmt: skip
    assert handle == 7 and algo == -1 and min(m, n, batchCount) > 0 and k >= 0
    wide = SUMS[computeType]
    computes.append(computeType)
    size = np.dtype(wide).itemsize
    factor, kept = (np.frombuffer((ctypes.c_char * size).from_address(x), wide)[0] for x in (alpha, beta))
    assert (factor, kept) == (1, 0)
    c = _matrix(C, Ctype, m, n, ldc, batchCount, strideC)
    if k == 0:
        c[...] = 0
        return
    a = _matrix(A, Atype, *((k, m) if transa else (m, k)), lda, batchCount, strideA).astype(wide)
    b = _matrix(B, Btype, *((n, k) if transb else (k, n)), ldb, batchCount, strideB).astype(wide)
    a, b = (x.swapaxes(1, 2) if flag else x for x, flag in ((a, transa), (b, transb)))
    c[...] = a @ b
