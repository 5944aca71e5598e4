# SPDX-License-Identifier: Apache-2.0
"""2-D pooling, in pool.cu.

cuDNN's pooling calls give no indices of maxima, and the backward kernel gets those alone; their gradient reads x and
y, and which of equal elements gets it is undefined there: here it is the first, as on the CPU.
"""

from __future__ import annotations

from typing import Any

from ..base import Array
from .launch import Launcher

Pair = tuple[int, int]


def window(
    x: Array, y: Array, *, kernel_size: Pair, stride: Pair, padding: Pair, memory_format: int = 1
) -> tuple[int, ...]:
    """Return the arguments WINDOW of pool.cu of a pooling from x (N, C, H, W) to y (N, C, oh, ow)."""
    return (*x.shape[2:], *y.shape[2:], *kernel_size, *stride, *padding, memory_format)


class PoolKernels(Launcher):
    """Max and average pooling and their gradients; ``options`` are those of ``window``."""

    def max_pool_2d(self, x: Array, *, out: tuple[Array, Array], **options: Any) -> None:
        y, indices = out
        types, given = y.dtype.char + indices.dtype.char, (x, y, indices, y.size)
        self.each("pool.max_pool_2d", types, y.size, *given, *window(x, y, **options))

    def max_pool_2d_backward(self, dy: Array, indices: Array, *, out: Array, **options: Any) -> None:
        types, given = dy.dtype.char + indices.dtype.char, (dy, indices, out, out.size)
        self.each("pool.max_pool_2d_backward", types, out.size, *given, *window(out, dy, **options))

    def avg_pool_2d(self, x: Array, *, out: Array, count_include_pad: bool, **options: Any) -> None:
        geometry = (*window(x, out, **options), int(count_include_pad))
        self.each("pool.avg_pool_2d", x.dtype.char + "B", out.size, x, out, out.size, *geometry)

    def avg_pool_2d_backward(self, dy: Array, *, out: Array, count_include_pad: bool, **options: Any) -> None:
        geometry = (*window(out, dy, **options), int(count_include_pad))
        self.each("pool.avg_pool_2d_backward", dy.dtype.char + "B", out.size, dy, out, out.size, *geometry)
