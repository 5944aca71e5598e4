# SPDX-License-Identifier: Apache-2.0
"""bfloat16 by its definition, in float64: what the code under test must round to."""

from __future__ import annotations

from typing import Any

import numpy as np


def nearest_bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 ``values`` rounded to 8 significant bits, ties to even, above 2**-133; NaN as a quiet one."""
    wide = values.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        exponent = np.frexp(wide)[1]  # of a value in [0.5, 1) times its power
        digit = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
        rounded = (np.rint(wide / digit) * digit).astype(np.float32)
    return np.where(np.isfinite(values), rounded, values)
