# SPDX-License-Identifier: Apache-2.0
"""Random changes of training images that keep their class; whole batches at once, on stored pixels."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import DTypeError, OptionError, ShapeError, check_int

Array = np.ndarray[Any, Any]


def pad_crop_flip(images: Array, rng: np.random.Generator, *, pad: int = 4) -> Array:
    """Shift each image by up to ``pad`` pixels in both directions, and mirror half of them.

    The image is set into a border of ``pad`` zeros, a part of its own size is cropped at a random position, and
    that is mirrored left to right with probability 1/2: (2 pad + 1)^2 crops, times 2, all equally likely.

    Args:
        images: shape (n, channels, h, w), any dtype; with pixels as stored the border is black.
        rng: gives three numbers for each image; the same state gives the same result.
        pad: pixels, >= 0.

    Returns:
        A new array of the same shape and dtype.

    Raises:
        ShapeError: ``images`` has not four axes.
        DTypeError: ``images`` is not a numpy array.
        OptionError: ``pad`` is negative, or ``rng`` is not a Generator.

    Source: He et al., "Deep Residual Learning for Image Recognition", 2015, section 4.2.

    Example:
        >>> pad_crop_flip(np.ones((2, 3, 32, 32), np.uint8), np.random.default_rng(0)).shape
        (2, 3, 32, 32)
    """
    if not isinstance(images, np.ndarray):
        raise DTypeError(f"pad_crop_flip: images must be a numpy array, not {type(images).__name__}")
    if not isinstance(rng, np.random.Generator):
        raise OptionError(f"pad_crop_flip: rng must be a numpy.random.Generator, not {type(rng).__name__}")
    if images.ndim != 4:
        raise ShapeError(
            f"pad_crop_flip: images must be (n, channels, h, w), but their shape is {images.shape}"
        )
    pad = check_int("pad_crop_flip", "pad", pad, 0)
    count, channels, height, width = images.shape
    top, left = rng.integers(0, 2 * pad + 1, (2, count))
    mirrored = rng.integers(0, 2, count, dtype=bool)
    padded = np.zeros((count, channels, height + 2 * pad, width + 2 * pad), images.dtype)
    padded[:, :, pad : pad + height, pad : pad + width] = images
    crops = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    cropped: Array = crops[np.arange(count), :, top, left]  # a copy; one crop an image
    cropped[mirrored] = cropped[mirrored][..., ::-1]
    return cropped
