# SPDX-License-Identifier: Apache-2.0
"""The dtype of bfloat16 arrays, which NumPy itself has none of, and what that asks of code that looks at dtypes."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import ml_dtypes
import numpy as np

bfloat16 = np.dtype(ml_dtypes.bfloat16)
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether ``dtype`` holds floating-point numbers; bfloat16's ``kind`` is "V" for NumPy."""
    return dtype.kind == "f" or dtype == bfloat16


@cache
def largest_of(dtype: np.dtype[Any]) -> float:
    """Return the largest finite number of a float ``dtype``."""
    return float(ml_dtypes.finfo(dtype).max)


@lru_cache(maxsize=100)
def largest_below(number: float, dtype: np.dtype[Any]) -> float:
    """Return the largest number of a float ``dtype`` below ``number``; infinity if that is too large for it."""
    with np.errstate(over="ignore"):
        nearest = np.asarray(number).astype(dtype)
    if not float(nearest) < number:
        below = dtype.type(0 if np.isposinf(nearest) else -np.inf)
        return math.inf if np.isposinf(nearest) else float(np.nextafter(nearest, below))
    return float(nearest)


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Return whether ``dtype`` has 16 bits, float16 or bfloat16: kernels add such values in float32."""
    return dtype == np.float16 or dtype == bfloat16


def accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which numbers of ``dtype`` are added up: float32 for 16 bits, else the same."""
    return np.dtype(np.float32) if is_narrow(dtype) else dtype
