# SPDX-License-Identifier: Apache-2.0
"""Ascending indices as few bits, in indices.cu; see Note [Elias-Fano] in ../cpu/indices.py."""

from __future__ import annotations

from ..base import Array
from ..cpu.indices import num_low_words
from .launch import THREADS, Launcher


class IndexKernels(Launcher):
    """Kernels that encode and decode a message of indices."""

    def pack_indices(self, indices: Array, *, out: Array, low_bits: int) -> None:
        kind, k = indices.dtype.char + "l", indices.size
        self.each("indices.clear_words", kind, out.size, out, out.size)
        given = (indices, out, k, low_bits, num_low_words(k, low_bits), out.size)
        self.each("indices.set_bits", kind, k, *given)

    def unpack_indices(self, words: Array, *, out: Array, low_bits: int) -> None:
        kind, k = out.dtype.char + "l", out.size
        given = (words, out, k, low_bits, num_low_words(k, low_bits), words.size)
        if k:
            self.launch("indices.find_bits", kind, 1, THREADS, *given)
