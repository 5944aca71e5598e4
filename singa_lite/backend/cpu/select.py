# SPDX-License-Identifier: Apache-2.0
"""Selection of the large elements of a flat array, and adding them back where they belong."""

from __future__ import annotations

import numpy as np

from ..base import Array


def keep(values: Array, chosen: Array, out: tuple[Array, Array]) -> None:
    """Write the positions where ``chosen`` is True, ascending, and the values there."""
    indices, selected = out
    positions = np.flatnonzero(chosen)
    indices[...] = positions
    np.take(values, positions, out=selected)


class SelectKernels:
    """top_k, threshold, scatter, and the scale of half-precision exchange."""

    def top_k(self, values: Array, *, out: tuple[Array, Array], k: int) -> None:
        if k == 0:
            return
        sizes = np.abs(values)
        border = np.partition(sizes, values.size - k)[values.size - k]  # introselect; NaN sorts last: largest
        chosen = np.isnan(sizes)
        if np.isnan(border):
            equal = np.flatnonzero(chosen)
            chosen = np.zeros_like(chosen)
        else:
            chosen |= sizes > border
            equal = np.flatnonzero(sizes == border)
        chosen[equal[: k - np.count_nonzero(chosen)]] = True
        keep(values, chosen, out)

    def threshold_count(self, values: Array, *, out: Array, threshold: float) -> None:
        out[...] = values.size - np.count_nonzero(np.abs(values) < threshold)  # so NaN counts

    def threshold_select(self, values: Array, *, out: tuple[Array, Array], threshold: float) -> None:
        keep(values, ~(np.abs(values) < threshold), out)

    def scatter_add(self, indices: Array, values: Array, *, out: Array) -> None:
        out[indices] += values

    def scatter_fill(self, indices: Array, *, out: Array, value: float) -> None:
        out[indices] = value

    def max_abs(self, x: Array, *, out: Array) -> None:
        out[0] = np.maximum(x.max(), -x.min()) if x.size else 0  # numpy's max, min and maximum pass NaN on

    def power_of_two_scale(self, largest: Array, *, out: Array, limit: float) -> None:
        if not np.isfinite(largest[0]) or largest[0] == 0:
            out[0] = 1
            return
        # exponents beyond +-126 would leave float32's normal range, where scaling is not exact
        exponent = np.clip(np.floor(np.log2(limit / np.float64(largest[0]))), -126, 126)
        out[0] = np.ldexp(1.0, int(exponent))
