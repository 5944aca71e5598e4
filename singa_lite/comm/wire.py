# SPDX-License-Identifier: Apache-2.0
"""How float32 values are sent in 16 bits: as float16, or as bfloat16, which numpy does not have.

What lives here: rounding arrays on their way and widening what comes. What does not: who sends them where.
bfloat16 is the upper half of a float32: its range, with 8 bits of precision. An array of it holds the bits as uint16,
a dtype that no array of a collective has. Arrays may be numpy's or, with the same operators, on a GPU.
What is too large becomes infinite, without a warning. A NaN becomes quiet and keeps its sign and the upper bits of its
payload, either way, compiled or not; a GPU may change its payload.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _native

# ``wire_dtype`` -> the dtype of the array that is sent
WIRE_DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}
FLOAT16, BFLOAT16 = WIRE_DTYPES.values()
# dtype of the array that is sent -> the compiled loops that narrow and widen it
LOOPS = {FLOAT16: ("float_to_half", "half_to_float"), BFLOAT16: ("float_to_bfloat16", "bfloat16_to_float")}
Array = np.ndarray[Any, Any]


def narrow(values: Array, wire: np.dtype[Any], scale: Array | None = None) -> Array:
    """Return contiguous ``values`` times ``scale`` as an array of ``wire``, to nearest, ties to even.

    They themselves are returned if that is their dtype. ``scale``: float32, shape (1,), None is 1; only for float32
    ``values`` and a ``wire`` of WIRE_DTYPES.
    """
    if wire not in LOOPS or values.dtype != np.float32:
        return values.astype(wire, copy=False)
    native = _compiled(values)
    if native is None:
        values = values if scale is None else values * scale[0]
        return bfloat16_bits(values) if wire == BFLOAT16 else float16_values(values)
    narrowed = np.empty(values.shape, wire)
    getattr(native, LOOPS[wire][0])(values, narrowed, values.size, _factor(scale))
    return narrowed


def widen(values: Array, scale: Array | None = None, out: Array | None = None) -> Array:
    """Return what ``narrow`` gave, divided by ``scale``, as float32; an array that never was narrow as it is.

    ``out``: float32 and contiguous, where to write it; None makes an array.
    """
    is_narrow = values.dtype in LOOPS
    native = _compiled(values) if is_narrow else None
    if native is not None:
        wide = np.empty(values.shape, np.float32) if out is None else out
        getattr(native, LOOPS[values.dtype][1])(values, wide, values.size, _factor(scale))
        return wide
    if is_narrow:
        values = bfloat16_values(values) if values.dtype == BFLOAT16 else float32_values(values)
        values = values if scale is None else values / scale[0]
    if out is None:
        return values
    out[...] = values
    return out


def _factor(scale: Array | None) -> float:
    return 1.0 if scale is None else float(scale[0])


def _compiled(values: Array) -> Any:  # Any: a compiled module
    """Return the module of compiled loops, or None if it is not built, or if ``values`` are not for them."""
    is_plain = isinstance(values, np.ndarray) and values.flags.c_contiguous
    return _native.load("_comm")[0] if is_plain else None


def float16_values(values: Array) -> Array:
    """float32 ``values`` as float16 without native code, the same bits (numpy's, but for NaN)."""
    if not isinstance(values, np.ndarray):
        return values.astype(FLOAT16)  # type: ignore[unreachable]
    with np.errstate(over="ignore"):
        narrowed = values.astype(FLOAT16)
    is_nan = np.isnan(values)
    bits = values.view(np.uint32)[is_nan]
    narrowed.view(np.uint16)[is_nan] = bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF
    return narrowed


def float32_values(values: Array) -> Array:
    """float16 ``values`` as float32 without native code, the same bits."""
    wide = values.astype(np.float32)
    if isinstance(values, np.ndarray):
        wide.view(np.uint32)[np.isnan(values)] |= 0x400000
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
