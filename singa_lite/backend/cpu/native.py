# SPDX-License-Identifier: Apache-2.0
"""The seam to native/kernels: a call goes there first, and to numpy where it is not taken.

Note [taking a call]: a function of the compiled module ``_kernels`` has the name and form of a kernel. It computes
and returns True, or returns False having done nothing: another dtype than float32, a strided array, a shape
it has no code for. So the numpy path is whole, the reference of every kernel, and all there is where
nothing was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..._native import load
from ..base import KERNELS, Array, Backend


class NativeKernels(Backend):
    """Placed before a backend that has every kernel; takes what the compiled module can compute."""

    def __init__(self) -> None:
        module, _ = load("_kernels")
        self._takes: dict[str, Callable[..., bool]] = {
            kernel: getattr(module, kernel) for kernel in KERNELS if hasattr(module, kernel)
        }
        self._empty = getattr(module, "empty", None)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        return super().empty(shape, dtype) if self._empty is None else self._empty(shape, dtype)  # type: ignore[safe-super]

    def execute(
        self,
        kernel: str,
        inputs: tuple[Array, ...],
        out: Array | tuple[Array, ...],
        attributes: dict[str, Any],
    ) -> None:
        take = self._takes.get(kernel)
        if take is None or not take(*inputs, out=out, **attributes):  # see Note [taking a call]
            super().execute(kernel, inputs, out, attributes)
