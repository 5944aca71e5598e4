# SPDX-License-Identifier: Apache-2.0
"""How many bytes k ascending indices below n take on the wire: a number of n and k alone."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LOW_BITS = 31  # what the kernels take


@dataclass(frozen=True)
class IndexCode:
    """Ascending indices as words of 32 bits, see Note [Elias-Fano] in backend/cpu/indices.py."""

    n: int  # they are below it
    k: int  # how many there are, 0 .. n

    @property
    def low_bits(self) -> int:
        """How many of an index's bits are written as they are: floor(log2(n / k)), at most 31."""
        return min(MAX_LOW_BITS, (self.n // self.k).bit_length() - 1) if self.k else 0

    @property
    def num_words(self) -> int:
        """ceil(k low_bits / 32) + ceil((k + ((n - 1) >> low_bits) + 1) / 32); 0 for none."""
        if self.k == 0:
            return 0
        high = self.k + ((self.n - 1) >> self.low_bits) + 1
        return -(-self.k * self.low_bits // 32) + -(-high // 32)
