# SPDX-License-Identifier: Apache-2.0
"""The numbers of native/comm/types.h for kinds, operations and element types."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import DTYPES, KINDS, UINT8, Operation
from .wire import BFLOAT16, WIRE_DTYPES

KIND_CODES = {kind: code for code, kind in enumerate(KINDS)}
OP_CODES = {"sum": 0, "mean": 1, "max": 2, "min": 3, None: 4}
DTYPE_CODES = {dtype: code for code, dtype in enumerate((*DTYPES, BFLOAT16, UINT8))}
WIRE_CODES = {word: DTYPE_CODES[dtype] for word, dtype in WIRE_DTYPES.items()}


def codes_of(operation: Operation, dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Return the numbers of a collective's kind, op, dtype, dtype on the wire, and root."""
    wire = WIRE_CODES[operation.wire_dtype] if operation.wire_dtype else DTYPE_CODES[dtype]
    return KIND_CODES[operation.kind], OP_CODES[operation.op], DTYPE_CODES[dtype], wire, operation.root
