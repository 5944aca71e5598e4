# SPDX-License-Identifier: Apache-2.0
"""Random shifts and mirror images: every result is one of those the definition allows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from singa_lite.data import pad_crop_flip
from singa_lite.errors import OptionError, ShapeError


def candidates(image, pad):
    """(top, left, mirrored) -> the image cut out there, written as loops."""
    channels, height, width = image.shape
    padded = np.zeros((channels, height + 2 * pad, width + 2 * pad), image.dtype)
    padded[:, pad : pad + height, pad : pad + width] = image
    found = {}
    for top in range(2 * pad + 1):
        for left in range(2 * pad + 1):
            window = padded[:, top : top + height, left : left + width]
            found[top, left, False] = window
            found[top, left, True] = window[:, :, ::-1]
    return found


def test_every_result_is_one_of_the_162_candidates_and_all_shifts_and_both_sides_occur():
    rng = np.random.default_rng(0)
    image = rng.integers(1, 256, (3, 32, 32), dtype=np.uint8)  # no zeros: all candidates differ
    known = {window.tobytes(): position for position, window in candidates(image, 4).items()}
    assert len(known) == 162
    results = pad_crop_flip(np.broadcast_to(image, (2000, 3, 32, 32)), rng)
    positions = [known[result.tobytes()] for result in results]
    assert len(set(positions)) == 162
    top, left, mirrored = np.array(positions).T
    assert abs(mirrored.mean() - 0.5) < 0.05
    for shift in (top, left):
        assert (np.bincount(shift, minlength=9) > 150).all()  # 222 expected each, deviation 14
    assert abs(np.corrcoef(top, left)[0, 1]) < 0.1 and abs(np.corrcoef(top, mirrored)[0, 1]) < 0.1


@given(
    count=st.integers(0, 5), channels=st.integers(1, 3), height=st.integers(1, 6), width=st.integers(1, 6),
    pad=st.integers(0, 3), seed=st.integers(0, 9),
)  # fmt: skip
def test_each_image_is_a_candidate_of_its_own_for_all_sizes(count, channels, height, width, pad, seed):
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(count, channels, height, width)).astype(np.float32)
    results = pad_crop_flip(images, rng, pad=pad)
    assert results.shape == images.shape and results.dtype == images.dtype
    for image, result in zip(images, results, strict=True):
        assert any(np.array_equal(result, window) for window in candidates(image, pad).values())


def test_the_same_state_gives_the_same_result_and_leaves_the_input_alone():
    images = np.random.default_rng(1).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
    before = images.copy()
    first, again, other = (pad_crop_flip(images, np.random.default_rng(seed)) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    first[:] = 0
    np.testing.assert_array_equal(images, before)


def test_bad_input_is_refused():
    with pytest.raises(ShapeError, match=r"\(3, 32, 32\)"):
        pad_crop_flip(np.zeros((3, 32, 32)), np.random.default_rng(0))
    with pytest.raises(OptionError, match="pad = -1"):
        pad_crop_flip(np.zeros((1, 3, 4, 4)), np.random.default_rng(0), pad=-1)
