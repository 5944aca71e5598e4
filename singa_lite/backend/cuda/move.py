# SPDX-License-Identifier: Apache-2.0
"""Kernels that move, join, reduce and multiply arrays: move.cu, strided.cu, reduce.cu, and cuBLAS for products."""

from __future__ import annotations

from math import prod

import cupy
import numpy as np

from ...config import state
from ...errors import DTypeError, ShapeError
from ..base import Array
from .axes import LOAD, are_loads, reduction, strided
from .launch import THREADS, Launcher, by_value, types_of

MAX_PARTS, PART_ELEMENTS = 120, 2048  # of Parts in move.cu
TILE = 32  # of flip in move.cu
ONE_ZERO_FLOAT, ONE_ZERO_DOUBLE = np.array([1, 0], np.float32), np.array([1, 0], np.float64)  # alpha, beta
# CUDA_R_* of the elements, CUBLAS_COMPUTE_* of the sums, float32 for 16 bits, from the headers
GEMM_TYPES = {
    "e": (2, 68, ONE_ZERO_FLOAT.ctypes.data, 4),
    "E": (14, 68, ONE_ZERO_FLOAT.ctypes.data, 4),
    "f": (0, 68, ONE_ZERO_FLOAT.ctypes.data, 4),
    "d": (1, 70, ONE_ZERO_DOUBLE.ctypes.data, 8),
}
COMPUTE_32F_FAST_TF32 = 77


