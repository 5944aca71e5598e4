# SPDX-License-Identifier: Apache-2.0
"""Cutting batches into slices and limiting the norm of all gradients: what loops use of MXNet's gluon.utils."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from ..device import Device, get_default_device
from ..dtypes import is_narrow
from ..errors import DeviceError, DTypeError, OptionError, ShapeError, check_bool, check_int, check_number
from ..tensor import Tensor, to_numpy
from ..tensor.checks import as_axis, as_numbers
from ..users_line import warn

Array = np.ndarray[Any, Any]
Data = TypeVar("Data", Tensor, Array)

__all__ = ["clip_global_norm", "split_and_load", "split_data"]


def split_data(data: Data, num_slice: int, batch_axis: int = 0, even_split: bool = True) -> list[Data]:
    """Return ``data`` in ``num_slice`` consecutive slices.

    Args:
        data: a Tensor or numpy array of any dtype, shape (..., n, ...).
        num_slice: >= 1, <= n.
        batch_axis: the axis that is cut, of size n; a negative one counts from the end.
        even_split: True insists on slices of one size; with False the first ``n % num_slice`` have one element more.

    Returns:
        Slices of the same kind: of a Tensor copies, recorded for the gradient of ``data``; of a numpy array views.

    Raises:
        ShapeError: n is not divisible by ``num_slice`` and ``even_split`` is True; or n < num_slice; or no such axis.
        OptionError: ``num_slice`` is not an int >= 1.
        DTypeError: ``data`` is neither a Tensor nor a numpy array.

    Example:
        >>> [part.tolist() for part in split_data(np.arange(10), 3, even_split=False)]
        [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    """
    if not isinstance(data, (Tensor, np.ndarray)):
        raise DTypeError(f"split_data: expected a Tensor or a numpy array, got {type(data).__name__}")
    num_slice = check_int("split_data", "num_slice", num_slice, 1)
    axis = as_axis("split_data", batch_axis, len(data.shape))
    check_bool("split_data", "even_split", even_split)
    each, extra = divmod(data.shape[axis], num_slice)
    if each == 0 or (even_split and extra):
        cure = "use fewer slices" if each == 0 else "use another batch size, or even_split=False"
        raise ShapeError(
            f"split_data: axis {axis} of shape {tuple(data.shape)} cannot be cut into {num_slice} "
            f"{'equal ' if even_split else ''}slices; {cure}"
        )
    starts = [part * each + min(part, extra) for part in range(num_slice + 1)]
    before: tuple[slice, ...] = (slice(None),) * axis
    keys = [(*before, slice(start, end)) for start, end in pairwise(starts)]
    return [data[key] for key in keys]


def split_and_load(
    data: Any,  # Any: a Tensor, or what numpy.asarray() takes
    devices: Sequence[Device | None],
    batch_axis: int = 0,
    even_split: bool = True,
) -> list[Tensor]:
    """Return a batch in as many slices as there are ``devices``, each a new leaf Tensor on its device.

    A process of MXNet drives several GPUs, here a rank drives one device; that may be given several times. With losses
    that are means, ``loss.backward(len(part))`` of every slice adds up to the sum over the batch in ``Tensor.grad``.

    Args:
        data: a Tensor, or values for ``numpy.asarray``, shape (..., n, ...); float64 becomes float32, int64 int32.
        devices: the same Device, or None for the CPU, once for every slice.
        batch_axis: as of ``split_data``.
        even_split: as of ``split_data``.

    Raises:
        DeviceError: two different devices, or one is not a Device.
        OptionError: ``devices`` is not a list or is empty.
        ShapeError: as of ``split_data``.
        DTypeError: values that are not numbers.
    """
    device = _single_device(devices)
    # Tensor.copy: a leaf, nothing is copied
    values = data.copy() if isinstance(data, Tensor) else as_numbers("split_and_load", "data", data)
    slices: list[Any] = split_data(values, len(devices), batch_axis, even_split)
    return [_load(part, device) for part in slices]


def clip_global_norm(arrays: Iterable[Tensor | Array], max_norm: float, check_isfinite: bool = True) -> float:
    """Scale ``arrays`` in place so that the norm of all their elements together is at most ``max_norm``.

    arrays *= min(1, max_norm / (norm + 1e-8)) with norm = sqrt(sum of all squares), summed in float64.

    Args:
        arrays: floating-point Tensors and numpy arrays of any shapes, such as the gradients of a model; one that is
            given twice counts once.
        max_norm: >= 0.
        check_isfinite: True warns of a norm that is infinite or NaN.

    Returns:
        The norm before. If it is infinite or NaN, nothing has changed (MXNet makes NaNs of all arrays).

    Raises:
        DTypeError: ``arrays`` is not a list of such arrays.
        OptionError: ``max_norm`` is not a number >= 0, or a numpy array cannot be written. Nothing has changed.
        GraphError: a Tensor was made by a recorded operator. Nothing has changed.

    Example:
        >>> gradients = [np.float32([3]), np.float32([4])]
        >>> round(clip_global_norm(gradients, 1), 6), [round(float(g[0]), 6) for g in gradients]
        (5.0, [0.6, 0.8])
    """
    max_norm = check_number("clip_global_norm", "max_norm", max_norm, 0.0)
    check_bool("clip_global_norm", "check_isfinite", check_isfinite)
    if isinstance(arrays, (Tensor, np.ndarray)) or not isinstance(arrays, Iterable):
        raise DTypeError(f"clip_global_norm: expected a list of arrays, got {type(arrays).__name__}")
    distinct = {id(array): array for array in arrays}.values()
    for array in distinct:
        _check_changeable(array)
    norm = math.sqrt(sum(_square_sum(array) for array in distinct))
    if not math.isfinite(norm):
        if check_isfinite:
            warn(f"clip_global_norm: the norm is {norm}; nothing is scaled")
        return norm
    scale = max_norm / (norm + 1e-8)
    if scale < 1:
        for array in distinct:
            _scale(array, scale)
    return norm


def _single_device(devices: Sequence[Device | None]) -> Device:
    if not isinstance(devices, (list, tuple)) or not devices:
        raise OptionError(f"split_and_load: devices must be a list of one Device or more, got {devices!r}")
    found = [get_default_device() if device is None else device for device in devices]
    for device in found:
        if not isinstance(device, Device):
            raise DeviceError(
                f"split_and_load: {device!r} is not a Device; make one with device.create_device()"
            )
        if device is not found[0]:
            raise DeviceError(
                f"split_and_load: {found[0]} and {device} are two devices, and a process trains on one; start one "
                "rank per GPU (singa-lite run -n 2) and give each its own part of the data"
            )
    return found[0]


def _load(part: Tensor | Array, device: Device) -> Tensor:
    if not isinstance(part, Tensor):
        return Tensor(data=part, device=device)
    leaf = part.copy()
    leaf.to_device(device)
    return leaf


def _check_changeable(array: object) -> None:
    """Raise unless ``array`` holds floating-point numbers that may be changed in place."""
    if not isinstance(array, (Tensor, np.ndarray)) or array.dtype.kind != "f":
        kind = getattr(array, "dtype", type(array).__name__)
        raise DTypeError(f"clip_global_norm: expected floating-point Tensors or numpy arrays, got {kind}")
    if isinstance(array, Tensor):
        array.begin_change("clip_global_norm")
    elif not array.flags.writeable:
        raise OptionError(f"clip_global_norm: an array of shape {array.shape} cannot be written; pass a copy")


def _scale(array: Tensor | Array, scale: float) -> None:
    """Multiply in place; numpy would round the factor to 16 bits for an array of these, and may make it zero."""
    if isinstance(array, np.ndarray) and is_narrow(array.dtype):
        array[...] = array.astype(np.float32) * np.float32(scale)
    else:
        array *= scale


def _square_sum(array: Tensor | Array) -> float:
    values = to_numpy(array) if isinstance(array, Tensor) else array
    with np.errstate(over="ignore"):
        return float(np.square(values, dtype=np.float64).sum())
