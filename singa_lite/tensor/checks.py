# SPDX-License-Identifier: Apache-2.0
"""What shapes, axes, dtypes and values a Tensor takes: pure functions that return the plain form or raise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeGuard

import numpy as np

from ..dtypes import bfloat16, is_float
from ..errors import DTypeError, GraphError, ShapeError, is_number
from ..graph.nodes import NO_VALUE, Scalar

__all__ = [
    "DTYPES",
    "as_axes",
    "as_axis",
    "as_dtype",
    "as_index",
    "as_permutation",
    "as_shape",
    "bfloat16",
    "broadcast_shape",
    "float16",
    "float32",
    "float64",
    "int32",
    "int64",
    "product",
    "resolve_shape",
]

Shape = tuple[int, ...]
float16 = np.dtype("float16")
float32 = np.dtype("float32")
float64 = np.dtype("float64")
int32 = np.dtype("int32")
int64 = np.dtype("int64")
DTYPES = (bfloat16, float16, float32, float64, int32, int64)
MAX_AXES = 32  # of numpy 1
MAX_ELEMENTS = 2**60 - 1  # whose bytes are still an index


# ---- dtypes and values -----------------------------------------------------------------------------------


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return ``dtype`` as a numpy dtype a Tensor can have, else DTypeError."""
    try:
        if dtype is None:  # which numpy takes for float64
            raise TypeError
        wanted = np.dtype(dtype)
    except (TypeError, ValueError, DeprecationWarning) as error:  # the last where warnings are errors
        raise DTypeError(f"{dtype!r} is not a dtype") from error
    if wanted not in DTYPES:
        known = ", ".join(str(known) for known in DTYPES)
        raise DTypeError(f"a Tensor cannot hold {wanted}; choose one of {known}")
    return wanted


def natural_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of ``dtype``'s values in a Tensor: float64 float32, int64 int32, as in SINGA."""
    if dtype in (bfloat16, float16, int32):
        return dtype
    return float32 if dtype.kind == "f" else int32


def as_numbers(where: str, name: str, value: object) -> np.ndarray:
    """Return numbers of the host as an array; ShapeError for lists of unequal length, DTypeError for no numbers."""
    check_unmasked(where, name, value)
    try:
        array = np.asarray(value)
    except ValueError:
        raise ShapeError(f"{where}: {name} must be an array or nested lists of equal lengths") from None
    except TypeError as error:  # an array of another library that does not convert by itself
        raise DTypeError(f"{where}: {name} is a {type(value).__name__}: {error}") from None
    if array.dtype.kind not in "biuf" and array.dtype != bfloat16:
        is_array = isinstance(value, np.ndarray) or array.dtype.kind != "O"
        came = array.dtype if is_array else type(value).__name__
        raise DTypeError(f"{where}: {name} must be a Tensor or numbers, not {came}")
    return array


def check_unmasked(where: str, name: str, value: object) -> None:
    """Raise DTypeError for an array of numpy.ma with masked values, which a Tensor would take for valid ones."""
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray and np.ma.is_masked(value):
        raise DTypeError(f"{where}: {name} has masked values; give them a value, such as by {name}.filled(0)")


def as_plain(where: str, array: Any) -> Any:
    """Return a raw array, as an ndarray if it is of a subclass: operations of numpy.matrix differ.

    Raises:
        DTypeError: it has masked values.
    """
    if isinstance(array, np.ndarray) and type(array) is not np.ndarray:
        check_unmasked(where, "array", array)
        return np.asarray(array)
    return array


