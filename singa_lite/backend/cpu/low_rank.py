# SPDX-License-Identifier: Apache-2.0
"""Matrices as products of two narrow ones: their rows made orthonormal, and what a product is and misses.

All ranks compute these for themselves and must get the same bits, so every sum has one order, which
native/kernels/low_rank.cc has too: a sum over n elements is that of LANES sums, each of every LANES-th product, in
float64; that over the rank is from the first on.
"""

from __future__ import annotations

import numpy as np

from ..base import Array
from .random import generator

LANES = 16


def dot(a: Array, b: Array) -> np.float64:
    """Return the sum of products of two rows, in float64 and in the order that this file's docstring gives."""
    products = np.zeros(-(-a.size // LANES) * LANES)
    np.multiply(a, b, out=products[: a.size], dtype=np.float64)
    lanes = np.add.accumulate(products.reshape(-1, LANES), axis=0)[-1] if a.size else np.zeros(LANES)
    return np.float64(np.add.accumulate(lanes)[-1])


class LowRankKernels:
    """Kernels that make and apply the factors of powerSGD."""

    def orthonormal_rows(self, p: Array, *, out: Array, dropped: float) -> None:
        out[...] = p
        for number, row in enumerate(out):
            before = dot(row, row)
            for _ in range(2 if number else 0):
                factors = [dot(earlier, row) for earlier in out[:number]]
                total = np.zeros(row.size)
                for factor, earlier in zip(factors, out[:number], strict=True):
                    total += factor * earlier.astype(np.float64)
                row[...] = row - total
            after = dot(row, row)
            if after > dropped * before:
                row[...] = row / np.sqrt(after)
            else:
                row *= 0  # NaN stays

    def unit_rows(self, q: Array, *, out: Array, seed: int, counter: int) -> None:
        squares = [dot(row, row) for row in q]
        if not all(0 < square < np.inf for square in squares):
            out[...] = generator(seed, counter).standard_normal(q.shape, q.dtype)
        for row, square, to in zip(q, squares, out, strict=True):
            if 0 < square < np.inf:
                to[...] = row / np.sqrt(square)

    def low_rank_sum(self, p: Array, q: Array, *, out: Array) -> None:
        np.multiply(p[0][:, None], q[0], out=out)
        for column, row in zip(p[1:], q[1:], strict=True):
            out += column[:, None] * row

    def low_rank_rest(self, m: Array, p: Array, q: Array, *, out: Array) -> None:
        self.low_rank_sum(p, q, out=out)
        np.subtract(m, out, out=out)
        out[~np.isfinite(out)] = 0
