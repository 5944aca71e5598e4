# SPDX-License-Identifier: Apache-2.0
"""2-D pooling: averages by cuDNN (native/cuda/pool.h), maxima in pool.cu.

cuDNN has no answer for maxima here: a kernel's backward needs its outputs alone, the place of each maximum. cuDNN's
pooling calls give no places; their gradient reads x and y. Its graph API can write places, of channels-last images
and in a signed byte: a second way beside the one that other images and larger windows would still need. Neither says
which of equal elements gets the gradient; in pool.cu that is the first, as on the CPU. PyTorch's are its own too.
"""

from __future__ import annotations

from typing import Any

from ..base import Array
from .cudnn import DTYPES, CudnnCaller

Pair = tuple[int, int]


def window(x: Array, y: Array, *options: Pair) -> tuple[int, ...]:
    """The arguments WINDOW in pool.cu but the last of a pooling from x (N, C, H, W) to y (N, C, oh, ow).

    options: kernel_size, stride, padding.
    """
    return (*x.shape[2:], *y.shape[2:], *(size for option in options for size in option))


class PoolKernels(CudnnCaller):
    """Max and average pooling and their gradients; for ``block`` see ../layout.py."""

    def max_pool_2d(
        self,
        x: Array,
        *,
        out: tuple[Array, Array],
        kernel_size: Pair,
        stride: Pair,
        padding: Pair,
        block: int = 1,
    ) -> None:
        y, indices = out
        types, geometry = y.dtype.char + indices.dtype.char, window(x, y, kernel_size, stride, padding)
        self.each("pool.max_pool_2d", types, y.size, x, y, indices, y.size, *geometry, block)

    def max_pool_2d_backward(
        self,
        dy: Array,
        indices: Array,
        *,
        out: Array,
        kernel_size: Pair,
        stride: Pair,
        padding: Pair,
        block: int = 1,
    ) -> None:
        types, geometry = dy.dtype.char + indices.dtype.char, window(out, dy, kernel_size, stride, padding)
        self.each("pool.max_pool_2d_backward", types, out.size, dy, indices, out, out.size, *geometry, block)

    def avg_pool_2d(
        self,
        x: Array,
        *,
        out: Array,
        kernel_size: Pair,
        stride: Pair,
        padding: Pair,
        count_include_pad: bool,
        block: int = 1,
    ) -> None:
        if out.size:
            plan = self._average(block > 1, x, out, kernel_size, stride, padding, count_include_pad)
            x, target = self._aligned(x), self._target(out)
            plan.forward(self.stream.ptr, x.data.ptr, target.data.ptr)
            self._deliver(target, out)

    def avg_pool_2d_backward(
        self,
        dy: Array,
        *,
        out: Array,
        kernel_size: Pair,
        stride: Pair,
        padding: Pair,
        count_include_pad: bool,
        block: int = 1,
    ) -> None:
        if out.size:
            plan = self._average(block > 1, out, dy, kernel_size, stride, padding, count_include_pad)
            dy, target = self._aligned(dy), self._target(out)
            plan.backward(self.stream.ptr, dy.data.ptr, target.data.ptr)
            self._deliver(target, out)

    def _average(self, is_channels_last: bool, x: Array, y: Array, *options: Pair | bool) -> Any:
        """The plan for these shapes; options: kernel_size, stride, padding, count_include_pad."""
        key = (DTYPES[x.dtype.char], is_channels_last, x.shape, y.shape, *options)
        return self._plan(("average", *key), lambda: self._new_plan("AveragePool", *key))