def convert(values: np.ndarray, wanted: np.dtype[Any], where: str, rounds: bool = False) -> np.ndarray:
    """Return ``values`` as ``wanted``, row-major; DTypeError where a value would change (``rounds``: may round)."""
    if values.dtype == wanted:
        return np.ascontiguousarray(values).reshape(values.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        converted = np.array(values, dtype=wanted, order="C")
        both_float = is_float(values.dtype) and is_float(wanted)
        changed = (converted.astype(values.dtype) != values) & ~(
            (converted != converted) & (values != values)
        )
        if values.dtype.kind == "u":  # what wraps to a negative number, and back
            changed = changed | (converted < 0)
    if bool(changed.any()) and not (rounds and both_float):
        example = values[changed].flat[0]
        raise DTypeError(
            f"{where}: {wanted} cannot hold {example.item()!r} ({values.dtype}) exactly; "
            f"convert on purpose, an array by astype({str(wanted)!r}), a Tensor by as_type()"
        )
    return converted


def is_number_or_bool(value: object) -> TypeGuard[float]:
    """Return whether an expression takes ``value`` for a number, also a bool, Python's or numpy's."""
    return type(value) in (float, int, bool, np.bool_) or is_number(value)


def convert_number(where: str, value: object, dtype: np.dtype[Any]) -> np.ndarray:
    """Return a number as a scalar array, rounded to a float ``dtype``; DTypeError if an integer one cannot hold it.

    GraphError: it is one that every replay reads again.
    """
    if isinstance(value, Scalar):
        raise GraphError(f"{where}: {NO_VALUE}")
    if not is_number_or_bool(value):
        raise DTypeError(
            f"{where}: expected a Tensor or a number, got {type(value).__name__}; wrap arrays with from_numpy"
        )
    try:
        if is_float(dtype):
            with np.errstate(invalid="ignore", over="ignore"):
                return np.array(float(value)).astype(dtype)  # type: ignore[arg-type]
        values = np.asarray(value)
        if values.dtype.kind == "O":  # an int of more than 64 bits
            raise OverflowError
    except OverflowError:
        raise DTypeError(f"{where}: {value} is too large for {dtype}") from None
    return convert(values, dtype, where)


def is_row_major(array: Any) -> bool:
    """Return whether a raw array is in row-major order and aligned, as kernels want it."""
    return bool(array.flags.c_contiguous and getattr(array.flags, "aligned", True))  # cupy's always are


def as_raw(where: str, array: Any) -> Any:
    """Return a raw array as one that a Tensor can have.

    Raises:
        ShapeError: that would need a copy. DTypeError: it has masked values.
    """
    array = as_plain(where, array)
    if not (is_row_major(array) and getattr(array.flags, "writeable", True)):
        raise ShapeError(
            f"{where}: expected a row-major, aligned and writeable array, got one of shape {array.shape} with strides "
            f"{array.strides} that is not; pass a copy, array.copy()"
        )
    return array


# ---- shapes and axes -------------------------------------------------------------------------------------


def product(shape: Sequence[int]) -> int:
    """Return the product of the sizes; 1 for ()."""
    return math.prod(shape)


def as_index(where: str, name: str, value: object) -> int:
    """Return ``value`` as an int; ShapeError for anything but a whole number."""
    if type(value) is int:
        return value
    if not is_number(value, Integral):
        raise ShapeError(f"{where}: {name} {value!r} is not an int")
    return int(value)  # type: ignore[call-overload, no-any-return]


def listed(value: object) -> tuple[Any, ...]:
    """Return the entries of a sequence, else the value itself as the one entry."""
    if isinstance(value, int):
        return (value,)
    try:
        return tuple(value)  # type: ignore[arg-type]
    except TypeError:  # also of an array without axes, which is iterable by its type alone
        return (value,)


def as_sizes(where: str, shape: object) -> Shape:
    """Return an int or a sequence of ints as a tuple; ShapeError for anything else."""
    given = listed(shape)
    if any(type(size) is not int and not is_number(size, Integral) for size in given):
        raise ShapeError(f"{where}: shape {shape!r} must be made of ints")
    return tuple(int(size) for size in given)


def as_shape(where: str, shape: object) -> Shape:
    """Return the sizes of ``shape`` as ``as_sizes`` does; ShapeError unless an array can have it."""
    sizes = as_sizes(where, shape)
    if any(size < 0 for size in sizes):
        raise ShapeError(f"{where}: shape {sizes} has a negative size")
    if len(sizes) > MAX_AXES or max(product(sizes), *sizes, 0) > MAX_ELEMENTS:
        raise ShapeError(f"{where}: shape {sizes} has more axes or elements than an array can have")
    return sizes


def resolve_shape(given: Shape, wanted: object) -> Shape:
    """Return ``wanted`` with its -1 worked out; ShapeError if it does not hold as many elements as ``given``."""
    sizes = as_sizes("reshape", wanted)
    known = product([size for size in sizes if size != -1])
    unknown = sizes.count(-1)
    fits = product(given) == known if unknown == 0 else known > 0 and product(given) % known == 0
    if unknown > 1 or min(sizes, default=0) < -1 or not fits:
        raise ShapeError(f"reshape: {given} does not fit into {sizes} (at most one -1)")
    return tuple(product(given) // known if size == -1 else size for size in sizes)


def as_axis(where: str, axis: object, ndim: int) -> int:
    """Return ``axis`` counted from the front; ShapeError if there is none such."""
    number = as_index(where, "axis", axis)
    if not -ndim <= number < ndim:
        raise ShapeError(f"{where}: axis {axis} is out of range for {ndim} axes")
    return number % ndim


def as_axes(where: str, axes: int | Sequence[int] | None, ndim: int) -> Shape:
    """Distinct axes counted from the front, ascending; None is all."""
    if axes is None:
        return tuple(range(ndim))
    given = listed(axes)
    found = sorted(as_axis(where, axis, ndim) for axis in given)
    if len(set(found)) != len(found):
        raise ShapeError(f"{where}: axes {given} name one axis twice")
    return tuple(found)


def as_permutation(axes: Sequence[int] | None, ndim: int) -> Shape:
    """Return a permutation of all axes counted from the front; None reverses them. ShapeError if it is not one."""
    if axes is None:
        return tuple(reversed(range(ndim)))
    given = listed(axes)
    if len(as_axes("transpose", given, ndim)) != ndim:
        raise ShapeError(f"transpose: {axes} is not a permutation of {ndim} axes")
    return tuple(axis % ndim for axis in given)


def as_slice(key: object, size: int) -> slice:
    """Return a key of ``t[...]`` as a slice: an int keeps its axis, with length 1; ShapeError if it does not fit."""
    if isinstance(key, slice):
        try:
            bounds = key.indices(size)
            return slice(*bounds) if bounds[2] > 0 else key  # downwards, "before the first" cannot be an int
        except (TypeError, ValueError) as error:
            raise ShapeError(f"t[...]: {key} is not a slice of ints with a step: {error}") from None
    number = as_index("t[...]", "key", key)
    if not -size <= number < size:
        raise ShapeError(f"t[...]: index {number} is out of range for a size of {size}")
    return slice(number % size, number % size + 1)


def broadcast_shape(where: str, a: Shape, b: Shape) -> Shape:
    """Return the shape to which ``a`` and ``b`` broadcast; ShapeError if they don't."""
    if a == b or not b:  # numpy takes 3 us
        return a
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        raise ShapeError(f"{where}: shapes {a} and {b} do not broadcast") from None
