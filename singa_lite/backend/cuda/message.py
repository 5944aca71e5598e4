# SPDX-License-Identifier: Apache-2.0
"""Messages of gradients: 8-bit codes, ascending indices, signs and low-rank factors, each in the .cu file of that name.

What they are is in the file of the same name in ../cpu, which makes the same ones.
"""

from __future__ import annotations

from ..base import Array
from ..cpu.indices import num_low_words
from ..cpu.quantize import BLOCK
from .launch import THREADS, Launcher

MOST_ROWS = 32  # that low_rank.cu keeps factors for


class MessageKernels(Launcher):
    """Kernels that encode and decode what a scheme sends, and make and apply the factors of powerSGD."""

    # ---- 8-bit codes, a block of threads for each block of values --------------------------------------

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

    # ---- ascending indices -----------------------------------------------------------------------------

    def pack_indices(self, indices: Array, *, out: Array, low_bits: int) -> None:
        kind, k = indices.dtype.char + "l", indices.size
        self.find("fill")(out=out, value=0.0)
        given = (indices, out, k, low_bits, num_low_words(k, low_bits), out.size)
        self.each("indices.set_bits", kind, k, *given)

    def unpack_indices(self, words: Array, *, out: Array, low_bits: int) -> None:
        kind, k = out.dtype.char + "l", out.size
        given = (words, out, k, low_bits, num_low_words(k, low_bits), words.size)
        if k:
            self.launch("indices.find_bits", kind, 1, THREADS, *given)

    # ---- signs -----------------------------------------------------------------------------------------

    def pack_signs(self, x: Array, *, out: Array) -> None:
        self.each("signs.pack_signs", x.dtype.char + "l", out.size, x, out, x.size, out.size)

    def add_signs(self, bits: Array, scales: Array, ends: Array, *, out: Array, factor: float) -> None:
        types = out.dtype.char + ends.dtype.char
        given = (bits, scales, ends, out, out.size, ends.size, float(factor))
        self.each("signs.add_signs", types, out.size, *given)

    # ---- low-rank factors ------------------------------------------------------------------------------

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
