# SPDX-License-Identifier: Apache-2.0
"""Kernels that move, join, reduce and multiply arrays."""

from __future__ import annotations

from math import prod

import numpy as np

from ...dtypes import accumulation_dtype, is_narrow
from ...errors import ShapeError
from ..base import Array
from ._accumulation import pairwise_sum, store, upcast


class MoveKernels:
    """fill to matmul."""

    def fill(self, *, out: Array, value: float) -> None:
        out[...] = value

    def copy(self, x: Array, *, out: Array) -> None:
        np.copyto(out, x, casting="no")

    def cast(self, x: Array, *, out: Array) -> None:
        np.copyto(out, x, casting="unsafe")

    def transpose(self, x: Array, *, out: Array, axes: tuple[int, ...]) -> None:
        np.copyto(out, x.transpose(axes))

    def concat(self, *xs: Array, out: Array, axis: int) -> None:
        np.concatenate(xs, axis, out=out)

    def slice(self, x: Array, *, out: Array, axis: int, start: int) -> None:
        index = [slice(None)] * x.ndim
        index[axis] = slice(start, start + out.shape[axis])
        np.copyto(out, x[tuple(index)])

    def gather(self, x: Array, indices: Array, *, out: Array, axis: int, where: str = "gather") -> None:
        """(x, indices) -> the elements of x at positions of an axis, which the axes of indices replace; axis >= 0.

        indices: int32 or int64, in 0 .. x.shape[axis] - 1; ShapeError, which names ``where``, if one is not.
        """
        _check_indices(where, indices, x.shape[axis])
        np.copyto(out, np.take(x, indices, axis=axis))

    def gather_backward(self, dy: Array, indices: Array, *, out: Array, axis: int) -> None:
        """(dy, indices) -> dx of gather: an element is the sum of dy where it was taken, in order of indices; axis."""
        _check_indices("gather", indices, out.shape[axis])
        before, after = out.shape[:axis], out.shape[axis + 1 :]
        total = np.zeros((prod(before), out.shape[axis], prod(after)), accumulation_dtype(out.dtype))
        rows = upcast(dy).reshape(len(total), indices.size, total.shape[2])
        np.add.at(total, (slice(None), indices.reshape(-1)), rows)  # type: ignore[arg-type]
        store(out, total.reshape(out.shape))

    def reorder(self, x: Array, *, out: Array, memory_formats: tuple[int, int]) -> None:
        has, wanted = memory_formats
        batch, channels, *area = x.shape
        blocked, plain = (batch, channels // has, *area, has), (batch, channels // wanted, wanted, *area)
        rows = np.moveaxis(x.reshape(blocked), -1, 2).reshape(plain)
        np.copyto(out.reshape(batch, channels // wanted, *area, wanted), np.moveaxis(rows, 2, -1))

    def pack(self, *xs: Array, out: Array, alignment: int = 1) -> None:
        start = 0
        for x in xs:
            np.copyto(out[start : start + x.size], x.reshape(-1), casting="no")
            start += -(-x.size // alignment) * alignment
        if start != out.size:
            raise ShapeError(f"pack: {start} elements do not fill an array of {out.size}")

    def unpack(self, flat: Array, *, out: tuple[Array, ...]) -> None:
        start = 0
        for x in out:
            np.copyto(x, flat[start : start + x.size].reshape(x.shape))
            start += x.size

    def sum(self, x: Array, *, out: Array, axes: tuple[int, ...], keepdims: bool) -> None:
        store(out, pairwise_sum(x, axes, keepdims))

    def mean(self, x: Array, *, out: Array, axes: tuple[int, ...], keepdims: bool) -> None:
        total = pairwise_sum(x, axes, keepdims)
        count = int(np.prod([x.shape[axis] for axis in axes], dtype=np.int64))
        store(out, total / count)  # float16: divide before rounding

    def max(self, x: Array, *, out: Array, axes: tuple[int, ...], keepdims: bool) -> None:
        store(out, np.max(upcast(x), axis=axes, keepdims=keepdims))

    def sum_to(self, dy: Array, *, out: Array) -> None:
        added = dy.ndim - out.ndim
        stretched = [added + i for i, n in enumerate(out.shape) if n == 1 and dy.shape[added + i] != 1]
        axes = (*range(added), *stretched)
        total = pairwise_sum(dy, axes)
        store(out, total.reshape(out.shape))

    def broadcast_to(self, x: Array, *, out: Array) -> None:
        np.copyto(out, x, casting="no")

    def matmul(
        self, a: Array, b: Array, *, out: Array, transpose_a: bool = False, transpose_b: bool = False
    ) -> None:
        a = a.swapaxes(-1, -2) if transpose_a else a
        b = b.swapaxes(-1, -2) if transpose_b else b
        if is_narrow(a.dtype):
            store(out, np.matmul(upcast(a), upcast(b)))
        else:
            np.matmul(a, b, out=out)


def _check_indices(where: str, indices: Array, size: int) -> None:
    """Raise ShapeError unless every index is below ``size``."""
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        raise ShapeError(
            f"{where}: indices must be in 0 .. {size - 1}, but they range over {indices.min()} .. {indices.max()}"
        )
