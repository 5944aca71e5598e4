# SPDX-License-Identifier: Apache-2.0
"""From stored uint8 images to what a model takes: float32 batches (n, 1, h, w) and int32 class ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import DTypeError, OptionError, ShapeError

Array = np.ndarray[Any, Any]


def make_batch(
    images: Array, labels: Array, indices: Array | slice, *, mean: float = 0.0, std: float = 1.0
) -> tuple[Array, Array]:
    """Take some samples and scale them: x = (pixel / 255 - mean) / std.

    Args:
        images: uint8, shape (count, h, w) or (count, channels, h, w).
        labels: integer, shape (count,).
        indices: integer, shape (n,), or a slice of the samples.
        mean: subtracted after the division by 255; 0.1307 centres MNIST.
        std: divisor, > 0; 0.3081 gives MNIST unit variance.

    Returns:
        (x, y): float32 (n, channels, h, w) and int32 (n,), new arrays.

    Raises:
        DTypeError: ``images`` is not uint8.
        OptionError: ``std`` is not positive.
        ShapeError: wrong number of axes, or not one label per image.

    Example:
        >>> x, y = make_batch(np.zeros((5, 28, 28), np.uint8), np.arange(5), np.array([3, 1]))
        >>> x.shape, y.tolist()
        ((2, 1, 28, 28), [3, 1])
    """
    if images.dtype != np.uint8:
        raise DTypeError(f"make_batch: images are {images.dtype}, expected uint8 pixels")
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1]:
        raise ShapeError(
            f"make_batch: images {images.shape} and labels {labels.shape} do not belong together"
        )
    if not std > 0:
        raise OptionError(f"make_batch: std = {std} must be > 0")
    x = images[indices].astype(np.float32)
    x *= np.float32(1 / (255 * std))
    x -= np.float32(mean / std)
    return (x[:, None] if x.ndim == 3 else x), labels[indices].astype(np.int32)
