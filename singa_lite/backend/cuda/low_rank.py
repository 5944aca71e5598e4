# SPDX-License-Identifier: Apache-2.0
"""Matrices as products of two narrow ones, in low_rank.cu."""

from __future__ import annotations

from ..base import Array
from .launch import THREADS, Launcher

MOST_ROWS = 32  # that low_rank.cu keeps factors for


class LowRankKernels(Launcher):
    """Kernels that make and apply the factors of powerSGD."""

    def orthonormal_rows(self, p: Array, *, out: Array, dropped: float) -> None:
        rows, n = p.shape
        assert rows <= MOST_ROWS
        self.launch("low_rank.orthonormal_rows", p.dtype.char, 1, THREADS, p, out, rows, n, float(dropped))

    def unit_rows(self, q: Array, *, out: Array, seed: int, counter: int) -> None:
        self.find("random_normal")(out=out, mean=0.0, std=1.0, seed=seed, counter=counter)
        self.each_row("low_rank.unit_rows", q.dtype.char, q.shape[0], q.shape[1], q, out, q.shape[1])

    def low_rank_sum(self, p: Array, q: Array, *, out: Array) -> None:
        given = (p, q, out, p.shape[0], p.shape[1], q.shape[1])
        self.each("low_rank.low_rank_sum", out.dtype.char, out.size, *given)

    def low_rank_rest(self, m: Array, p: Array, q: Array, *, out: Array) -> None:
        given = (m, p, q, out, p.shape[0], p.shape[1], q.shape[1])
        self.each("low_rank.low_rank_rest", out.dtype.char, out.size, *given)
