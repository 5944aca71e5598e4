# SPDX-License-Identifier: Apache-2.0
"""Gradients in 1 and 2 bits, compiled and not, against a model that goes value by value and bit by bit."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest

from singa_lite import _native
from singa_lite.errors import DTypeError, OptionError, ShapeError
from singa_lite.kvstore import compression as module
from singa_lite.kvstore.compression import Compression

F32 = np.float32
T = F32(0.5)
MNIST_CNN = [500, 20, 25_000, 50, 400_000, 500, 5_000, 10]
KINDS = [("2bit", 0.5), ("2bit", 0.1), ("1bit", 0.0), ("1bit", -0.5), ("1bit", 1.5)]
SIZES = [*range(71), 511, 512, 513, 1025, 5_003]  # around words, the width of vectors and compiled blocks


@pytest.fixture(params=["native", "numpy"])
def path(request, monkeypatch):
    """Run the test once with compiled code and once without."""
    if request.param == "numpy":
        monkeypatch.setattr(module._native, "load", lambda name: (None, "not built"))
    else:
        assert _native.load("_kernels")[0] is not None, _native.load("_kernels")[1]


def model_step(kind, threshold, grad, residual):
    """(bits as text, values sent, new residual): the definition, value by value."""
    t, bits, sent, kept = F32(threshold), "", [], []
    for g, r in zip(grad, residual, strict=True):
        total = F32(r + g)
        if kind == "2bit":
            code, value = ("11", t) if total >= t else ("10", F32(-t)) if total <= -t else ("00", F32(0))
        else:
            code, value = ("1", F32(1)) if total > t else ("0", F32(-1))
        bits += code
        sent.append(value)
        kept.append(F32(total - value))
    return bits, np.array(sent, F32), np.array(kept, F32)


def bytes_of(bits):
    """The text of bits as bytes, filled up with zeros to whole 32-bit words."""
    bits += "0" * (-len(bits) % 32)
    return bytes(int(bits[start : start + 8], 2) for start in range(0, len(bits), 8))


def grads(n, threshold, seed=0):
    """Random numbers, among them the threshold, its neighbours, both zeros and a subnormal number."""
    rng = np.random.default_rng([n, seed])
    t = F32(threshold)
    near = [t, -t, np.nextafter(t, F32(9)), np.nextafter(t, F32(-9)), F32(0), F32(-0.0), F32(1e-42)]
    values = rng.uniform(-2, 2, n).astype(F32)
    chosen = rng.random(n) < 0.4
    values[chosen] = rng.choice(np.array(near, F32), chosen.sum())
    return values


def codes_for(compression, n):
    return np.full(compression.code_size(n), -1, np.int32)


def push(compression, residual, *values):
    """Encode ``values`` of one gradient after the other; the sums of what is sent so far."""
    sums, total = [], np.zeros_like(residual)
    codes = codes_for(compression, residual.size)
    for value in values:
        assert compression.encode(np.full_like(residual, value), residual, codes)
        compression.decode_add(codes, total)
        sums.append(total.tolist())
    return sums


def bits(array):
    return array.view(np.uint32).tolist()


# ---- codes, residuals and values ---------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "threshold"), KINDS)
def test_codes_values_and_residuals_are_those_of_the_definition(path, kind, threshold):
    compression = Compression(kind, threshold)
    for n in SIZES:
        residual, expected_residual = np.zeros(n, F32), np.zeros(n, F32)
        for step in range(2):
            grad = grads(n, threshold, step)
            before = grad.copy()
            codes, out = codes_for(compression, n), np.full(n, 7, F32)
            text, sent, expected_residual = model_step(kind, threshold, grad, expected_residual)
            assert compression.encode(grad, residual, codes) is True
            compression.decode(codes, out)
            assert codes.tobytes() == bytes_of(text)
            assert bits(out) == bits(sent) and bits(residual) == bits(expected_residual)
            assert bits(grad) == bits(before)


@pytest.mark.parametrize(("kind", "threshold"), KINDS)
def test_compiled_code_and_numpy_give_the_same_bits(monkeypatch, kind, threshold):
    compression = Compression(kind, threshold)
    n = 1_000_003
    results = []
    for native in (_native.load("_kernels"), (None, "not built")):
        with monkeypatch.context() as patched:
            patched.setattr(module._native, "load", lambda name, native=native: native)
            residual, codes, out = np.zeros(n, F32), codes_for(compression, n), grads(n, threshold, 9)
            for step in range(2):
                assert compression.encode(grads(n, threshold, step), residual, codes)
                compression.decode_add(codes, out)
            results.append((residual.tobytes(), codes.tobytes(), out.tobytes()))
    assert results[0] == results[1]


def test_the_first_value_is_in_the_highest_bits(path):
    codes, residual = np.zeros(1, np.int32), np.zeros(6, F32)
    Compression("2bit", 0.5).encode(F32([1, -1, 0, 1, -1, 1]), residual, codes)
    assert codes.view(np.uint8).tolist() == [0b11_10_00_11, 0b10_11_00_00, 0, 0]
    Compression("1bit", 0.0).encode(F32([1, -1, 1, 1, -1, 1]), np.zeros(6, F32), codes)
    assert codes.view(np.uint8).tolist() == [0b101101_00, 0, 0, 0]


def test_values_are_added_to_those_there(path):
    codes = np.zeros(1, np.int32)
    for compression, expected in (
        (Compression("2bit", 0.25), [1.25, 0.75, 1]),
        (Compression("1bit"), [2, 0, 0]),
    ):
        assert compression.encode(F32([3, -3, 0]), np.zeros(3, F32), codes)
        out = np.ones(3, F32)
        compression.decode_add(codes, out)
        assert out.tolist() == expected


def test_a_code_that_encode_never_makes_is_zero(path):
    out = np.ones(3, F32)
    Compression("2bit", 0.5).decode(np.frombuffer(bytes([0b01_11_01_00, 0, 0, 0]), np.int32), out)
    assert out.tolist() == [0, 0.5, 0]


# ---- MXNet's tests of a kvstore, as far as one worker goes -----------------------------------------------------


def test_2bit_sends_what_reaches_the_threshold_and_keeps_the_rest(path):
    residual = np.zeros(6, F32)
    sums = push(Compression("2bit", 0.5), residual, F32(0.4), T - F32(0.4), F32(0.2), T - F32(0.2))
    assert sums == [[0] * 6, [0.5] * 6, [0.5] * 6, [1] * 6] and residual.tolist() == [0] * 6


def test_2bit_residuals_add_up_until_they_are_sent(path):
    compression, residual = Compression("2bit", 0.5), np.zeros(6, F32)
    kept = []
    sums = []
    for value in (0.4, 0.2, 0.2, 0.2):
        sums += push(compression, residual, F32(value))
        kept.append(residual[0])
    assert [sum_[0] for sum_ in sums] == [0, 0.5, 0, 0.5]
    np.testing.assert_allclose(kept, [0.4, 0.1, 0.3, 0], atol=1e-7)


def test_2bit_sends_the_threshold_itself_of_either_sign(path):
    assert push(Compression("2bit", 0.5), np.zeros(1, F32), T, F32(0), -T) == [[0.5], [0.5], [0]]


@pytest.mark.parametrize("threshold", [-0.5, 0, 0.5])
def test_1bit_sends_one_upwards_of_the_threshold(path, threshold):
    assert push(Compression("1bit", threshold), np.zeros(1, F32), 2, 0, -2) == [[1], [2], [1]]


def test_1bit_with_a_threshold_above_one(path):
    assert push(Compression("1bit", 1.5), np.zeros(1, F32), 2, 0, -2) == [[1], [0], [-1]]


def test_1bit_sends_minus_one_for_the_threshold_itself(path):
    assert push(Compression("1bit", 0.5), np.zeros(1, F32), 0.5) == [[-1]]


def test_1bit_goes_up_with_ones_and_back_with_minus_ones(path):
    sums = push(Compression("1bit", 0), np.zeros(1, F32), *[1] * 7, *[-1] * 7)
    assert [sum_[0] for sum_ in sums] == [*range(1, 8), *range(6, -1, -1)]


@pytest.mark.parametrize("kind", ["1bit", "2bit"])
@pytest.mark.parametrize("shape", [(2, 3), (1211, 1211)])
def test_what_was_sent_and_what_is_kept_are_what_came_in(kind, shape):
    """Seven rounds of random numbers: exact in multiples of 2**-20, which float32 sums without rounding."""
    compression, n = Compression(kind, 0.5), int(np.prod(shape))
    rng = np.random.default_rng(n)
    residual, sent, came = np.zeros(n, F32), np.zeros(n, F32), np.zeros(n)
    codes = codes_for(compression, n)
    for _ in range(7):
        grad = (rng.integers(-629_145, 629_146, n) / 2**20).astype(F32)  # in +-.6
        came += grad
        assert compression.encode(grad, residual, codes)
        compression.decode_add(codes, sent)
    assert (sent + residual.astype(float) == came).all()


# ---- sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "two_bits", "one_bit"),
    [
        ([6], 4, 4),
        ([1211 * 1211], 366_632, 183_316),
        ([1200 * 1200], 360_000, 180_000),
        (MNIST_CNN, 107_788, 53_900),
        ([0], 0, 0),
        ([16, 32, 17, 33], 4 + 8 + 8 + 12, 4 + 4 + 4 + 8),
    ],
)
def test_codes_take_these_bytes(sizes, two_bits, one_bit):
    for compression, expected in ((Compression("2bit"), two_bits), (Compression("1bit"), one_bit)):
        codes = [np.zeros(compression.code_size(n), np.int32) for n in sizes]
        assert sum(array.nbytes for array in codes) == expected


# ---- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["1bit", "2bit"])
@pytest.mark.parametrize("n", [1, 40, 5_003])
@pytest.mark.parametrize(
    ("grad", "residual"),
    [
        (np.nan, 0),
        (np.inf, 0),
        (-np.inf, 0),
        (3e38, 3e38),
        (-3e38, -3e38),
        (1, np.nan),
        (1, np.inf),
        (-np.inf, np.inf),
    ],
)
def test_what_is_not_finite_changes_nothing(path, kind, n, grad, residual):
    compression = Compression(kind, 0.5)
    for where in {0, n // 2, n - 1}:
        g, r = np.ones(n, F32), np.full(n, 0.25, F32)
        g[where], r[where] = grad, residual
        before, codes = r.copy(), codes_for(compression, n)
        assert compression.encode(g, r, codes) is False
        assert bits(r) == bits(before) and (codes == -1).all()


def test_the_largest_number_is_still_finite(path):
    largest = np.finfo(F32).max
    residual, codes = np.zeros(2, F32), np.zeros(1, np.int32)
    assert Compression("2bit", largest).encode(F32([largest, -largest]), residual, codes)
    assert residual.tolist() == [0, 0] and codes.view(np.uint8)[0] == 0b11_10_00_00


def test_arrays_with_gaps_are_coded_as_their_copies():
    for compression in (Compression("2bit", 0.5), Compression("1bit", 0)):
        grad, residual = grads(200, 0.5), np.zeros(200, F32)
        gaps = np.zeros((100, 2), F32)
        codes, wide_codes = codes_for(compression, 100), np.zeros((compression.code_size(100), 3), np.int32)
        assert compression.encode(grad[::2].copy(), residual[:100], codes)
        assert compression.encode(grad[::2], gaps[:, 1], wide_codes[:, 2])
        assert codes.tolist() == wide_codes[:, 2].tolist() and gaps[:, 1].tolist() == residual[:100].tolist()
        out = np.ones((100, 2), F32)
        compression.decode_add(wide_codes[:, 2], out[:, 0])
        expected = np.ones(100, F32)
        compression.decode_add(codes, expected)
        assert out[:, 0].tolist() == expected.tolist() and (out[:, 1] == 1).all() and (gaps[:, 0] == 0).all()


def arrays(**changes):
    codes = np.zeros(3, np.int32)
    return {"grad": np.ones(40, F32), "residual": np.zeros(40, F32), "codes": codes} | changes


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"grad": np.ones(40)}, DTypeError, "grad must be a numpy array of float32, got float64"),
        ({"grad": np.ones(40, ">f4")}, DTypeError, "grad"),
        ({"grad": [1.0] * 40}, DTypeError, "grad .* got list"),
        ({"grad": None}, DTypeError, "grad .* got NoneType"),
        ({"grad": np.ones((4, 10), F32)}, ShapeError, r"grad has shape \(4, 10\), expected \(40,\)"),
        ({"residual": np.zeros(40, np.float16)}, DTypeError, "residual"),
        ({"residual": np.zeros(41, F32)}, ShapeError, r"residual has shape \(41,\), expected \(40,\)"),
        ({"residual": read_only(np.zeros(40, F32))}, OptionError, "residual cannot be written"),
        ({"codes": np.zeros(2, np.int32)}, ShapeError, r"codes has shape \(2,\), expected \(3,\)"),
        ({"codes": np.zeros(4, np.int32)}, ShapeError, "codes"),
        ({"codes": np.zeros(3, np.uint32)}, DTypeError, "codes must be a numpy array of int32"),
        ({"codes": read_only(np.zeros(3, np.int32))}, OptionError, "codes cannot be written"),
    ],
)
def test_encode_refuses_other_arrays_before_anything_changes(path, changes, error, words):
    given = arrays(**changes)
    with pytest.raises(error, match=words):
        Compression("2bit").encode(**given)
    for name in ("residual", "codes"):
        assert not given[name].any()


@pytest.mark.parametrize("method", ["decode", "decode_add"])
def test_decode_refuses_other_arrays(path, method):
    decode = getattr(Compression("1bit"), method)
    codes = np.zeros(2, np.int32)
    for bad_codes, out, error in (
        (codes[:1], np.ones(40, F32), ShapeError),
        (codes, np.ones(65, F32), ShapeError),
        (codes, np.ones((4, 10), F32), ShapeError),
        (codes.astype(np.int64), np.ones(40, F32), DTypeError),
        (codes, np.ones(40), DTypeError),
        (codes, 3, DTypeError),
    ):
        with pytest.raises(error, match=method):
            decode(bad_codes, out)
        assert np.all(out == 1) or error is DTypeError
    with pytest.raises(OptionError, match="out cannot be written"):
        decode(codes, read_only(np.ones(40, F32)))


# ---- options ---------------------------------------------------------------------------------------------------


def test_options_are_those_of_mxnet():
    assert Compression.of({"type": "2bit", "threshold": 0.25}) == Compression("2bit", 0.25)
    assert Compression.of({"type": "1bit"}) == Compression("1bit", 0.5)
    assert Compression.of({"type": "1bit", "threshold": -2}).threshold == -2
    assert Compression("1bit").bits == 1 and Compression("2bit").bits == 2


@pytest.mark.parametrize("threshold", [1, F32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_any_kind_of_number_becomes_a_plain_float(threshold):
    compression = Compression.of({"type": "2bit", "threshold": threshold})
    assert type(compression.threshold) is float
    assert Compression.of(json.loads(json.dumps(asdict(compression)))) == compression


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"type": "4bit"}, "'4bit' is not known; choose one of '1bit', '2bit'"),
        ({"type": None}, "None is not known"),
        ({"type": ["2bit"]}, "is not known"),
        ({"threshold": 0.5}, "expected a dict with type"),
        ({}, "expected a dict with type"),
        ({"type": "2bit", "treshold": 0.5}, "expected a dict with type .* got .*treshold"),
        ("2bit", "expected a dict"),
        (None, "expected a dict"),
        ({"type": "2bit", "threshold": "0.5"}, "threshold = '0.5' must be a number"),
        ({"type": "2bit", "threshold": True}, "threshold = True must be a number"),
        ({"type": "2bit", "threshold": None}, "threshold = None must be a number"),
        ({"type": "2bit", "threshold": 0}, "threshold = 0.0 must be > 0 for 2bit"),
        ({"type": "2bit", "threshold": -0.5}, "must be > 0"),
        ({"type": "2bit", "threshold": 1e-50}, "must be > 0 for 2bit, as a float32 too"),
        ({"type": "2bit", "threshold": float("nan")}, "must be a number"),
        ({"type": "1bit", "threshold": float("inf")}, "must be a number"),
        ({"type": "1bit", "threshold": 1e39}, "must be a number"),
    ],
)
def test_other_options_are_refused(params, words):
    with pytest.raises(OptionError, match=words):
        Compression.of(params)


def test_compiled_code_runs_without_the_interpreter_lock():
    """A Python thread goes on while another encodes: it could not for a whole switch interval of a minute."""
    native, reason = _native.load("_kernels")
    assert native is not None, reason
    n, interval = 1_000_000, sys.getswitchinterval()
    compression = Compression("2bit")
    grad, residual, codes = np.ones(n, F32), np.zeros(n, F32), codes_for(compression, n)
    has_run, has_begun = threading.Event(), threading.Event()

    def other():
        has_begun.wait()
        has_run.set()

    thread = threading.Thread(target=other)
    sys.setswitchinterval(60)
    try:
        thread.start()
        has_begun.set()
        for _ in range(500):
            if has_run.is_set():
                break
            native.quantize(grad, residual, codes, 2, 0.5)
        assert has_run.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
