# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on bfloat16 arrays, against float64 on the same numbers: at most 2^-8 of the sum of magnitudes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from singa_lite import _native
from singa_lite.backend.cpu import CpuBackend, NumpyBackend
from singa_lite.dtypes import bfloat16

KERNELS, REASON = _native.load("_kernels")
if KERNELS is None:
    pytest.skip(f"nothing was compiled: {REASON}", allow_module_level=True)
needs_onednn = pytest.mark.skipif(not KERNELS.onednn, reason="built without oneDNN: products are numpy's")
REFERENCE = NumpyBackend()
BACKEND = CpuBackend()
UNIT = 2.0**-8
quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)
counts = st.integers(0, 3000) | st.integers(60_000, 70_000)  # the second in several threads
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
BOTH = (bfloat16, np.dtype(np.float32))


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Normal numbers rounded to bfloat16."""
    return floats(seed, *shape).astype(bfloat16)


def like(*shape: int, dtype: Any = bfloat16) -> np.ndarray:
    """An output full of what must be overwritten."""
    return np.full(shape, 99, dtype)


def wide(array: np.ndarray) -> np.ndarray:
    """The float64 twin of a float array, a copy of any other."""
    return array.astype(np.float64) if array.dtype in BOTH else array.copy()


def reference(kernel: str, *inputs: np.ndarray, out: tuple[np.ndarray, ...], **attributes: Any) -> Any:
    """What numpy computes in float64 for outputs of these shapes."""
    expected = tuple(map(wide, out))
    REFERENCE.run(kernel, *map(wide, inputs), out=expected[0] if len(out) == 1 else expected, **attributes)
    return expected


def check(
    kernel: str,
    *inputs: np.ndarray,
    out: tuple[np.ndarray, ...],
    limits: Any = None,
    **attributes: Any,
) -> None:
    """The compiled kernel takes the call and is within ``limits``, those of a linear kernel if None are given."""
    expected = reference(kernel, *inputs, out=out, **attributes)
    if limits is None:
        limits = reference(kernel, *(np.abs(wide(array)) for array in inputs), out=out, **attributes)
    single = out[0] if len(out) == 1 else out
    assert getattr(KERNELS, kernel)(*inputs, out=single, **attributes), f"{kernel} did not take the call"
    for array, wanted, limit in zip(out, expected, limits, strict=True):
        error = np.abs(wide(array) - wanted)
        assert (error <= UNIT * np.abs(limit) + 1e-30).all(), (kernel, error.max(initial=0))


# ---- moving and rounding -------------------------------------------------------------------------------

SPECIAL = [0, -0.0, 1e-40, -1e-45, 3.4e38, -3.4e38, np.inf, -np.inf, 1.00390625, 1.01171875, np.nan, -np.nan]


@quick
@given(seeds, counts)
def test_casts_round_to_nearest_even(seed, count):
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), np.float32(SPECIAL)])
    y, back = like(x.size), like(x.size, dtype=np.float32)
    assert KERNELS.cast(x, out=y) and KERNELS.cast(y, out=back)
    is_nan = np.isnan(x)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(y[~is_nan].view("u2"), x[~is_nan].astype(bfloat16).view("u2"))
    np.testing.assert_array_equal(back.view("u4"), y.view("u2").astype("u4") << 16)
    assert np.isnan(back[is_nan]).all() and (np.signbit(back) == np.signbit(x)).all()


def test_copies_transposes_and_fills():
    x, y = numbers(1, 40, 30), like(30, 40)
    assert KERNELS.transpose(x, out=y, axes=(1, 0))
    np.testing.assert_array_equal(y, x.T)
    assert KERNELS.copy(x[::2, ::-3], out=y[:20, :10])
    np.testing.assert_array_equal(y[:20, :10], x[::2, ::-3])
    assert KERNELS.fill(out=x, value=1.003) and (x == bfloat16.type(1.003)).all()


def test_other_dtypes_of_two_bytes_are_not_taken():
    x, y = numbers(1, 8), like(8)
    for other in (x.view(np.float16), x.view(np.uint16), x.view(np.int16)):
        assert not KERNELS.copy(x, out=other) and not KERNELS.relu(other, out=y)
        assert not KERNELS.cast(other, out=y)
    locked = like(8)
    locked.flags.writeable = False
    assert not KERNELS.fill(out=locked, value=1.0) and not KERNELS.relu(x, out=locked)
    assert not KERNELS.add(x[::2], x[::2], out=like(4)) and (y == 99).all()
