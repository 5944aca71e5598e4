# SPDX-License-Identifier: Apache-2.0
"""SINGA's functions on Tensors: values alone, nothing is recorded for backward (autograd has those that are).

A result is a new leaf; shapes broadcast as in numpy, dtypes must agree, a number takes the dtype of the tensor.
``ret``, ``out`` and ``C`` name a tensor to write instead, which is then returned. Functions whose last tensor is
filled or changed (``axpy``, ``gaussian``, ``add_row``, ...) do that in place and return it.
Given a recorded tensor they compute from its values, and warn: the result has no gradient. But ``reshape`` and
``transpose`` are the methods of Tensor, which are recorded (core.py, Note [tracked]).

Not here: the raw class CTensor and ``_call_singa_func`` (``t.data`` is an array of the backend). ``einsum`` runs on
the host, all else in kernels.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..device import Device, get_default_device
from ..dtypes import is_float
from ..errors import DTypeError, ShapeError, check_number
from ..graph.rounded import expose
from .calls import binary, check_floats, check_matrix, check_pair, check_target, elementwise, reduce, run
from .checks import as_axes, as_axis, as_dtype, as_index, as_raw, broadcast_shape, float32, listed
from .core import Number, Tensor, check_tensor, check_vector, compare, to_numpy
from .tracked import warn_if_recorded

__all__ = [
    "abs",
    "add",
    "add_column",
    "add_row",
    "average",
    "axpy",
    "bernoulli",
    "ceil",
    "concatenate",
    "contiguous",
    "copy_data_to_from",
    "copy_from_numpy",
    "div",
    "einsum",
    "eltwise_mult",
    "eq",
    "exp",
    "from_numpy",
    "from_raw_tensor",
    "from_raw_tensors",
    "gaussian",
    "ge",
    "gt",
    "le",
    "log",
    "lt",
    "mult",
    "ones",
    "ones_like",
    "pow",
    "random",
    "relu",
    "repeat",
    "reshape",
    "sigmoid",
    "sign",
    "sizeof",
    "softmax",
    "sqrt",
    "square",
    "sub",
    "sum",
    "sum_columns",
    "sum_rows",
    "tanh",
    "tensordot",
    "to_host",
    "transpose",
    "uniform",
    "zeros",
    "zeros_like",
]

# ---- making and moving -----------------------------------------------------------------------------------


def from_numpy(np_array: Any, dev: Device | None = None) -> Tensor:
    """Return a Tensor with a copy of the values; float64 becomes float32, int64 int32 (DTypeError if too large)."""
    if np_array is None:  # without which Tensor() makes zeros
        raise DTypeError("from_numpy: expected an array or numbers, got None")
    return Tensor(data=np_array, device=dev)


def from_raw_tensor(t: Any) -> Tensor:
    """Return a Tensor around the raw array ``t`` of the CPU backend, sharing its memory.

    ShapeError: ``t`` is not row-major, aligned and writeable.
    """
    device = get_default_device()
    if hasattr(t, "dtype"):
        as_dtype(t.dtype)
    if not isinstance(t, type(device.backend.allocate((), float32))):
        raise DTypeError(f"from_raw_tensor: expected a raw array of {device}, got {type(t).__name__}")
    expose(t)
    return Tensor.wrap(as_raw("from_raw_tensor", t), device)


def from_raw_tensors(tt: Sequence[Any]) -> list[Tensor]:
    """Return ``from_raw_tensor`` of each."""
    return [from_raw_tensor(t) for t in listed(tt)]


def to_host(t: Tensor) -> Tensor:
    """Return a leaf on the CPU with a copy of the values."""
    return Tensor(data=to_numpy(t), dtype=t.dtype)


def zeros(shape: Sequence[int], device: Device | None = None) -> Tensor:
    """Return a float32 Tensor of zeros."""
    return Tensor(shape, device)


def ones(shape: Sequence[int], device: Device | None = None) -> Tensor:
    """Return a float32 Tensor of ones."""
    return Tensor(shape, device).set_value(1.0)


def zeros_like(t: Tensor) -> Tensor:
    """Zeros of t's shape, dtype and device."""
    check_tensor("zeros_like", t)
    return Tensor(t.shape, t.device, t.dtype)


def ones_like(t: Tensor) -> Tensor:
    """Ones of t's shape, dtype and device."""
    return zeros_like(t).set_value(1.0)


def random(shape: Sequence[int], device: Device | None = None) -> Tensor:
    """Return a float32 Tensor drawn uniformly from [0, 1)."""
    return Tensor(shape, device).uniform(0.0, 1.0)


def gaussian(mean: float, std: float, t: Tensor) -> Tensor:
    """Fill the float ``t`` from the normal distribution."""
    check_tensor("gaussian", t)
    return t.gaussian(mean, std)


