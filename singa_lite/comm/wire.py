# SPDX-License-Identifier: Apache-2.0
"""How float32 values travel in 16 bits: as float16, or as bfloat16, which numpy does not have.

What lives here: rounding arrays on their way and widening what comes. What does not: who sends them where.
bfloat16 is the upper half of a float32: its range, with 8 bits of precision. An array of it holds the bits as uint16,
a dtype that no array of a collective has. Arrays may be numpy's or, with the same operators, on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _native

# ``wire_dtype`` -> the dtype of the array that travels
WIRE_DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}
BFLOAT16 = WIRE_DTYPES["bfloat16"]
Array = np.ndarray[Any, Any]


def narrow(values: Array, wire: np.dtype[Any]) -> Array:
    """Contiguous ``values`` as an array of ``wire``, to nearest, ties to even; themselves if that is their dtype."""
    if wire != BFLOAT16:
        return values.astype(wire, copy=False)
    native = _native.load("_comm")[0] if isinstance(values, np.ndarray) else None
    if native is None:
        return bfloat16_bits(values)
    bits = np.empty(values.shape, BFLOAT16)
    native.float_to_bfloat16(values, bits, values.size)
    return bits


def widen(values: Array) -> Array:
    """What ``narrow`` gave as float32; an array that never was narrow as it is."""
    if values.dtype == np.float16:
        return values.astype(np.float32)
    if values.dtype != BFLOAT16:
        return values
    native = _native.load("_comm")[0] if isinstance(values, np.ndarray) else None
    if native is None:
        return bfloat16_values(values)
    wide = np.empty(values.shape, np.float32)
    native.bfloat16_to_float(values, wide, values.size)
    return wide


def bfloat16_bits(values: Array) -> Array:
    """float32 ``values`` as bfloat16 without native code, the same bits; a NaN becomes quiet and keeps its sign."""
    bits, is_nan = values.view(np.uint32), values != values
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF) * ~is_nan) >> 16
    return (rounded | is_nan * np.uint32(0x40)).astype(np.uint16)


def bfloat16_values(bits: Array) -> Array:
    """bfloat16 as float32 without native code."""
    wide: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return wide
