# SPDX-License-Identifier: Apache-2.0
"""Kernels that move, join, reduce and multiply arrays."""

from __future__ import annotations

import numpy as np

from ..base import Array
from ._wide import wide, wide_dtype


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

    def reorder(self, x: Array, *, out: Array, blocks: tuple[int, int]) -> None:
        has, wanted = blocks
        batch, channels, *area = x.shape
        blocked, plain = (batch, channels // has, *area, has), (batch, channels // wanted, wanted, *area)
        rows = np.moveaxis(x.reshape(blocked), -1, 2).reshape(plain)
        np.copyto(out.reshape(batch, channels // wanted, *area, wanted), np.moveaxis(rows, 2, -1))

    def pack(self, *xs: Array, out: Array) -> None:
        np.concatenate([x.reshape(-1) for x in xs], out=out, casting="no")

    def unpack(self, flat: Array, *, out: tuple[Array, ...]) -> None:
        start = 0
        for x in out:
            np.copyto(x, flat[start : start + x.size].reshape(x.shape))
            start += x.size

    def sum(self, x: Array, *, out: Array, axes: tuple[int, ...], keepdims: bool) -> None:
        np.sum(x, axis=axes, dtype=wide_dtype(x.dtype), out=out, keepdims=keepdims)

    def mean(self, x: Array, *, out: Array, axes: tuple[int, ...], keepdims: bool) -> None:
        total = np.sum(x, axis=axes, dtype=wide_dtype(x.dtype), keepdims=keepdims)
        count = int(np.prod([x.shape[axis] for axis in axes], dtype=np.int64))
        np.divide(total, count, out=out, casting="same_kind")  # float16: divide before rounding

    def max(self, x: Array, *, out: Array, axes: tuple[int, ...], keepdims: bool) -> None:
        np.max(x, axis=axes, out=out, keepdims=keepdims)

    def sum_to(self, dy: Array, *, out: Array) -> None:
        added = dy.ndim - out.ndim
        stretched = [added + i for i, n in enumerate(out.shape) if n == 1 and dy.shape[added + i] != 1]
        axes = (*range(added), *stretched)
        total = np.sum(dy, axis=axes, dtype=wide_dtype(dy.dtype), keepdims=True)
        np.copyto(out, total.reshape(out.shape), casting="same_kind")

    def broadcast_to(self, x: Array, *, out: Array) -> None:
        np.copyto(out, x, casting="no")

    def matmul(
        self, a: Array, b: Array, *, out: Array, transpose_a: bool = False, transpose_b: bool = False
    ) -> None:
        a = a.swapaxes(-1, -2) if transpose_a else a
        b = b.swapaxes(-1, -2) if transpose_b else b
        if out.dtype == np.float16:
            np.copyto(out, np.matmul(wide(a), wide(b)), casting="same_kind")
        else:
            np.matmul(a, b, out=out)