def uniform(low: float, high: float, t: Tensor) -> Tensor:
    """Fill the float ``t`` uniformly from [low, high)."""
    check_tensor("uniform", t)
    return t.uniform(low, high)


def bernoulli(p: float, t: Tensor) -> Tensor:
    """Fill the float ``t`` with 1 at probability ``p``, else 0."""
    check_tensor("bernoulli", t)
    return t.bernoulli(p)


def sizeof(dtype: Any) -> int:
    """Bytes of one element."""
    return as_dtype(dtype).itemsize


def copy_from_numpy(data: Any, np_array: Any) -> None:
    """Overwrite a Tensor, or a raw array of the CPU backend, as ``Tensor.copy_from_numpy`` does."""
    (data if isinstance(data, Tensor) else from_raw_tensor(data)).copy_from_numpy(np_array)


def copy_data_to_from(dst: Tensor, src: Tensor, size: int, dst_offset: int = 0, src_offset: int = 0) -> None:
    """Copy ``size`` elements of the flat ``src`` (any shape) over those of ``dst``, from these offsets on."""
    check_pair("copy_data_to_from", dst, src)
    ends = []
    for tensor, offset in ((dst, dst_offset), (src, src_offset)):
        start, count = (
            as_index("copy_data_to_from", "offset", offset),
            as_index("copy_data_to_from", "size", size),
        )
        if min(start, count) < 0 or start + count > tensor.size():
            raise ShapeError(
                f"copy_data_to_from: elements {start} .. {start + count} are not in {tensor.size()}"
            )
        ends.append(slice(start, start + count))
    dst.begin_change("copy_data_to_from")
    part = src.array.reshape(-1)[ends[1]]
    if src is dst or dst.device.backend.may_share_memory(dst.array, src.array):
        part = src.clone().array.reshape(-1)[ends[1]]
    dst.device.backend.run("copy", part, out=dst.array.reshape(-1)[ends[0]])


# ---- shape -----------------------------------------------------------------------------------------------


def contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor itself: all are row-major."""
    check_tensor("contiguous", tensor)
    return tensor.contiguous()


def reshape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return another shape of as many elements (one size may be -1), sharing the memory."""
    check_tensor("reshape", tensor)
    return tensor.reshape(shape)


