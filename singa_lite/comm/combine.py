# SPDX-License-Identifier: Apache-2.0
"""What a transport computes that has gathered the ranks' values: their sum, mean, maximum or minimum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .base import ReduceOp
from .wire import narrow, widen
from .work import Array

STEPS: dict[str | None, Any] = {"max": np.maximum, "min": np.minimum}  # else addition


def combine(rows: Sequence[Array], op: ReduceOp | None) -> Array:
    """Combine equal-shaped ``rows`` in their order; NaN wins in "max" and "min".

    float16 and bfloat16 (wire.py) are combined in float32. Writes over rows[0] and returns it, unless that is
    narrow or read-only. numpy warns of infinities and NaN, which a transport sends as they are: see ``np.errstate``.
    """
    dtype = rows[0].dtype
    total = widen(rows[0])
    total = total if total.flags.writeable else total.copy()
    step = STEPS.get(op, np.add)
    for row in rows[1:]:
        step(total, widen(row), out=total)
    if op == "mean":
        total /= len(rows)
    return narrow(total, dtype)
