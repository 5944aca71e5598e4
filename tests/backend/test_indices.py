# SPDX-License-Identifier: Apache-2.0
"""Indices as words: what goes in comes out, on every device, in the size of the formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from singa_lite import _native
from singa_lite.backend.cpu import NumpyBackend
from singa_lite.sync.indices import IndexCode

REFERENCE = NumpyBackend()
KERNELS, REASON = _native.load("_kernels")


def chosen(n: int, k: int, seed: int, clustered: bool = False) -> np.ndarray:
    """k ascending indices below n; clustered ones are all at the end."""
    if clustered:
        return np.arange(n - k, n)
    return np.sort(np.random.default_rng(seed).choice(n, k, replace=False))


def by_hand(indices: np.ndarray, low_bits: int) -> str:
    """The words as bits, first to last: the lowest bits of each index, lowest first, then a bit for each."""
    low = "".join(format(i, "b").zfill(64)[::-1][:low_bits] for i in indices.tolist())
    low += "0" * (-len(low) % 32)
    high = ["0"] * (int(indices[-1] >> low_bits) + len(indices))
    for j, i in enumerate(indices.tolist()):
        high[(i >> low_bits) + j] = "1"
    return low + "".join(high)


def as_text(words: np.ndarray) -> str:
    return "".join(format(word & 0xFFFFFFFF, "032b")[::-1] for word in words.tolist())


@pytest.mark.parametrize("index", ["i4", "i8"])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (7, 7), (7, 1), (100, 1), (1000, 10), (431_080, 432), (431_080, 4311)]
)
def test_words_are_those_of_the_definition_and_come_back(n: int, k: int, index: str) -> None:
    code = IndexCode(n, k)
    for clustered in (False, True):
        indices = chosen(n, k, n, clustered).astype(index)
        words, back = np.full(code.num_words, -1, np.int32), np.full(k, -1, index)
        REFERENCE.run("pack_indices", indices, out=words, low_bits=code.low_bits)
        expected = by_hand(indices, code.low_bits)
        assert as_text(words) == expected.ljust(32 * code.num_words, "0")
        REFERENCE.run("unpack_indices", words, out=back, low_bits=code.low_bits)
        np.testing.assert_array_equal(back, indices)


@given(
    st.integers(1, 5000), st.floats(0, 1), st.integers(0, 99), st.sampled_from(["i4", "i8"]), st.booleans()
)
def test_compiled_words_are_numpys(n: int, share: float, seed: int, index: str, has_equals: bool) -> None:
    if KERNELS is None:
        pytest.skip(REASON)
    k = max(1, round(share * n))
    indices, code = chosen(n, k, seed).astype(index), IndexCode(n, k)
    if has_equals:
        indices = np.minimum(indices, indices[k // 2])
    words = [np.full(code.num_words, -1, np.int32) for _ in range(2)]
    assert KERNELS.pack_indices(indices, out=words[0], low_bits=code.low_bits)
    REFERENCE.run("pack_indices", indices, out=words[1], low_bits=code.low_bits)
    np.testing.assert_array_equal(*words)
    back = np.full(k, -1, index)
    assert KERNELS.unpack_indices(words[0], out=back, low_bits=code.low_bits)
    np.testing.assert_array_equal(back, indices)


@pytest.mark.parametrize("indices", [[3, 2], [-1, 2], [0, 200]])
def test_what_does_not_fit_is_left_to_numpy_and_writes_nothing(indices: list[int]) -> None:
    if KERNELS is None:
        pytest.skip(REASON)
    code = IndexCode(10, 2)
    words = np.full(code.num_words, -1, np.int32)
    assert not KERNELS.pack_indices(np.array(indices), out=words, low_bits=code.low_bits)
    assert (words == -1).all()


@pytest.mark.parametrize("fill", [0, -1, 0x5A5A5A5A])
def test_any_words_give_indices(fill: int) -> None:
    """Of a collective that was aborted."""
    code = IndexCode(1000, 40)
    words, back = np.full(code.num_words, fill, np.int32), np.full(40, -1, np.int64)
    REFERENCE.run("unpack_indices", words, out=back, low_bits=code.low_bits)
    compiled = np.full(40, -1, np.int64)
    if KERNELS is not None:
        assert KERNELS.unpack_indices(words, out=compiled, low_bits=code.low_bits)
        np.testing.assert_array_equal(compiled, back)


@pytest.mark.parametrize(
    ("n", "k"), [(431_080, 432), (431_080, 4311), (25_000_000, 25_000), (7, 7), (2**33, 1), (9, 0)]
)
def test_the_size_is_that_of_the_formula(n: int, k: int) -> None:
    code: Any = IndexCode(n, k)
    low_bits = min(31, max(0, math.floor(math.log2(n / k)))) if k else 0
    assert code.low_bits == low_bits
    expected = math.ceil(k * low_bits / 32) + math.ceil((k + ((n - 1) >> low_bits) + 1) / 32) if k else 0
    assert code.num_words == expected


def test_the_cnn_of_mnist_at_a_percent_and_a_thousandth() -> None:
    assert 4 * (4311 + IndexCode(431_080, 4311).num_words) == 21_864
    assert 4 * (432 + IndexCode(431_080, 432).num_words) == 2_376
