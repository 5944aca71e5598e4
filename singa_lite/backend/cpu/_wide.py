# SPDX-License-Identifier: Apache-2.0
"""The accumulation rule of the CPU kernels: float16 is computed in float32, wider types as they are."""

from __future__ import annotations

import numpy as np

from ..base import Array


def wide(x: Array) -> Array:
    """``x`` itself, or a float32 copy of a float16 array."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which arrays of ``dtype`` are summed."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype
