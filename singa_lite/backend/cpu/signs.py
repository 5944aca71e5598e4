# SPDX-License-Identifier: Apache-2.0
"""Signs of a flat array, a bit each, and adding them back times a scale for each segment of the array."""

from __future__ import annotations

import numpy as np

from ..base import Array


class SignKernels:
    """Kernels that encode and decode a message of signs."""

    def pack_signs(self, x: Array, *, out: Array) -> None:
        bits = np.packbits(x >= 0, bitorder="little")
        out[: bits.size] = bits
        out[bits.size :] = 0

    def add_signs(self, bits: Array, scales: Array, ends: Array, *, out: Array, factor: float) -> None:
        sent = np.repeat(scales * scales.dtype.type(factor), np.diff(ends, prepend=0))
        is_positive = np.unpackbits(bits, count=out.size, bitorder="little")
        out += np.where(is_positive, sent, -sent)
