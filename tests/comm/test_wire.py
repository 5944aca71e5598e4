# SPDX-License-Identifier: Apache-2.0
"""Rounding to 16 bits and back, compiled and not: bfloat16 against its definition, float16 against numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from singa_lite import _native
from singa_lite.comm import wire
from singa_lite.comm.wire import BFLOAT16, FLOAT16, WIRE_DTYPES, narrow, widen
from tests.comm.bfloat16 import nearest_bfloat16

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


def test_every_float16_survives_the_way_there_and_back(path):
    values = widen(EVERY.view(FLOAT16))
    assert values.dtype == np.float32
    is_nan = np.isnan(EVERY.view(FLOAT16))
    expected = EVERY.view(FLOAT16).astype(np.float32)  # what numpy makes of a NaN depends on the processor
    np.testing.assert_array_equal(values[~is_nan].view(np.uint32), expected[~is_nan].view(np.uint32))
    sign_and_payload = (EVERY & 0x8000).astype(np.uint32) << 16 | (EVERY & 0x3FF).astype(np.uint32) << 13
    np.testing.assert_array_equal(values[is_nan].view(np.uint32), (sign_and_payload | 0x7FC00000)[is_nan])
    quiet = np.where(is_nan, EVERY | 0x200, EVERY)
    np.testing.assert_array_equal(narrow(values, FLOAT16).view(np.uint16), quiet)


def test_floats_round_to_float16_as_numpy_does(path):
    every = EVERY.view(FLOAT16)
    steps = np.sort(every[np.isfinite(every)]).astype(np.float32)
    half_way = (steps[1:] + steps[:-1]) / 2  # exact
    top = np.float32([65519.996, 65520, -65520, 1e30, np.inf, -np.inf, 2.0**-25, 2.9802326e-08, 1e-45, -0.0])
    beside = [np.nextafter(half_way, np.float32(way)) for way in (-np.inf, np.inf)]
    values = np.concatenate([every_kind_of_float(), half_way, *beside, top])
    values = values[~np.isnan(values)]
    with np.errstate(over="ignore"):
        expected = values.astype(FLOAT16)
    got = narrow(values, FLOAT16)
    assert got.dtype == FLOAT16
    np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x7F800001, 0x7E00),  # signalling NaN, none of whose bits would be left
        (0xFFFFFFFF, 0xFFFF),
        (0xFFC12345, 0xFE09),
        (0x7FA02000, 0x7F01),
    ],
)
def test_a_nan_becomes_a_quiet_float16_and_keeps_sign_and_upper_payload(path, bits, expected):
    got = narrow(bits_to_floats([bits] * 19), FLOAT16)
    assert got.view(np.uint16).tolist() == [expected] * 19


def test_an_array_with_gaps_is_converted_as_its_copy(path):
    values = every_kind_of_float()[:1000].reshape(10, 100).T
    for wire_dtype in (FLOAT16, BFLOAT16):
        there = narrow(np.ascontiguousarray(values), wire_dtype)
        np.testing.assert_array_equal(narrow(values, wire_dtype).view(np.uint16), there.view(np.uint16))
        gaps = np.asfortranarray(there)
        np.testing.assert_array_equal(widen(gaps).view(np.uint32), widen(there).view(np.uint32))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5)])
def test_shapes_stay(path, shape):
    values = np.full(shape, 1 + 2.0**-8 + 2.0**-20, np.float32)
    for wire_dtype in WIRE_DTYPES.values():
        there = narrow(values, wire_dtype)
        back = widen(there)
        assert (there.shape, there.dtype, back.shape, back.dtype) == (shape, wire_dtype, shape, np.float32)
    assert (widen(narrow(values, BFLOAT16)) == 1 + 2.0**-7).all()


def test_an_array_that_is_sent_as_it_is_stays_the_same_object():
    for dtype in (np.float32, np.float64, np.int32, np.int64):
        values = np.ones(3, dtype)
        assert narrow(values, values.dtype) is values and widen(values) is values