def transpose(t: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """Axes permuted; None reverses them."""
    check_tensor("transpose", t)
    return t.transpose(axes)


def repeat(t: Tensor, repeats: int | Sequence[int], axis: int | None = None) -> Tensor:
    """Return each element along ``axis`` repeated; None: of the flat tensor."""
    check_tensor("repeat", t)
    return t.repeat(repeats, axis)


def concatenate(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Join (..., n_i, ...) of one dtype to (..., sum of n_i, ...)."""
    if not isinstance(tensors, (list, tuple)) or not tensors:
        raise ShapeError("concatenate: expected a list of one Tensor or more")
    first = tensors[0]
    check_tensor("concatenate", first)
    position = as_axis("concatenate", axis, first.ndim())
    for tensor in tensors[1:]:
        check_pair("concatenate", first, tensor)
        others = [t.shape[:position] + t.shape[position + 1 :] for t in (first, tensor)]
        if tensor.ndim() != first.ndim() or others[0] != others[1]:
            raise ShapeError(
                f"concatenate: {first.shape} and {tensor.shape} must agree but for axis {position}"
            )
    warn_if_recorded("concatenate", *tensors)
    total = builtins.sum(tensor.shape[position] for tensor in tensors)
    shape = (*first.shape[:position], total, *first.shape[position + 1 :])
    return run("concat", first, *(t.array for t in tensors), shape=shape, axis=position)


# ---- element by element ----------------------------------------------------------------------------------


def abs(t: Tensor) -> Tensor:
    """Return |t|, element by element; any dtype, same shape."""
    return elementwise("abs", t)


def exp(t: Tensor) -> Tensor:
    """Return e ** t, element by element; float, same shape."""
    return elementwise("exp", t, floats=True)


def ceil(t: Tensor) -> Tensor:
    """Return the smallest whole number >= t, element by element; float, same shape."""
    return elementwise("ceil", t, floats=True)


def log(t: Tensor) -> Tensor:
    """Return the natural logarithm: -inf at 0, NaN below, element by element; float, same shape."""
    return elementwise("log", t, floats=True)


def relu(t: Tensor) -> Tensor:
    """max(t, 0), element by element; any dtype, same shape."""
    return elementwise("relu", t)


def sigmoid(t: Tensor) -> Tensor:
    """1 / (1 + exp(-t)), element by element; float, same shape."""
    return elementwise("sigmoid", t, floats=True)


def sign(t: Tensor) -> Tensor:
    """-1, 0 or 1, element by element; any dtype, same shape."""
    return elementwise("sign", t)


def sqrt(t: Tensor) -> Tensor:
    """Return the square root: NaN below 0, element by element; float, same shape."""
    return elementwise("sqrt", t, floats=True)


def square(t: Tensor) -> Tensor:
    """Return t * t, element by element; any dtype, same shape."""
    return elementwise("square", t)


def tanh(t: Tensor) -> Tensor:
    """Return the hyperbolic tangent, element by element; float, same shape."""
    return elementwise("tanh", t, floats=True)


def add(lhs: Tensor | Number, rhs: Tensor | Number, ret: Tensor | None = None) -> Tensor:
    """lhs + rhs; one may be a number; the broadcast shape."""
    return binary("add", lhs, rhs, ret)


def sub(lhs: Tensor | Number, rhs: Tensor | Number, ret: Tensor | None = None) -> Tensor:
    """lhs - rhs; one may be a number; the broadcast shape."""
    return binary("sub", lhs, rhs, ret)


def eltwise_mult(lhs: Tensor | Number, rhs: Tensor | Number, ret: Tensor | None = None) -> Tensor:
    """lhs * rhs; one may be a number; the broadcast shape."""
    return binary("mul", lhs, rhs, ret)


def div(lhs: Tensor | Number, rhs: Tensor | Number, ret: Tensor | None = None) -> Tensor:
    """lhs / rhs, floats only; one may be a number; the broadcast shape."""
    return binary("div", lhs, rhs, ret)


def pow(t: Tensor, x: Tensor | Number, out: Tensor | None = None) -> Tensor:
    """Return t ** x, floats only; the broadcast shape."""
    return binary("pow", t, x, out)


def lt(t: Tensor, x: Tensor | Number) -> Tensor:
    """Return t < x as float32 1 or 0; the broadcast shape."""
    check_tensor("less", t)
    return compare(t, x, "less")


def le(t: Tensor, x: Tensor | Number) -> Tensor:
    """Return t <= x as float32 1 or 0; the broadcast shape."""
    check_tensor("less_equal", t)
    return compare(t, x, "less_equal")


def gt(t: Tensor, x: Tensor | Number) -> Tensor:
    """Return t > x as float32 1 or 0; the broadcast shape."""
    check_tensor("greater", t)
    return compare(t, x, "greater")


def ge(t: Tensor, x: Tensor | Number) -> Tensor:
    """Return t >= x as float32 1 or 0; the broadcast shape."""
    check_tensor("greater_equal", t)
    return compare(t, x, "greater_equal")


def eq(t: Tensor, x: Tensor | Number) -> Tensor:
    """Return t == x as float32 1 or 0; the broadcast shape."""
    check_tensor("equal", t)
    return compare(t, x, "equal")


def axpy(alpha: float, x: Tensor, y: Tensor) -> Tensor:
    """Compute y += alpha * x, in place; x broadcasts to y."""
    check_tensor("axpy", y)
    check_tensor("axpy", x)
    warn_if_recorded("axpy", x)
    y += eltwise_mult(x.copy(), alpha)
    return y


# ---- reductions ------------------------------------------------------------------------------------------


def sum(t: Tensor, axis: int | None = None, out: Tensor | None = None) -> Tensor:
    """Return the sum over one axis, which goes away; None: of all, shape (). 16-bit floats are added in float32."""
    return reduce("sum", t, axis, out)


def average(t: Tensor, axis: int | None = None) -> Tensor:
    """Return the mean over one axis, which goes away; None: of all elements, shape (). Floats only."""
    check_floats("average", t)
    return reduce("mean", t, axis, None)


def softmax(t: Tensor, out: Tensor | None = None) -> Tensor:
    """exp(t) / sum(exp(t)) over the last axis; float (..., n), same shape."""
    check_floats("softmax", t)
    as_axis("softmax", -1, t.ndim())
    warn_if_recorded("softmax", t)
    return run("softmax", t, t.array, shape=t.shape, ret=out, axis=t.ndim() - 1)


def sum_columns(M: Tensor) -> Tensor:
    """Return the sum of all columns, (m, n) -> (m,)."""
    check_matrix("sum_columns", M)
    return reduce("sum", M, 1, None)


def sum_rows(M: Tensor) -> Tensor:
    """Return the sum of all rows, (m, n) -> (n,)."""
    check_matrix("sum_rows", M)
    return reduce("sum", M, 0, None)


# ---- products --------------------------------------------------------------------------------------------


def mult(A: Tensor, B: Tensor, C: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """alpha A B + beta C, in C if there is one; A (..., m, k), B (..., k, n) or (k,) -> (..., m, n) or (..., m)."""
    check_floats("mult", A)
    check_pair("mult", A, B)
    warn_if_recorded("mult", A, B)
    alpha, beta = check_number("mult", "alpha", alpha), check_number("mult", "beta", beta)
    right = B.copy().reshape((-1, 1)) if B.ndim() == 1 else B
    if A.ndim() < 2 or right.ndim() < 2 or A.shape[-1] != right.shape[-2]:
        raise ShapeError(
            f"mult: A (..., m, k) and B (..., k, n) must agree in k, got {A.shape} and {B.shape}"
        )
    batch = broadcast_shape("mult", A.shape[:-2], right.shape[:-2])
    y = run("matmul", A, A.array, right.array, shape=(*batch, A.shape[-2], right.shape[-1]))
    y = y.reshape(y.shape[:-1]) if B.ndim() == 1 else y
    if alpha != 1:
        y *= alpha
    if C is None:
        return y
    check_target("mult", A, y.shape, C)
    if beta:  # C may hold NaN where it does not count
        axpy(beta, C, y)
    C.copy_data(y)
    return C


def tensordot(A: Tensor, B: Tensor, axes: int | Sequence[Any] = 2) -> Tensor:
    """Products summed over axes: the last n of A with the first n of B, or two lists of axes; as in numpy."""
    check_floats("tensordot", A)
    check_pair("tensordot", A, B)
    warn_if_recorded("tensordot", A, B)
    A, B = A.copy(), B.copy()  # leaves
    if isinstance(axes, Sequence):
        if len(axes) != 2:
            raise ShapeError(f"tensordot: axes {axes!r} must be an int or two lists of axes")
        pairs = [list(part) if isinstance(part, Sequence) else [part] for part in axes]
    else:
        count = as_index("tensordot", "axes", axes)
        if not 0 <= count <= builtins.min(A.ndim(), B.ndim()):
            raise ShapeError(f"tensordot: {count} axes of shapes {A.shape} and {B.shape}")
        pairs = [list(range(A.ndim() - count, A.ndim())), list(range(count))]
    for part, tensor in zip(pairs, (A, B), strict=True):
        as_axes("tensordot", part, tensor.ndim())
        part[:] = [axis % tensor.ndim() for axis in part]
    if [A.shape[axis] for axis in pairs[0]] != [B.shape[axis] for axis in pairs[1]]:
        raise ShapeError(f"tensordot: axes {pairs} of shapes {A.shape} and {B.shape} differ in size")
    rest = [
        [axis for axis in range(t.ndim()) if axis not in part] for part, t in zip(pairs, (A, B), strict=True)
    ]
    inner = math.prod(A.shape[axis] for axis in pairs[0])
    outer = [tuple(t.shape[axis] for axis in part) for part, t in zip(rest, (A, B), strict=True)]
    a = A.transpose(rest[0] + pairs[0]).reshape((math.prod(outer[0]), inner))
    b = B.transpose(pairs[1] + rest[1]).reshape((inner, math.prod(outer[1])))
    return mult(a, b).reshape(outer[0] + outer[1])


def einsum(ops: str, *args: Tensor) -> Tensor:
    """Einstein's sum as numpy.einsum writes it: einsum("ij,jk->ik", A, B). Runs on the host."""
    if not isinstance(ops, str) or not args:
        raise ShapeError(
            f"einsum: expected text and at least one Tensor, got {ops!r} and {len(args)} Tensors"
        )
    for other in args:
        check_pair("einsum", args[0], other)
    warn_if_recorded("einsum", *args)
    dtype = args[0].dtype
    wide = np.float64 if is_float(dtype) else dtype
    try:
        values = np.einsum(ops, *(to_numpy(t).astype(wide) for t in args))
    except (ValueError, TypeError) as error:
        raise ShapeError(f"einsum: {ops!r} of {[t.shape for t in args]}: {error}") from None
    with np.errstate(over="ignore"):  # infinite, as in sums of that dtype
        values = values.astype(dtype)
    return Tensor(data=values, device=args[0].device, dtype=dtype)


# ---- a vector and a matrix, in place -----------------------------------------------------------------------


def add_column(alpha: float, v: Tensor, beta: float, M: Tensor) -> Tensor:
    """M (m, n) = alpha v + beta M with v (m,) added to every column."""
    return _add_vector(alpha, v, beta, M, 1)


def add_row(alpha: float, v: Tensor, beta: float, M: Tensor) -> Tensor:
    """M (m, n) = alpha v + beta M with v (n,) added to every row."""
    return _add_vector(alpha, v, beta, M, 0)


def _add_vector(alpha: float, v: Tensor, beta: float, M: Tensor, axis: int) -> Tensor:
    check_matrix("add", M)
    check_vector("add", M, v, axis)
    scaled = eltwise_mult(v, alpha)
    if check_number("add", "beta", beta):
        M *= beta
    else:  # M may hold NaN where it does not count
        M.set_value(0)
    return M.add_column(scaled) if axis else M.add_row(scaled)
