# SPDX-License-Identifier: Apache-2.0
"""2-D pooling, in pool.cu.

cuDNN's pooling calls give no indices of maxima, and the backward kernel gets those alone; their gradient reads x and
y, and which of equal elements gets it is undefined there: here it is the first, as on the CPU.
"""

from __future__ import annotations

from ..base import Array
from .launch import Launcher

Pair = tuple[int, int]


def window(x: Array, y: Array, *options: Pair) -> tuple[int, ...]:
    """Return the arguments WINDOW of pool.cu, all but ``block``, of a pooling from x (N, C, H, W) to y (N, C, oh, ow).

    options: kernel_size, stride, padding.
    """
    return (*x.shape[2:], *y.shape[2:], *(size for option in options for size in option))


class PoolKernels(Launcher):
    """Max and average pooling and their gradients; for ``memory_format`` see ../layout.py."""

    def max_pool_2d(
        self,
        x: Array,
        *,
        out: tuple[Array, Array],
        kernel_size: Pair,
        stride: Pair,
        padding: Pair,
        memory_format: int = 1,
    ) -> None:
        y, indices = out
        types, geometry = y.dtype.char + indices.dtype.char, window(x, y, kernel_size, stride, padding)
        self.each("pool.max_pool_2d", types, y.size, x, y, indices, y.size, *geometry, memory_format)

    def max_pool_2d_backward(
        self,
        dy: Array,
        indices: Array,
        *,
        out: Array,
        kernel_size: Pair,
        stride: Pair,
        padding: Pair,
        memory_format: int = 1,
    ) -> None:
        types, geometry = dy.dtype.char + indices.dtype.char, window(out, dy, kernel_size, stride, padding)
        self.each(
            "pool.max_pool_2d_backward", types, out.size, dy, indices, out, out.size, *geometry, memory_format
        )

    def avg_pool_2d(
        self,
        x: Array,
        *,
        out: Array,
        kernel_size: Pair,
        stride: Pair,
        padding: Pair,
        count_include_pad: bool,
        memory_format: int = 1,
    ) -> None:
        geometry = (*window(x, out, kernel_size, stride, padding), memory_format, int(count_include_pad))
        self.each("pool.avg_pool_2d", x.dtype.char + "B", out.size, x, out, out.size, *geometry)

    def avg_pool_2d_backward(
        self,
        dy: Array,
        *,
        out: Array,
        kernel_size: Pair,
        stride: Pair,
        padding: Pair,
        count_include_pad: bool,
        memory_format: int = 1,
    ) -> None:
        geometry = (*window(out, dy, kernel_size, stride, padding), memory_format, int(count_include_pad))
        self.each("pool.avg_pool_2d_backward", dy.dtype.char + "B", out.size, dy, out, out.size, *geometry)
