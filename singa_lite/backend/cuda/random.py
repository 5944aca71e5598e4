# SPDX-License-Identifier: Apache-2.0
"""Random kernels, in random.cu and random_indices.cu: Philox keyed by (seed, counter), and by nothing else.

The streams have the CPU's distributions but not its numbers: there numpy draws them, from another Philox. Random
indices are the CPU's.
"""

from __future__ import annotations

from ...dtypes import largest_below
from ..base import Array
from .launch import Launcher


class RandomKernels(Launcher):
    """Dropout and the fillers, of which a thread draws four numbers, and a random choice of indices."""

    def random_indices(self, *, out: Array, n: int, seed: int, counter: int) -> None:
        half = max(1, ((n - 1).bit_length() + 1) // 2)
        stream = (self.scalar(number, int) for number in (seed, counter))
        self.each("random_indices.random_indices", out.dtype.char, out.size, out, out.size, n, half, *stream)

    def dropout(self, x: Array, *, out: tuple[Array, Array], ratio: float, seed: int, counter: int) -> None:
        self._draw("random.dropout", 4, (x, *out), (ratio,), seed, counter)

    def dropout_backward(self, dy: Array, mask: Array, *, out: Array, ratio: float) -> None:
        self.each("random.dropout_backward", dy.dtype.char, out.size, dy, mask, out, out.size, float(ratio))

    def random_uniform(self, *, out: Array, low: float, high: float, seed: int, counter: int) -> None:
        largest = max(low, largest_below(high, out.dtype))
        self._draw("random.random_uniform", 2, (out,), (low, high, largest), seed, counter)

    def random_normal(self, *, out: Array, mean: float, std: float, seed: int, counter: int) -> None:
        self._draw("random.random_normal", 2, (out,), (mean, std), seed, counter)

    def random_bernoulli(self, *, out: Array, p: float, seed: int, counter: int) -> None:
        self._draw("random.random_bernoulli", 4, (out,), (p,), seed, counter)

    def _draw(
        self, name: str, each: int, arrays: tuple[Array, ...], numbers: tuple[float, ...], *stream: int
    ) -> None:
        """Start a kernel whose threads make ``each`` elements of arrays of one size; ``stream``: seed and counter."""
        types, count = arrays[0].dtype.char, arrays[0].size
        given = (*arrays, count, *map(float, numbers), *(self.scalar(number, int) for number in stream))
        self.each(name, types, -(-count // each), *given)
