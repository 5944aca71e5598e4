# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation, in norm.cu.

cuDNN's keeps the statistics of float16 in float32, where our kernels pass them in x's dtype, works on a channel with
one block, which leaves much of a large GPU idle where channels are few, and says nothing of a batch of one element.
"""

from __future__ import annotations

from math import prod

from ..base import Array
from .launch import THREADS, Launcher

WHOLE = 16384  # elements of a channel that one block takes alone: they stay in the multiprocessor's cache
PIECE = 4096  # of a longer channel, for a block of THREADS
MOST_THREADS = 1024


def sizes(x: Array) -> tuple[int, int, int]:
    """(channels, area, count) as in norm.cu."""
    area = prod(x.shape[2:])
    return x.shape[1], area, x.shape[0] * area


def threads(count: int) -> int:
    """Of a block that walks ``count`` elements: whole warps, 16 elements a thread while that is possible."""
    return min(32 * -(-count // (16 * 32)) or 32, MOST_THREADS)


class NormKernels(Launcher):
    """batchnorm_2d over every axis but 1."""

    def batchnorm_2d_train(
        self, x: Array, scale: Array, bias: Array, *, out: tuple[Array, ...], momentum: float, eps: float
    ) -> None:
        y, *state = out
        types, (channels, area, count) = x.dtype.char, sizes(x)
        rates = (float(momentum), float(eps))
        if count <= WHOLE:
            arguments = (x, scale, bias, y, *state, channels, area, count, *rates)
            self.launch("norm.batchnorm_2d_train", types, channels, threads(count), *arguments)
            return
        blocks = channels * -(-count // PIECE)
        pieces, forms = self._pairs(blocks, channels)
        split = (channels, area, count, PIECE)
        self.launch("norm.batchnorm_2d_moments", types, blocks, THREADS, x, pieces, *split)
        arguments = (pieces, forms, scale, *state, count, PIECE, *rates)
        self.launch("norm.batchnorm_2d_join", types, channels, threads(blocks // channels), *arguments)
        self.launch("norm.batchnorm_2d_apply", types, blocks, THREADS, x, forms, bias, y, *split)

    def batchnorm_2d_infer(
        self, x: Array, scale: Array, bias: Array, mean: Array, var: Array, *, out: Array, eps: float
    ) -> None:
        if not x.size:
            return
        types, (channels, area, count) = x.dtype.char, sizes(x)
        blocks, width = channels * -(-count // PIECE), min(threads(count), THREADS)
        arguments = (x, scale, bias, mean, var, out, channels, area, count, PIECE, float(eps))
        self.launch("norm.batchnorm_2d_infer", types, blocks, width, *arguments)

    def batchnorm_2d_backward(
        self, dy: Array, x: Array, scale: Array, mean: Array, inverse_std: Array, *, out: tuple[Array, ...]
    ) -> None:
        dx, dscale, dbias = out
        types, (channels, area, count) = x.dtype.char, sizes(x)
        if count <= WHOLE:
            arguments = (dy, x, scale, mean, inverse_std, *out, channels, area, count)
            self.launch("norm.batchnorm_2d_backward", types, channels, threads(count), *arguments)
            return
        number = -(-count // PIECE)
        blocks = channels * number
        pieces, sums = self._pairs(blocks, channels)
        split = (channels, area, count, PIECE)
        arguments = (dy, x, mean, inverse_std, pieces, *split)
        self.launch("norm.batchnorm_2d_slopes", types, blocks, THREADS, *arguments)
        arguments = (pieces, sums, dscale, dbias, number)
        self.launch("norm.batchnorm_2d_slopes_join", types, channels, threads(number), *arguments)
        arguments = (dy, x, scale, mean, inverse_std, sums, dx, *split)
        self.launch("norm.batchnorm_2d_backward_apply", types, blocks, THREADS, *arguments)

    def _pairs(self, first: int, second: int) -> tuple[Array, Array]:
        """Scratch memory for two arrays of Pair in norm.cu, two numbers of at most 8 bytes."""
        scratch = self.scratch(16 * (first + second))
        return scratch, scratch[16 * first :]
