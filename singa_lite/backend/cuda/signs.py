# SPDX-License-Identifier: Apache-2.0
"""Signs of a flat array, a bit each, and adding them back, in signs.cu."""

from __future__ import annotations

from ..base import Array
from .launch import Launcher


class SignKernels(Launcher):
    """Kernels that encode and decode a message of signs."""

    def pack_signs(self, x: Array, *, out: Array) -> None:
        self.each("signs.pack_signs", x.dtype.char + "l", out.size, x, out, x.size, out.size)

    def add_signs(self, bits: Array, scales: Array, ends: Array, *, out: Array, factor: float) -> None:
        types = out.dtype.char + ends.dtype.char
        given = (bits, scales, ends, out, out.size, ends.size, float(factor))
        self.each("signs.add_signs", types, out.size, *given)
