# SPDX-License-Identifier: Apache-2.0
"""From stored uint8 images to what a model takes: float32 batches (n, channels, h, w) and int32 class ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import DTypeError, OptionError, ShapeError

Array = np.ndarray[Any, Any]
INT32, INT64 = np.iinfo(np.int32), np.iinfo(np.int64)


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
        indices: integer, shape (n,), or a slice of the samples; negative ones count from the end, as NumPy's.
        mean: subtracted after the division by 255, one number or one per channel; 0.1307 centres MNIST.
        std: divisor, > 0, one number or one per channel; 0.3081 gives MNIST unit variance.

    Returns:
        (x, y): float32 (n, channels, h, w) and int32 (n,), new arrays.

    Raises:
        DTypeError: ``images`` is not uint8, ``labels`` or ``indices`` are not integers, a label is beyond int32,
            or values are masked.
        OptionError: ``std`` is not positive, or so small or ``mean`` so large that float32 cannot hold the result.
        ShapeError: wrong number of axes, not one label per image, not one mean or std per channel, or an index out of
            range.

    Example:
        >>> x, y = make_batch(np.zeros((5, 28, 28), np.uint8), np.arange(5), np.array([3, 1]))
        >>> x.shape, y.tolist()
        ((2, 1, 28, 28), [3, 1])
    """
    _check_samples(images, labels)
    images, labels = np.asarray(images), np.asarray(labels)  # of a subclass
    scale, offset = _scaling(mean, std, 1 if images.ndim == 3 else images.shape[1])
    chosen = _checked(indices)
    try:
        x, y = images[chosen].astype(np.float32), labels[chosen]
    except (IndexError, TypeError) as error:
        raise ShapeError(f"make_batch: indices do not fit {len(images)} images: {error}") from None
    if y.size and not (INT32.min <= int(y.min()) and int(y.max()) <= INT32.max):
        raise DTypeError(f"make_batch: labels from {y.min()} to {y.max()} do not fit into int32")
    x = x[:, None] if x.ndim == 3 else x
    x *= scale
    x -= offset
    return x, y.astype(np.int32)


def _check_samples(images: Array, labels: Array) -> None:
    for name, array in (("images", images), ("labels", labels)):
        if not isinstance(array, np.ndarray):
            raise DTypeError(f"make_batch: {name} must be a numpy array, not {type(array).__name__}")
        _check_unmasked(name, array)
    if images.dtype != np.uint8:
        raise DTypeError(f"make_batch: images are {images.dtype}, expected uint8 pixels")
    if labels.dtype.kind not in "iu":
        raise DTypeError(f"make_batch: labels are {labels.dtype}, expected integers")
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1]:
        raise ShapeError(
            f"make_batch: images {images.shape} and labels {labels.shape} do not belong together"
        )


def _check_unmasked(name: str, array: object) -> None:
    if np.ma.is_masked(array):
        raise DTypeError(f"make_batch: {name} has masked values; give them a value, such as by filled(0)")


def _scaling(mean: object, std: object, channels: int) -> tuple[Array, Array]:
    """Return what to multiply pixels with and then to subtract, each float32, shape (1 or channels, 1, 1)."""
    shift, divisor = (
        _numbers(name, value).astype(np.float64).reshape(-1) for name, value in (("mean", mean), ("std", std))
    )
    if {shift.size, divisor.size} - {1, channels}:
        raise ShapeError(
            f"make_batch: mean = {mean} and std = {std} must be numbers or {channels} numbers each"
        )
    if not (divisor > 0).all():
        raise OptionError(f"make_batch: std = {std} must be > 0")
    with np.errstate(all="ignore"):
        parts = 1 / (255 * divisor), shift / divisor
        scale, offset = (part.astype(np.float32).reshape(-1, 1, 1) for part in parts)
        white = 255 * scale - offset
    if not (np.isfinite(white).all() and np.isfinite(offset).all()):
        raise OptionError(f"make_batch: mean = {mean} and std = {std} give numbers beyond float32")
    return scale, offset


def _numbers(name: str, value: object) -> Array:
    _check_unmasked(name, value)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"make_batch: {name} must be numbers: {error}") from None
    if array.dtype.kind not in "biuf":
        raise DTypeError(f"make_batch: {name} must be numbers, not {array.dtype}")
    return array


def _checked(indices: Array | slice) -> Array | slice:
    """Return the indices of a batch: a slice, or integers of one axis."""
    if isinstance(indices, slice):
        try:
            indices.indices(0)
        except (TypeError, ValueError) as error:  # a bound that is no integer, or a step of 0
            raise DTypeError(f"make_batch: indices = {indices} is no slice of samples: {error}") from None
        return indices
    found = _numbers("indices", indices)
    if found.ndim != 1:
        raise ShapeError(f"make_batch: indices must have one axis, but their shape is {found.shape}")
    if found.size and found.dtype.kind not in "iu":
        raise DTypeError(f"make_batch: indices must be integers, not {found.dtype}")
    if found.size and found.max() > INT64.max:  # of uint64
        raise ShapeError(f"make_batch: index {found.max()} is too large")
    return found.astype(np.int64, copy=False)
