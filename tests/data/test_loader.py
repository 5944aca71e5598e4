# SPDX-License-Identifier: Apache-2.0
"""Scaling of uint8 images to float32 batches."""

import numpy as np
import pytest

from singa_lite.data import make_batch
from singa_lite.errors import DTypeError, OptionError, ShapeError

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 4, 5), dtype=np.uint8)
LABELS = np.arange(6, dtype=np.uint8)


def test_pixels_are_scaled_as_the_formula_says():
    x, y = make_batch(IMAGES, LABELS, np.array([5, 0, 2]), mean=0.1307, std=0.3081)
    expected = (IMAGES[[5, 0, 2]][:, None].astype(np.float64) / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)
    assert (x.dtype, x.shape, y.dtype, y.tolist()) == (np.float32, (3, 1, 4, 5), np.int32, [5, 0, 2])


def test_each_channel_has_a_mean_and_std_of_its_own():
    images = np.random.default_rng(1).integers(0, 256, (4, 3, 2, 5), dtype=np.uint8)
    mean, std = (0.5, 0.25, 0.0), (0.25, 0.5, 2.0)
    x, _ = make_batch(images, LABELS[:4], slice(None), mean=mean, std=std)
    for channel in range(3):
        expected = (images[:, channel].astype(np.float64) / 255 - mean[channel]) / std[channel]
        np.testing.assert_allclose(x[:, channel], expected, rtol=1e-5, atol=1e-6)
    assert (x.dtype, x.shape) == (np.float32, images.shape)


def test_a_slice_takes_consecutive_samples_and_leaves_the_data_alone():
    before = IMAGES.copy()
    x, y = make_batch(IMAGES[:, None], LABELS, slice(1, 3))
    x += 1
    np.testing.assert_allclose(x[:, 0] - 1, IMAGES[1:3] / 255, atol=1e-6)
    np.testing.assert_array_equal(IMAGES, before)
    assert y.tolist() == [1, 2]


def test_bad_input_is_refused():
    with pytest.raises(DTypeError, match="float32"):
        make_batch(IMAGES.astype(np.float32), LABELS, slice(0, 2))
    with pytest.raises(ShapeError, match="belong"):
        make_batch(IMAGES, LABELS[:5], slice(0, 2))
    with pytest.raises(ShapeError, match="belong"):
        make_batch(IMAGES[0], LABELS[:4], slice(0, 2))
    with pytest.raises(OptionError, match="std"):
        make_batch(IMAGES, LABELS, slice(0, 2), std=0)
    with pytest.raises(OptionError, match="beyond float32"):
        make_batch(IMAGES, LABELS, slice(0, 2), std=1e-39)
    with pytest.raises(OptionError, match="std"):
        make_batch(IMAGES[:, None].repeat(2, 1), LABELS, slice(0, 2), std=(1.0, -1.0))
    with pytest.raises(ShapeError, match="2 numbers each"):
        make_batch(IMAGES[:, None].repeat(2, 1), LABELS, slice(0, 2), mean=(0.1, 0.2, 0.3))


@pytest.mark.parametrize("indices", [slice(0, 4, 0), slice(0.0, 2.0)])
def test_a_slice_that_is_none_of_samples_is_refused(indices: slice) -> None:
    with pytest.raises(DTypeError, match="no slice of samples"):
        make_batch(IMAGES, LABELS, indices)


def test_masked_values_are_refused_and_subclasses_of_ndarray_are_left_out() -> None:
    indices = np.array([0, 1])
    mask = np.ma.masked_equal
    for name, arguments in {
        "images": (mask(IMAGES, IMAGES.flat[0]), LABELS, indices),
        "labels": (IMAGES, mask(LABELS, LABELS[0]), indices),
        "indices": (IMAGES, LABELS, mask(indices, 1)),
    }.items():
        with pytest.raises(DTypeError, match=f"{name} has masked values"):
            make_batch(*arguments)
    x, y = make_batch(np.ma.array(IMAGES), np.ma.array(LABELS), indices)
    assert type(x) is type(y) is np.ndarray


def test_an_index_beyond_int64_is_refused() -> None:
    with pytest.raises(ShapeError, match="18446744073709551615 is too large"):
        make_batch(IMAGES, LABELS, np.array([0, 2**64 - 1], np.uint64))


@pytest.mark.parametrize("label", [2**31, -(2**31) - 1, 2**40])
def test_labels_that_int32_cannot_hold_are_refused(label: int) -> None:
    images = np.zeros((2, 4, 4), np.uint8)
    with pytest.raises(DTypeError, match=r"labels from .* to .* do not fit into int32"):
        make_batch(images, np.array([3, label]), slice(None))
    assert make_batch(images, np.array([3, label]), slice(1))[1].tolist() == [3]
    assert make_batch(images, np.array([3, 2**31 - 1], np.uint64), slice(None))[1].tolist() == [3, 2**31 - 1]
