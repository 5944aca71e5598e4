# SPDX-License-Identifier: Apache-2.0
"""Selection of the large elements of a flat array, and adding them back, in select.cu; see Note [exact top-K] there."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import cupy
import numpy as np

from ...errors import ShapeError
from ..base import Array
from .launch import THREADS, Launcher

DIGIT_BITS = 11  # kDigitBits of select.cu
EACH = 16  # a multiple of kEach of select.cu
# of a float's magnitude: its sign's bit, then where its digits start; the last one has bits of the one before it again
SHIFTS = {"e": (15, 4, 0), "f": (31, 20, 9, 0), "d": (63, 52, 41, 30, 19, 8, 0)}


class SelectKernels(Launcher):
    """top_k, threshold, scatter, and the scale of half-precision exchange."""

    def __init__(self, device_id: int) -> None:
        super().__init__(device_id)
        # of each stream; zeros between kernels
        self._counters = [
            (cupy.zeros(1 << DIGIT_BITS, np.uint32), cupy.zeros(2, np.int64)) for _ in self.streams.all
        ]

    def top_k(self, values: Array, *, out: tuple[Array, Array], k: int) -> None:
        if k == 0:
            return
        (indices, selected), n, kind = out, values.size, values.dtype.char
        types, (blocks, span) = kind + indices.dtype.char, self._spans(n)
        digits, search = self._counters[self.streams.number]
        before = self.scratch(8 * blocks)
        lists = self.empty((blocks * (1 + span // 8),), np.uint32)  # see Note [candidates] in select.cu
        for number, (known, shift) in enumerate(pairwise(SHIFTS[kind])):
            numbers = (n, span, k, number, known, shift)
            counters = (digits, search, lists, self.block_counter)
            self.launch("select.find_digit", types, blocks, THREADS, values, *numbers, *counters)
        given = (values, n, span, search, lists, before)
        self.launch("select.count_largest", types, blocks, THREADS, *given, self.block_counter)
        self.launch("select.write_largest", types, blocks, THREADS, *given, indices, selected, k)

    def threshold_count(self, values: Array, *, out: Array, threshold: float) -> None:
        self._count_at_least(values, self.scalar(threshold), out, out.dtype.char)

    def threshold_select(self, values: Array, *, out: tuple[Array, Array], threshold: float) -> None:
        indices, selected = out
        limit = self.scalar(threshold)
        self._count_at_least(values, limit, 0, indices.dtype.char)
        if values.size:
            blocks, span = self._spans(values.size)
            types, before = values.dtype.char + indices.dtype.char, self.scratch(8 * blocks)
            given = (values, values.size, span, limit, before, indices, selected, indices.size)
            self.launch("select.write_at_least", types, blocks, THREADS, *given)

    def _count_at_least(self, values: Array, limit: Any, total: Array | int, count_type: str) -> None:
        blocks, span = self._spans(values.size)
        given = (values, values.size, span, limit, self.scratch(8 * blocks), total, self.block_counter)
        self.launch("select.count_at_least", values.dtype.char + count_type, blocks, THREADS, *given)

    def _spans(self, n: int) -> tuple[int, int]:
        """Return how many blocks look for what to keep, and at how many elements each: a multiple of EACH.

        The first part begins up to EACH elements before the array, at an address of whole packs.
        """
        if n >= 2**32:
            raise ShapeError(f"select: {n} elements are too many; below 2**32 can be counted")
        blocks = self.count_blocks(n)
        return blocks, EACH * -(-(n + EACH) // (EACH * blocks))

    def scatter_add(self, indices: Array, values: Array, *, out: Array) -> None:
        types = values.dtype.char + indices.dtype.char
        self.each("select.scatter_add", types, values.size, indices, values, out, values.size, out.size)

    def scatter_fill(self, indices: Array, *, out: Array, value: float) -> None:
        types = out.dtype.char + indices.dtype.char
        given = (indices, out, indices.size, out.size, float(value))
        self.each("select.scatter_fill", types, indices.size, *given)

    def max_abs(self, x: Array, *, out: Array) -> None:
        self.over_grid("select.max_abs", x.dtype.char + "l", x.size, x, out)

    def power_of_two_scale(self, largest: Array, *, out: Array, limit: float) -> None:
        self.launch("select.power_of_two_scale", largest.dtype.char + "l", 1, 1, largest, out, float(limit))
