# SPDX-License-Identifier: Apache-2.0
"""2-D pooling: one pass over the batch per offset in the window, never per window."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...dtypes import accumulation_dtype, bfloat16
from ..base import Array
from ._accumulation import store, upcast

Pair = tuple[int, int]


def offsets(kernel_size: Pair, stride: Pair, out_size: Pair) -> Iterator[tuple[int, slice, slice]]:
    """Return each window offset, numbered row by row, and the rows and columns of the padded image it touches."""
    (kh, kw), (sh, sw), (oh, ow) = kernel_size, stride, out_size
    for number in range(kh * kw):
        i, j = divmod(number, kw)
        yield number, slice(i, i + (oh - 1) * sh + 1, sh), slice(j, j + (ow - 1) * sw + 1, sw)


def pad(x: Array, padding: Pair, value: float) -> Array:
    """Return x (N, C, H, W) inside a frame of ``value``; x itself when there is none."""
    if padding == (0, 0):
        return x
    (ph, pw), (n, c, h, w) = padding, x.shape
    padded = np.full((n, c, h + 2 * ph, w + 2 * pw), value, x.dtype)
    padded[:, :, ph : ph + h, pw : pw + w] = x
    return padded


def gradient_frame(dx: Array, kernel_size: Pair, stride: Pair, padding: Pair, out_size: Pair) -> Array:
    """Return where a gradient is summed: dx itself if there is no padding, else a padded array; zeroed if read."""
    dtype = accumulation_dtype(dx.dtype)
    if padding == (0, 0) and dtype == dx.dtype:
        tiled = (
            kernel_size == stride
            and tuple(k * o for k, o in zip(kernel_size, out_size, strict=True)) == dx.shape[2:]
        )
        if not tiled:
            dx[...] = 0
        return dx
    (ph, pw), (n, c, h, w) = padding, dx.shape
    return np.zeros((n, c, h + 2 * ph, w + 2 * pw), dtype)


def crop(frame: Array, padding: Pair, dx: Array) -> None:
    """Write the inside of ``frame`` to dx, unless it is dx."""
    if frame is not dx:
        (ph, pw), (h, w) = padding, dx.shape[2:]
        dx[...] = frame[:, :, ph : ph + h, pw : pw + w]


def window_counts(size: Pair, kernel_size: Pair, stride: Pair, padding: Pair, out_size: Pair) -> Array:
    """Return (oh, ow): how many elements of each window are image, not padding."""
    counts = []
    for n, k, s, p, o in zip(size, kernel_size, stride, padding, out_size, strict=True):
        start = np.arange(o) * s - p
        counts.append(np.minimum(start + k, n) - np.maximum(start, 0))
    return np.outer(*counts)


class PoolKernels:
    """Max and average pooling and their gradients."""

    def max_pool_2d(
        self, x: Array, *, out: tuple[Array, Array], kernel_size: Pair, stride: Pair, padding: Pair
    ) -> None:
        y, indices = out
        if x.dtype == bfloat16:  # of which numpy has no maximum
            wide = np.empty(y.shape, np.float32)
            self.max_pool_2d(
                upcast(x), out=(wide, indices), kernel_size=kernel_size, stride=stride, padding=padding
            )
            store(y, wide)
            return
        padded = pad(x, padding, -np.inf)
        better, number_of = np.empty(y.shape, bool), np.empty(y.shape, indices.dtype)
        indices[...] = 0
        for number, ys, xs in offsets(kernel_size, stride, y.shape[2:]):
            values = padded[:, :, ys, xs]
            if number == 0:
                np.copyto(y, values)
                continue
            np.greater(values, y, out=better)  # strictly: the first of equals wins
            np.maximum(values, y, out=y)  # passes NaN on
            np.multiply(better, indices.dtype.type(number), out=number_of)
            np.maximum(indices, number_of, out=indices)  # numbers only grow, so the last better one stays

    def max_pool_2d_backward(
        self, dy: Array, indices: Array, *, out: Array, kernel_size: Pair, stride: Pair, padding: Pair
    ) -> None:
        size = dy.shape[2:]
        frame = gradient_frame(out, kernel_size, stride, padding, size)
        grads = upcast(dy)
        overlaps = kernel_size[0] > stride[0] or kernel_size[1] > stride[1]
        for number, ys, xs in offsets(kernel_size, stride, size):
            mine = np.where(indices == number, grads, grads.dtype.type(0))
            if overlaps:
                frame[:, :, ys, xs] += mine
            else:
                frame[:, :, ys, xs] = mine
        crop(frame, padding, out)

    def avg_pool_2d(
        self, x: Array, *, out: Array, kernel_size: Pair, stride: Pair, padding: Pair, count_include_pad: bool
    ) -> None:
        padded = pad(upcast(x), padding, 0)
        total = np.zeros(out.shape, accumulation_dtype(x.dtype))
        for _, ys, xs in offsets(kernel_size, stride, out.shape[2:]):
            total += padded[:, :, ys, xs]
        if count_include_pad:
            total *= 1 / (kernel_size[0] * kernel_size[1])
        else:
            total /= window_counts(x.shape[2:], kernel_size, stride, padding, out.shape[2:]).astype(
                total.dtype
            )
        out[...] = total

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
        size = dy.shape[2:]
        frame = gradient_frame(out, kernel_size, stride, padding, size)
        if count_include_pad:
            share = upcast(dy) * frame.dtype.type(1 / (kernel_size[0] * kernel_size[1]))
        else:
            share = upcast(dy) / window_counts(out.shape[2:], kernel_size, stride, padding, size).astype(
                frame.dtype
            )
        if kernel_size[0] <= stride[0] and kernel_size[1] <= stride[1]:
            for _, ys, xs in offsets(kernel_size, stride, size):
                frame[:, :, ys, xs] = share
        else:
            for _, ys, xs in offsets(kernel_size, stride, size):
                frame[:, :, ys, xs] += share
        crop(frame, padding, out)
