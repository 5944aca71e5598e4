# SPDX-License-Identifier: Apache-2.0
"""The numbers of native/comm/types.h for kinds, operations and element types."""

from __future__ import annotations

from .base import DTYPES, KINDS, UINT8
from .wire import BFLOAT16, WIRE_DTYPES

KIND_CODES = {kind: code for code, kind in enumerate(KINDS)}
OP_CODES = {"sum": 0, "mean": 1, "max": 2, "min": 3, None: 4}
DTYPE_CODES = {dtype: code for code, dtype in enumerate((*DTYPES, BFLOAT16, UINT8))}
WIRE_CODES = {word: DTYPE_CODES[dtype] for word, dtype in WIRE_DTYPES.items()}
