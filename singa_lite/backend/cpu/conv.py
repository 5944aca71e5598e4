# SPDX-License-Identifier: Apache-2.0
"""2-D convolution as one big matrix product per group.

Note [batch innermost]: inside, an image batch is (C, H, W, N). A kernel offset is then a slice whose runs are
W*N long, so unfolding and folding are plain block copies: on the 20->50 channel layer of the MNIST CNN
(batch 64) unfolding takes 0.3 ms instead of 1.5 ms, folding 1.1 instead of 3.8. The transposes at both ends
cost 0.2 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...dtypes import accumulation_dtype
from ..base import Array
from ._accumulation import upcast, upcast_beside

# Of the unfolded batch, so that an evaluation batch of thousands doesn't take gigabytes. A step of the MNIST CNN
# (batch 64, 1 thread, quiet machine) takes 24 ms with 16 MiB, 27 with 1 MiB, 31 with 4 MiB, 41 with 256 KiB.
SCRATCH_BYTES = 16 << 20

Pair = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """The geometry of one convolution: x (N, C, H, W), w (O, C/groups, kh, kw) -> y (N, O, oh, ow)."""

    channels: int
    height: int
    width: int
    outputs: int
    kernel: tuple[int, ...]
    out_size: tuple[int, ...]
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    @property
    def padded(self) -> tuple[int, int, int]:
        return self.channels, self.height + 2 * self.padding[0], self.width + 2 * self.padding[1]

    @property
    def rows(self) -> int:
        """Weights that are summed in one output element."""
        return self.channels // self.groups * self.kernel[0] * self.kernel[1]

    def offsets(self) -> Iterator[tuple[int, int, slice, slice]]:
        """Return each kernel offset (i, j) and the rows and columns of the padded image it touches."""
        (kh, kw), (oh, ow), (sh, sw), (dh, dw) = self.kernel, self.out_size, self.stride, self.dilation
        for i in range(kh):
            for j in range(kw):
                top, left = i * dh, j * dw
                yield i, j, slice(top, top + (oh - 1) * sh + 1, sh), slice(left, left + (ow - 1) * sw + 1, sw)

    def chunks(self, batch: int, itemsize: int) -> Iterator[slice]:
        """Slices of the batch whose unfolded copies fit SCRATCH_BYTES."""
        one = self.channels * self.kernel[0] * self.kernel[1] * self.out_size[0] * self.out_size[1] * itemsize
        step = max(1, SCRATCH_BYTES // max(1, one))
        return (slice(start, min(start + step, batch)) for start in range(0, batch, step))

    def inner(self, padded: Array) -> Array:
        """Return the image inside its padding: a view."""
        (ph, pw), (h, w) = self.padding, (self.height, self.width)
        return padded[:, ph : ph + h, pw : pw + w]

    def unfold(self, x: Array, dtype: np.dtype) -> Array:
        """Return x (n, C, H, W) as columns (groups, rows, oh*ow*n)."""
        n = x.shape[0]
        allocate = np.empty if self.padding == (0, 0) else np.zeros
        image = allocate((*self.padded, n), dtype)
        self.inner(image)[...] = x.transpose(1, 2, 3, 0)
        columns = np.empty((self.channels, *self.kernel, *self.out_size, n), dtype)
        for i, j, ys, xs in self.offsets():
            columns[:, i, j] = image[:, ys, xs]
        return columns.reshape(self.groups, self.rows, -1)

    def fold(self, columns: Array, dx: Array) -> None:
        """Add columns (groups, rows, oh*ow*n) up into dx (n, C, H, W)."""
        n = dx.shape[0]
        image = np.zeros((*self.padded, n), columns.dtype)
        columns = columns.reshape(self.channels, *self.kernel, *self.out_size, n)
        for i, j, ys, xs in self.offsets():
            image[:, ys, xs] += columns[:, i, j]
        dx[...] = self.inner(image).transpose(3, 0, 1, 2)

    def to_columns(self, y: Array, dtype: np.dtype) -> Array:
        """Return y (n, O, oh, ow) as (groups, O/groups, oh*ow*n)."""
        columns = np.empty((self.outputs, *self.out_size, y.shape[0]), dtype)
        columns[...] = y.transpose(1, 2, 3, 0)
        return columns.reshape(self.groups, self.outputs // self.groups, -1)


def window_of(
    x: Array, w: Array, y: Array, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Window:
    """Geometry from the three arrays of a convolution, of which only the shapes are read."""
    _, channels, height, width = x.shape
    outputs, _, *kernel = w.shape
    return Window(
        channels, height, width, outputs, tuple(kernel), y.shape[2:], stride, padding, dilation, groups
    )


class ConvKernels:
    """conv2d and its two gradients."""

    def conv2d(
        self,
        x: Array,
        w: Array,
        b: Array | None = None,
        *,
        out: Array,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
    ) -> None:
        window = window_of(x, w, out, stride, padding, dilation, groups)
        dtype = accumulation_dtype(x.dtype)
        weights = upcast_beside(x, w).reshape(groups, -1, window.rows)
        for part in window.chunks(x.shape[0], dtype.itemsize):
            y = np.matmul(weights, window.unfold(x[part], dtype)).reshape(*out.shape[1:], -1)
            if b is not None:
                y += upcast(b).reshape(-1, 1, 1, 1)
            out[part] = y.transpose(3, 0, 1, 2)

    def conv2d_backward_data(
        self, dy: Array, w: Array, *, out: Array, stride: Pair, padding: Pair, dilation: Pair, groups: int
    ) -> None:
        window = window_of(out, w, dy, stride, padding, dilation, groups)
        dtype = accumulation_dtype(dy.dtype)
        weights = upcast_beside(dy, w).reshape(groups, -1, window.rows).swapaxes(1, 2)
        for part in window.chunks(dy.shape[0], dtype.itemsize):
            window.fold(np.matmul(weights, window.to_columns(dy[part], dtype)), out[part])

    def conv2d_backward_weight(
        self,
        dy: Array,
        x: Array,
        *,
        out: Array | tuple[Array, Array],
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
    ) -> None:
        dw, db = out if isinstance(out, tuple) else (out, None)
        window = window_of(x, dw, dy, stride, padding, dilation, groups)
        dtype = accumulation_dtype(x.dtype)
        dw_sum = np.zeros((groups, dw.shape[0] // groups, window.rows), dtype)
        db_sum = np.zeros(dw.shape[0], dtype)
        for part in window.chunks(x.shape[0], dtype.itemsize):
            columns = window.to_columns(dy[part], dtype)
            dw_sum += np.matmul(columns, window.unfold(x[part], dtype).swapaxes(1, 2))
            if db is not None:
                db_sum += columns.sum(axis=2).reshape(-1)
        dw[...] = dw_sum.reshape(dw.shape)
        if db is not None:
            db[...] = db_sum
