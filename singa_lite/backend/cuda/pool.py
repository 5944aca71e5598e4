# SPDX-License-Identifier: Apache-2.0
"""2-D pooling, in pool.cu. cuDNN's pooling keeps no indices, and its gradient needs x, which our kernels don't get."""

from __future__ import annotations

from ..base import Array
from .launch import Launcher

Pair = tuple[int, int]

NO_INDICES = "B"  # of average pooling: any type that indices may have


def window(x: Array, y: Array, kernel_size: Pair, stride: Pair, padding: Pair) -> tuple[int, ...]:
    """The arguments WINDOW in pool.cu of a pooling from x (N, C, H, W) to y (N, C, oh, ow)."""
    return (*x.shape[2:], *y.shape[2:], *kernel_size, *stride, *padding)


class PoolKernels(Launcher):
    """Max and average pooling and their gradients."""

    def max_pool_2d(
        self, x: Array, *, out: tuple[Array, Array], kernel_size: Pair, stride: Pair, padding: Pair
    ) -> None:
        y, indices = out
        types, geometry = y.dtype.char + indices.dtype.char, window(x, y, kernel_size, stride, padding)
        self.each("pool.max_pool_2d", types, y.size, x, y, indices, y.size, *geometry)

    def max_pool_2d_backward(
        self, dy: Array, indices: Array, *, out: Array, kernel_size: Pair, stride: Pair, padding: Pair
    ) -> None:
        types, geometry = dy.dtype.char + indices.dtype.char, window(out, dy, kernel_size, stride, padding)
        self.each("pool.max_pool_2d_backward", types, out.size, dy, indices, out, out.size, *geometry)

    def avg_pool_2d(
        self, x: Array, *, out: Array, kernel_size: Pair, stride: Pair, padding: Pair, count_include_pad: bool
    ) -> None:
        geometry = (*window(x, out, kernel_size, stride, padding), int(count_include_pad))
        self.each("pool.avg_pool_2d", x.dtype.char + NO_INDICES, out.size, x, out, out.size, *geometry)

    def avg_pool_2d_backward(
        self,
        dy: Array,
        *,
        out: Array,
        kernel_size: Pair,
        stride: Pair,
        padding: Pair,
        count_include_pad: bool,
    ) -> None:
        geometry = (*window(out, dy, kernel_size, stride, padding), int(count_include_pad))
        self.each(
            "pool.avg_pool_2d_backward", dy.dtype.char + NO_INDICES, out.size, dy, out, out.size, *geometry
        )
