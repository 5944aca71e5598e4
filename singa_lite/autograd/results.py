# SPDX-License-Identifier: Apache-2.0
"""Checks of what an operator that a script has written returns: raw arrays, one for each input of backward.

What lives here: turning it into row-major arrays, or a typed error. What does not: the engine that asks (engine.py);
operators of this package are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..dtypes import is_float
from ..errors import DTypeError, ShapeError
from ..tensor.checks import DTYPES, as_plain, is_row_major

Array = Any  # a raw array of the device's backend: numpy.ndarray on the CPU, cupy.ndarray on CUDA


def as_array(where: str, result: object, like: Array, backend: Any) -> Array:
    """Return ``result``, a numpy number such as ``x.sum()`` as an array; DTypeError unless it is a raw array."""
    array = backend.asarray(np.asarray(result)) if isinstance(result, np.generic) else result
    if not isinstance(array, type(like)) or array.dtype not in DTYPES:
        came = array.dtype if isinstance(array, type(like)) else type(result).__name__
        raise DTypeError(
            f"{where} must return raw arrays ({type(like).__name__}) of a dtype that a Tensor can have, got {came}"
        )
    return as_plain(where, array)


def check_gradients(
    where: str, results: tuple[Any, ...], like: Array, wanted: Sequence[tuple[Any, Any] | None], context: Any
) -> tuple[Array | None, ...]:
    """Return the gradients of the inputs that need one, None for the others.

    Args:
        results: what backward has returned, as a tuple.
        like: a raw array.
        wanted: per input its shape and dtype; None where no gradient is needed.
        context: of the call; behind a cast by ``autocast`` a gradient may have any float dtype.

    Raises:
        ShapeError: another number of gradients, or another shape. DTypeError: another dtype, or not a raw array.
    """
    if len(results) != len(wanted):
        raise ShapeError(
            f"{where} must return {len(wanted)} gradients, one per input or None, got {len(results)}"
        )
    found: list[Array | None] = []
    for index, (result, expected) in enumerate(zip(results, wanted, strict=True)):
        if result is None or expected is None:
            found.append(None)
            continue
        array = as_array(where, result, like, context.backend)
        shape, dtype = expected
        if array.shape != shape:
            raise ShapeError(
                f"{where}: the gradient of input {index} must have its shape {shape}, got {array.shape}"
            )
        if array.dtype != dtype and not (context.input_dtypes is not None and is_float(array.dtype)):
            raise DTypeError(
                f"{where}: the gradient of input {index} must have its dtype {dtype}, got {array.dtype}"
            )
        found.append(array)
    return tuple(found)


def row_major_copies(context: Any, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``arrays``, copied where kernels would not take them; None stays None."""
    return tuple(array if array is None or is_row_major(array) else _copy(context, array) for array in arrays)


def own_copies(context: Any, arrays: tuple[Any, ...], dys: Sequence[Array]) -> tuple[Any, ...]:
    """Return ``arrays``, copied but for row-major views of ``dys``, which nobody else has; None stays None."""
    shares_memory = context.backend.may_share_memory
    return tuple(
        array
        if array is None or (is_row_major(array) and any(shares_memory(array, dy) for dy in dys))
        else _copy(context, array)
        for array in arrays
    )


def _copy(context: Any, array: Any) -> Any:
    copy = context.empty(array.shape, array.dtype)
    context.run("copy", array, out=copy)
    return copy
