# SPDX-License-Identifier: Apache-2.0
"""Ascending indices as few bits.

Note [Elias-Fano]: of k ascending indices each leaves its ``low_bits`` lowest bits, one after the other, in the first
ceil(k low_bits / 32) words of 32 bits; and the j-th index i sets bit (i >> low_bits) + j of the words behind. So k
indices below n take as many words as any others: with low_bits = floor(log2(n / k)) fewer than 3 + log2(n / k) bits
each. Equal neighbours are allowed. Bits are counted from the lowest of the first word.
Source: Elias, "Efficient storage and retrieval by content and address of static files", 1974; Fano, 1971.
"""

from __future__ import annotations

import numpy as np

from ..base import Array


class IndexKernels:
    """Kernels that encode and decode a message of indices, see Note [Elias-Fano]."""

    def pack_indices(self, indices: Array, *, out: Array, low_bits: int) -> None:
        wide, bits = indices.astype(np.int64), np.zeros(32 * out.size, np.uint8)
        low = wide[:, np.newaxis] >> np.arange(low_bits) & 1
        bits[: low.size] = low.ravel()
        bits[32 * num_low_words(wide.size, low_bits) + (wide >> low_bits) + np.arange(wide.size)] = 1
        out[...] = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)

    def unpack_indices(self, words: Array, *, out: Array, low_bits: int) -> None:
        k = out.size
        bits = np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little").astype(np.int64)
        low = bits[: k * low_bits].reshape(k, low_bits) @ (1 << np.arange(low_bits))
        high = np.flatnonzero(bits[32 * num_low_words(k, low_bits) :])[:k]
        out[: high.size] = (high - np.arange(high.size) << low_bits) + low[: high.size]
        out[high.size :] = 0  # words of a collective that was aborted have any bits


def num_low_words(k: int, low_bits: int) -> int:
    """Return how many words the lowest bits of k indices take."""
    return -(-k * low_bits // 32)