class MoveKernels(Launcher):
    """copy to matmul."""

    def copy(self, x: Array, *, out: Array) -> None:
        if x.dtype != out.dtype:
            raise DTypeError(f"copy: expected {out.dtype}, got {x.dtype}")
        if x.flags.c_contiguous and out.flags.c_contiguous:
            if out.size:
                out.data.copy_from_device_async(x.data, out.nbytes, self.stream)
        else:
            self._gather(x, out, x.strides)

    def cast(self, x: Array, *, out: Array) -> None:
        self.each("move.cast", x.dtype.char + out.dtype.char, out.size, x, out, out.size)

    def transpose(self, x: Array, *, out: Array, axes: tuple[int, ...]) -> None:
        self._gather(x, out, tuple(x.strides[axis] for axis in axes))

    def reorder(self, x: Array, *, out: Array, memory_formats: tuple[int, int]) -> None:
        block, area = max(memory_formats), x.shape[2] * x.shape[3]
        rows, columns = (block, area) if memory_formats[0] == 1 else (area, block)
        tiles = -(-rows // TILE) * -(-columns // TILE)
        if not x.size:
            return
        if min(rows, columns) < TILE // 2:  # of weights: most of a tile would be empty
            self.transpose(x.reshape(-1, rows, columns), out=out.reshape(-1, columns, rows), axes=(0, 2, 1))
        else:
            matrices = x.size // (rows * columns)
            self.launch("move.flip", x.dtype.char, matrices * tiles, THREADS, x, out, rows, columns)

    def broadcast_to(self, x: Array, *, out: Array) -> None:
        repeated = (0 if n == 1 else stride for n, stride in zip(x.shape, x.strides, strict=True))
        self._gather(x, out, (*(0,) * (out.ndim - x.ndim), *repeated))

    def _gather(self, x: Array, out: Array, strides: tuple[int, ...]) -> None:
        """Fill ``out`` with elements of ``x`` that are ``strides`` bytes apart; both may be parts of larger arrays."""
        types, sizes = x.dtype.char + out.dtype.char, (x.itemsize, out.itemsize)
        shape, steps = out.shape, (strides, out.strides)
        is_aligned = (x.data.ptr | out.data.ptr) % LOAD == 0
        if is_aligned and x.dtype == out.dtype and are_loads(shape, x.itemsize, *steps):
            shape = (*shape[:-1], shape[-1] * x.itemsize // LOAD)
            types, sizes, steps = "DD", (LOAD, LOAD), ((*strides[:-1], LOAD), (*out.strides[:-1], LOAD))
        count, pairs = prod(shape), zip(steps, sizes, strict=True)
        axes = strided(shape, *(tuple(stride // size for stride in step) for step, size in pairs))
        self.each("strided.copy", types, count, x, out, count, axes)

    def gather(self, x: Array, indices: Array, *, out: Array, axis: int, where: str = "gather") -> None:
        """Indices are checked on the device, as class ids are (loss.py)."""
        sizes = (x.shape[axis], indices.size, prod(x.shape[axis + 1 :]))
        given = (x, indices, out, out.size, *sizes, self.faults_address)
        self.each("gather.gather", x.dtype.char + indices.dtype.char, out.size, *given)

    def gather_backward(self, dy: Array, indices: Array, *, out: Array, axis: int) -> None:
        """Each element of ``out`` searches all indices: slower, but no sum depends on the order of threads."""
        size, after = out.shape[axis], prod(out.shape[axis + 1 :])
        if out.size:
            threads = min(THREADS, -(-after // 32) * 32)
            blocks = out.size // after * -(-after // threads)
            given = (dy, indices, out, size, indices.size, after, self.faults_address)
            self.launch("gather.gather_backward", dy.dtype.char + indices.dtype.char, blocks, threads, *given)

    # ---- arrays side by side in another ------------------------------------------------------------------

    def concat(self, *xs: Array, out: Array, axis: int) -> None:
        self._move_parts("join", out, xs, prod(out.shape[:axis]))

    def slice(self, x: Array, *, out: Array, axis: int, start: int) -> None:
        self._move_parts("split", x, (out,), prod(x.shape[:axis]), start * prod(x.shape[axis + 1 :]))

    def pack(self, *xs: Array, out: Array, alignment: int = 1) -> None:
        self._move_parts("join", out, xs, 1, alignment=alignment)

    def unpack(self, flat: Array, *, out: tuple[Array, ...]) -> None:
        self._move_parts("split", flat, out, 1)

    def _move_parts(
        self, name: str, whole: Array, parts: tuple[Array, ...], rows: int, start: int = 0, alignment: int = 1
    ) -> None:
        """Move between ``whole`` (rows, width) and ``parts`` (rows, length), which are in it from column ``start`` on.

        Each begins at a multiple of ``alignment``.
        """
        if not whole.size:
            return
        source, target = (whole, parts[0]) if name == "split" else (parts[0], whole)
        types = source.dtype.char + target.dtype.char
        for first in range(0, len(parts), MAX_PARTS):
            numbers, blocks = [0, rows, whole.size // rows], 0
            for part in parts[first : first + MAX_PARTS]:
                length = part.size // rows
                if length:
                    numbers += part.data.ptr, length, start, blocks
                    blocks -= -part.size // PART_ELEMENTS
                start += -(-length // alignment) * alignment
            if blocks:
                numbers[0] = len(numbers) // 4
                packed = by_value(numbers, 8 * (3 + 4 * MAX_PARTS))
                self.launch(f"move.{name}", types, blocks, THREADS, whole, packed)

    # ---- reductions --------------------------------------------------------------------------------------

    def sum(self, x: Array, *, out: Array, axes: tuple[int, ...], keepdims: bool) -> None:
        self._reduce("reduce.sum", x, out, axes, False)

    def mean(self, x: Array, *, out: Array, axes: tuple[int, ...], keepdims: bool) -> None:
        self._reduce("reduce.sum", x, out, axes, True)

    def max(self, x: Array, *, out: Array, axes: tuple[int, ...], keepdims: bool) -> None:
        self._reduce("reduce.max", x, out, axes, False)

    def sum_to(self, dy: Array, *, out: Array) -> None:
        added = dy.ndim - out.ndim
        stretched = (added + i for i, n in enumerate(out.shape) if n == 1 and dy.shape[added + i] != 1)
        self._reduce("reduce.sum", dy, out, (*range(added), *stretched), False)

    def _reduce(self, name: str, x: Array, out: Array, axes: tuple[int, ...], is_mean: bool) -> None:
        """Reduce in one launch where that gives the device enough to do, else in pieces that a second one joins."""
        outs, length, is_columns, kept, reduced = reduction(x.shape, axes)
        if not outs:
            return
        groups, how = (-(-outs // 32), "_columns") if is_columns else (outs, "_rows")
        pieces = max(1, min(-(-4 * self.num_processors // groups), length // (128 if is_columns else 2048)))
        divisor, types = float(length) if is_mean else 1.0, types_of(x, out)
        if pieces == 1:
            self.launch(name + how, types, groups, THREADS, x, out, outs, length, 1, divisor, kept, reduced)
            return
        parts = self.scratch(8 * outs * pieces)
        arguments = (x, parts, outs, length, pieces, 1.0, kept, reduced)
        self.launch(f"{name}{how}_pieces", types, groups * pieces, THREADS, *arguments)
        _, _, _, kept, reduced = reduction((pieces, outs), (0,))
        arguments = (parts, out, outs, pieces, 1, divisor, kept, reduced)
        self.launch(name + "_joined", types, -(-outs // 32), THREADS, *arguments)

    # ---- products ----------------------------------------------------------------------------------------

    def matmul(
        self,
        a: Array,
        b: Array,
        *,
        out: Array,
        transpose_a: bool = False,
        transpose_b: bool = False,
        allows_tf32: bool = False,
        beta: int = 0,
    ) -> None:
        """Multiply by cuBLAS, without copies, 16 bits to float32 too; add to ``out`` where ``beta`` is 1.

        Rows and matrices may lie apart in memory, but all matrices of an array by one distance. TF32 only with
        ``allows_tf32``, or ``device.allow_tf32``.
        """
        if out.dtype.char not in GEMM_TYPES:
            raise DTypeError(f"matmul: a CUDA device multiplies float matrices, not {out.dtype}")
        if not out.size:
            return
        (m, n), k, batch = out.shape[-2:], a.shape[-2 if transpose_a else -1], prod(out.shape[:-2])
        a, b = (self._repeated(x, out.shape[:-2]) for x in (a, b))
        shares_b = batch > 1 and not transpose_a and prod(b.shape[:-2]) == 1
        if shares_b and a.flags.c_contiguous and out.flags.c_contiguous:  # the rows of a are one matrix
            a, out = a.reshape(-1, k), out.reshape(-1, n)
            m, batch = m * batch, 1
        _, compute, one, size = GEMM_TYPES[a.dtype.char]
        if a.dtype.char == "f" and (allows_tf32 or state.allow_tf32):
            compute = COMPUTE_32F_FAST_TF32
        if max(m, n, k, batch) >= 2**31:
            raise ShapeError(f"matmul: {out.shape} and {k} products each are more than cuBLAS counts")
        # cuBLAS counts columns first, so it sees transposes: out' = b' a'
        shape, beta_address = (int(transpose_b), int(transpose_a), n, m, k, one), one if beta else one + size
        first, second, result = matrices(b), matrices(a), matrices(out)
        cublas = self.streams.current.cublas
        if batch == 1:
            given = (*shape, *first[:3], *second[:3], beta_address, *result[:3], compute, -1)
            cublas.call("cublasGemmEx", *given)
        else:
            given = (*shape, *first, *second, beta_address, *result, batch, compute, -1)
            cublas.call("cublasGemmStridedBatchedEx", *given)

    def _repeated(self, x: Array, batch: tuple[int, ...]) -> Array:
        """``x`` with all of ``batch`` before its last two axes, or with one matrix for all."""
        if x.shape[:-2] == batch or prod(x.shape[:-2]) == 1:
            return x
        repeated = cupy.empty((*batch, *x.shape[-2:]), x.dtype)
        self.broadcast_to(x, out=repeated)
        return repeated


def matrices(x: Array) -> tuple[int, ...]:
    """Return what cuBLAS takes of an array of matrices: address, element type, distances of rows and of matrices."""
    rows, columns = x.shape[-2:]
    distance = x.strides[-2] // x.itemsize if rows > 1 else columns
    outer = zip(x.shape[-3::-1], x.strides[-3::-1], strict=True)
    steps = (stride // x.itemsize for size, stride in outer if size > 1)
    return x.data.ptr, GEMM_TYPES[x.dtype.char][0], max(1, distance), next(steps, 0)
