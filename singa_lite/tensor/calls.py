# SPDX-License-Identifier: Apache-2.0
"""How functions on Tensors call kernels: their inputs checked, the result a new leaf or written to a tensor given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dtypes import is_float, is_narrow
from ..errors import DTypeError, ShapeError
from .checks import as_axes, broadcast_shape
from .core import Number, Tensor, check_alike, check_tensor, float32, number_array
from .tracked import warn_if_recorded


def check_floats(where: str, t: Tensor) -> None:
    check_tensor(where, t)
    if not is_float(t.dtype):
        raise DTypeError(f"{where}: needs a float tensor, not {t.dtype}; convert with as_type(float32)")


def check_matrix(where: str, t: Tensor) -> None:
    check_tensor(where, t)
    if t.ndim() != 2:
        raise ShapeError(f"{where}: needs a matrix, but the shape is {t.shape}")


def check_pair(where: str, a: Tensor, b: Tensor) -> None:
    """Raise unless both are Tensors of one dtype and device."""
    check_tensor(where, a)
    check_tensor(where, b)
    check_alike(where, a, b)


def check_target(where: str, like: Tensor, shape: Sequence[int], ret: Tensor) -> None:
    """Raise unless ``ret`` can take a result of this shape and the dtype and device of ``like``."""
    check_pair(where, like, ret)
    if ret.shape != tuple(shape):
        raise ShapeError(f"{where}: the result has shape {tuple(shape)}, the tensor to write {ret.shape}")


def run(
    kernel: str,
    like: Tensor,
    *inputs: Any,  # Any: raw arrays, and kernel attributes
    shape: Sequence[int],
    ret: Tensor | None = None,
    **attributes: Any,
) -> Tensor:
    """Run one kernel into a new array of ``like``'s dtype, copied to ``ret`` in the end if there is one."""
    if ret is not None:
        check_target(kernel, like, shape, ret)
    array = like.device.backend.empty(tuple(shape), like.dtype)
    like.device.backend.run(kernel, *inputs, out=array, **attributes)
    result = Tensor.wrap(array, like.device)
    if ret is None:
        return result
    ret.begin_change(kernel)
    ret.copy_data(result)  # ret may be one of the inputs, which a kernel must not write
    return ret


def elementwise(kernel: str, t: Tensor, floats: bool = False) -> Tensor:
    (check_floats if floats else check_tensor)(kernel, t)
    if kernel not in ("ceil", "sign"):  # their gradient is 0
        warn_if_recorded(kernel, t)
    return run(kernel, t, t.array, shape=t.shape)


def binary(kernel: str, lhs: Tensor | Number, rhs: Tensor | Number, ret: Tensor | None) -> Tensor:
    like = lhs if isinstance(lhs, Tensor) else rhs
    check_tensor(kernel, like)
    assert isinstance(like, Tensor)
    warn_if_recorded("eltwise_mult" if kernel == "mul" else kernel, lhs, rhs)
    if kernel in ("div", "pow"):
        check_floats(kernel, like)
    if isinstance(lhs, Tensor) and isinstance(rhs, Tensor):
        check_pair(kernel, lhs, rhs)
    elif is_narrow(like.dtype):  # a number stays whole beside 16 bits: in float32, and the result is rounded
        shape = broadcast_shape(kernel, like.shape, ())
        if ret is not None:
            check_target(kernel, like, shape, ret)
            ret.begin_change(kernel)
        wide = like.copy().as_type(float32)  # a leaf
        result = binary(kernel, wide, rhs, None) if like is lhs else binary(kernel, lhs, wide, None)
        return run("cast", like, result.array, shape=shape, ret=ret)
    a, b = (x.array if isinstance(x, Tensor) else number_array(kernel, x, like) for x in (lhs, rhs))
    return run(kernel, like, a, b, shape=broadcast_shape(kernel, a.shape, b.shape), ret=ret)


def reduce(kernel: str, t: Tensor, axis: int | None, out: Tensor | None) -> Tensor:
    check_tensor(kernel, t)
    warn_if_recorded("average" if kernel == "mean" else kernel, t)
    axes = as_axes(kernel, axis, t.ndim())
    shape = tuple(size for index, size in enumerate(t.shape) if index not in axes)
    return run(kernel, t, t.array, shape=shape, ret=out, axes=axes, keepdims=False)
