# SPDX-License-Identifier: Apache-2.0
"""From stored uint8 images to what a model takes: float32 batches (n, channels, h, w) and int32 class ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import DTypeError, OptionError, ShapeError

Array = np.ndarray[Any, Any]


def make_batch(
    images: Array,
    labels: Array,
    indices: Array | slice,
    *,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
) -> tuple[Array, Array]:
    """Take some samples and scale them: x = (pixel / 255 - mean) / std.

    Args:
        images: uint8, shape (count, h, w) or (count, channels, h, w).
        labels: integer, shape (count,).
        indices: integer, shape (n,), or a slice of the samples.
        mean: subtracted after the division by 255, one number or one per channel; 0.1307 centres MNIST.
        std: divisor, > 0, one number or one per channel; 0.3081 gives MNIST unit variance.

    Returns:
        (x, y): float32 (n, channels, h, w) and int32 (n,), new arrays.

    Raises:
        DTypeError: ``images`` is not uint8.
        OptionError: ``std`` is not positive.
        ShapeError: wrong number of axes, not one label per image, or not one mean or std per channel.

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
    channels = 1 if images.ndim == 3 else images.shape[1]
    shift, divisor = (np.asarray(value, np.float64).reshape(-1) for value in (mean, std))
    if {shift.size, divisor.size} - {1, channels}:
        raise ShapeError(
            f"make_batch: mean = {mean} and std = {std} must be numbers or {channels} numbers each"
        )
    if not (divisor > 0).all():
        raise OptionError(f"make_batch: std = {std} must be > 0")
    x = images[indices].astype(np.float32)
    x = x[:, None] if x.ndim == 3 else x
    x *= (1 / (255 * divisor)).astype(np.float32).reshape(-1, 1, 1)
    x -= (shift / divisor).astype(np.float32).reshape(-1, 1, 1)
    return x, labels[indices].astype(np.int32)
