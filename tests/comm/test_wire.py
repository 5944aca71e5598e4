# SPDX-License-Identifier: Apache-2.0
"""Rounding to bfloat16 and back, compiled and not, against the definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
from bfloat16 import nearest_bfloat16

from singa_lite import _native
from singa_lite.comm import wire
from singa_lite.comm.wire import BFLOAT16, WIRE_DTYPES, narrow, widen

EVERY = np.arange(1 << 16, dtype=np.uint16)


@pytest.fixture(params=["native", "numpy"])
def path(request, monkeypatch):
    """Run the test once with the compiled loops and once without."""
    if request.param == "numpy":
        monkeypatch.setattr(wire._native, "load", lambda name: (None, "not built"))
    else:
        assert _native.load("_comm")[0] is not None, _native.load("_comm")[1]


def bits_to_floats(bits):
    return np.array(bits, np.uint32).view(np.float32)


def every_kind_of_float():
    random = np.random.default_rng(3).integers(0, 1 << 32, 200_001, dtype=np.uint32)
    half_way = (random & 0xFFFF0000) | 0x8000
    beside = np.concatenate([half_way - 1, half_way + 1])
    return np.concatenate([random, half_way, beside]).view(np.float32)


def test_floats_round_to_the_nearest_and_ties_to_even(path):
    values = every_kind_of_float()
    values = values[~np.isnan(values)]
    rounded = widen(narrow(values, BFLOAT16))
    np.testing.assert_array_equal(rounded.view(np.uint32), nearest_bfloat16(values).view(np.uint32))


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x7F7F7FFF, 0x7F7F),  # the largest that stays finite
        (0x7F7F8000, 0x7F80),
        (0xFF800000, 0xFF80),
        (0x00008000, 0x0000),  # subnormal, half way
        (0x00018000, 0x0002),
        (0x80000000, 0x8000),
        (0x7F800001, 0x7FC0),  # signalling NaN, none of whose bits would be left
        (0xFFFFFFFF, 0xFFFF),
        (0xFFC12345, 0xFFC1),
    ],
)
def test_extremes_and_nan(path, bits, expected):
    got = narrow(bits_to_floats([bits] * 19), BFLOAT16)
    assert got.dtype == np.uint16 and got.tolist() == [expected] * 19


def test_every_bfloat16_survives_the_way_there_and_back(path):
    values = widen(EVERY)
    assert values.dtype == np.float32
    assert (values.view(np.uint32) == EVERY.astype(np.uint32) << 16).all()
    quiet = np.where(np.isnan(values), EVERY | 0x40, EVERY)
    np.testing.assert_array_equal(narrow(values, BFLOAT16), quiet)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5)])
def test_shapes_stay(path, shape):
    values = np.full(shape, 1 + 2.0**-8 + 2.0**-20, np.float32)
    for wire_dtype in WIRE_DTYPES.values():
        there = narrow(values, wire_dtype)
        back = widen(there)
        assert (there.shape, there.dtype, back.shape, back.dtype) == (shape, wire_dtype, shape, np.float32)
    assert (widen(narrow(values, BFLOAT16)) == 1 + 2.0**-7).all()


def test_an_array_that_travels_as_it_is_stays_the_same_object():
    for dtype in (np.float32, np.float64, np.int32, np.int64):
        values = np.ones(3, dtype)
        assert narrow(values, values.dtype) is values and widen(values) is values
