# SPDX-License-Identifier: Apache-2.0
"""Encoding the arrays that this worker pushes, and the residual that encoding leaves of each key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import OptionError
from .calls import Array, Key
from .compression import Compression


class Residuals:
    """The errors of earlier pushes, which the next push of the key adds: flat float32 arrays, zeros at first."""

    def __init__(self) -> None:
        self._kept: dict[Key, Array] = {}

    def encode(
        self, where: str, compression: Compression, values: Mapping[Key, Sequence[Array]]
    ) -> tuple[dict[Key, list[Array]], dict[Key, Array]]:
        """Return the codes of float32 arrays, the consecutive pieces of each key, and what is then lost of each.

        That is for ``update``, once the codes are on their way.

        Raises:
            OptionError: a value is not finite, or too large with what was lost before.
        """
        codes: dict[Key, list[Array]] = {key: [] for key in values}
        changed = {}
        for key, pieces in values.items():
            size = sum(piece.size for piece in pieces)
            changed[key] = residual = self.get(key, size).copy()
            start = 0
            for piece in pieces:
                code = np.empty(compression.code_size(piece.size), np.int32)
                if not compression.encode(piece.reshape(-1), residual[start : start + piece.size], code):
                    raise OptionError(
                        f"{where}: the values of key {key!r} are not all finite, or too large; nothing was sent"
                    )
                codes[key].append(code)
                start += piece.size
        return codes, changed

    def update(self, lost: Mapping[Key, Array]) -> None:
        """Continue from what ``encode`` has returned."""
        self._kept.update(lost)

    def get(self, key: Key, size: int) -> Array:
        """Return what was lost of a key."""
        return self._kept.get(key, np.zeros(size, np.float32))

    def set(self, key: Key, values: Array) -> None:
        """Continue from what ``get`` gave."""
        self._kept[key] = values.astype(np.float32).ravel()


def add_decoded(compression: Compression, codes: Array, scale: float, total: Array) -> None:
    """Add what codes stand for, times ``scale``, to a flat float32 array."""
    if scale == 1:
        compression.decode_add(codes, total)
        return
    values = np.empty_like(total)
    compression.decode(codes, values)
    values *= np.float32(scale)
    total += values
