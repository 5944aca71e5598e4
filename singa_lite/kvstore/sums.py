# SPDX-License-Identifier: Apache-2.0
"""Where the sums of a store without servers are computed: memory of keys that are pushed together.

What lives here: which arrays are packed into one collective, and which travel by themselves. What does not: the
collectives, and what becomes of the sums (replica.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..device import Device
from ..tensor import Tensor
from .calls import Push

DIRECT_BYTES = 1 << 20  # from here on copying an array costs more than a collective of its own


class SumMemory:
    """Memory for the sums of keys of one device and dtype.

    Args:
        pushes: of the keys, in order.
        device: where they live.

    Attributes:
        flat: all sums end to end, those of arrays below DIRECT_BYTES first; float32 for keys of float16.
        parts: for each push its part of ``flat``, a raw array in the shape of the key.
    """

    def __init__(self, pushes: Sequence[Push], device: Device) -> None:
        dtype = pushes[0].spec.dtype
        self._dtype = np.dtype(np.float32) if dtype == np.float16 else dtype
        self._is_large = [push.spec.size * self._dtype.itemsize >= DIRECT_BYTES for push in pushes]
        flat = device.backend.empty((sum(push.spec.size for push in pushes),), self._dtype)
        self.flat = Tensor.wrap(flat, device)
        parts: dict[int, Any] = {}
        stop = num_packed = 0
        for number in sorted(range(len(pushes)), key=self._is_large.__getitem__):
            spec = pushes[number].spec
            start, stop = stop, stop + spec.size
            parts[number] = flat[start:stop].reshape(spec.shape)
            num_packed = num_packed if self._is_large[number] else stop
        self.parts = [parts[number] for number in range(len(pushes))]
        self._packed = Tensor.wrap(flat[:num_packed], device)

    def fill(self, pushes: Sequence[Push], scale: float) -> Iterator[tuple[Any, Any]]:
        """Yield for each collective the raw array to sum, times ``scale``, and where its sum goes, maybe the same."""
        backend = self.flat.device.backend
        values = [self._value(push) for push in pushes]
        small = [value for value, is_large in zip(values, self._is_large, strict=True) if not is_large]
        if small:
            backend.run("pack", *small, out=self._packed.array)
            if scale != 1:
                self._packed *= scale
            yield self._packed.array, self._packed.array
        for value, part, is_large in zip(values, self.parts, self._is_large, strict=True):
            if is_large and scale == 1:
                yield value, part
            elif is_large:
                backend.run("copy", value, out=part)
                scaled = Tensor.wrap(part, self.flat.device)
                scaled *= scale
                yield part, part

    def parts_as(self, dtype: np.dtype[Any]) -> list[Any]:
        """Return ``parts``, in a copy of another dtype where that is not theirs."""
        if dtype == self._dtype:
            return self.parts
        return [Tensor.wrap(part, self.flat.device).as_type(dtype).array for part in self.parts]

    def _value(self, push: Push) -> Any:
        """Return what is added for a key, of the dtype of the sum."""
        if push.value is None:
            return self.flat.device.backend.zeros(push.spec.shape, self._dtype)
        return push.value.array if push.spec.dtype == self._dtype else push.value.as_type(self._dtype).array
