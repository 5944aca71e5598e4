# SPDX-License-Identifier: Apache-2.0
"""Blocks of 8-bit codes, in quantize.cu; ../cpu/quantize.py says what they are, and makes the same ones."""

from __future__ import annotations

from ..base import Array
from ..cpu.quantize import BLOCK
from .launch import Launcher


class QuantizeKernels(Launcher):
    """8-bit messages; a block of threads for each block of values."""

    def quantize_int8(self, x: Array, *, out: Array, row_size: int, seed: int, counter: int) -> None:
        stream = (self.scalar(seed, int), self.scalar(counter, int))
        self._each_block("quantize_int8", x, len(out), row_size, x.size, (x, out), *stream)

    def quantize_int8_nearest(self, x: Array, *, out: tuple[Array, Array], row_size: int) -> None:
        messages, rest = out
        self._each_block("quantize_int8_nearest", x, len(messages), row_size, x.size, (x, messages, rest))

    def dequantize_int8(self, messages: Array, *, out: Array, row_size: int) -> None:
        self._each_block("dequantize_int8", out, len(messages), row_size, out.size, (messages, out))

    def mean_of_int8(self, messages: Array, *, out: Array) -> None:
        self._each_block("mean_of_int8", out, 1, out.size, len(messages), (messages, out))

    def _each_block(
        self,
        name: str,
        typed: Array,
        num_rows: int,
        row_size: int,
        number: int,
        arrays: tuple[Array, ...],
        *stream: object,
    ) -> None:
        """Start a kernel with a block of threads for each block of ``num_rows`` rows; ``typed`` has T's type."""
        blocks_a_row = -(-row_size // BLOCK)
        given = (*arrays, row_size, number, blocks_a_row, *stream)
        self.each_row(f"quantize.{name}", typed.dtype.char, num_rows * blocks_a_row, BLOCK, *given)
