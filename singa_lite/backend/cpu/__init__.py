# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: every kernel in numpy, and most of them in C++ for float32 arrays.

One file per family of numpy kernels, each a class whose methods are kernels (see Note [kernel form] in
../base.py); native.py calls the compiled ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..base import Array, Backend
from .conv import ConvKernels
from .elementwise import ElementwiseKernels
from .indices import IndexKernels
from .loss import LossKernels
from .low_rank import LowRankKernels
from .move import MoveKernels
from .native import NativeKernels
from .norm import NormKernels
from .pool import PoolKernels
from .quantize import QuantizeKernels
from .random import RandomKernels
from .recurrent import RecurrentKernels
from .select import SelectKernels
from .signs import SignKernels
from .update import UpdateKernels


class NumpyBackend(
    ElementwiseKernels,
    MoveKernels,
    ConvKernels,
    PoolKernels,
    NormKernels,
    RecurrentKernels,
    LossKernels,
    RandomKernels,
    QuantizeKernels,
    UpdateKernels,
    SelectKernels,
    IndexKernels,
    SignKernels,
    LowRankKernels,
    Backend,
):
    """Every kernel in numpy: the reference of all faster paths. Calls end before they return."""

    name = "cpu"
    recomputes = True
    missing_precisions: Mapping[str, str] = {
        "fp16": "CPUs have no instructions for products of float16; choose 'bf16'"
    }

    def execute(
        self,
        kernel: str,
        inputs: tuple[Array, ...],
        out: Array | tuple[Array, ...],
        attributes: dict[str, Any],
    ) -> None:
        method = self.find(kernel)
        with np.errstate(all="ignore"):  # overflow is inf and invalid is NaN, as on every other device
            method(*inputs, out=out, **attributes)

    def allocate(self, shape: Sequence[int], dtype: Any) -> Array:
        return np.empty(shape, dtype)

    def allocate_zeros(self, shape: Sequence[int], dtype: Any) -> Array:
        return np.zeros(shape, dtype)

    def asarray(self, values: np.ndarray[Any, Any]) -> Array:
        return np.array(values, order="C")

    def copy_to_host(self, array: Array, out: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
        if out is None:
            return np.array(array, order="C")
        out[...] = array
        return out

    def may_share_memory(self, a: Array, b: Array) -> bool:
        return np.may_share_memory(a, b)

    def synchronize(self) -> None:
        return None


class CpuBackend(NativeKernels, NumpyBackend):
    """Backend of the CPU device: compiled kernels where they take the call, numpy's for the rest."""


__all__ = ["CpuBackend", "NumpyBackend"]
