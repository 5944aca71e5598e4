# SPDX-License-Identifier: Apache-2.0
"""Clipping gradients by the norm of all of them together, on their device.

The norm is sqrt(sum of squares) over all elements, as if they were one vector. Squares are summed up in float32 or
wider, gradient by gradient in the order given, so that ranks with the same bits and the same kind of device get the
same factor without asking each other.

Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
"""

from __future__ import annotations

from typing import Any

from ..dtypes import accumulation_dtype
from ..errors import DeviceError
from ..tensor import Tensor

Array = Any  # a raw array of the device's backend
EPSILON = 1e-6  # added to the norm


def clip_gradients(grads: list[Tensor], norm: float) -> None:
    """Multiply ``grads`` by min(1, norm / (their norm + EPSILON)), in place.

    If one is not finite, or the norm beyond its dtype (1.8e19 in float32), all become NaN: a step that cannot be scaled
    is seen, not skipped.

    Raises:
        DeviceError: they are on several devices.
    """
    if not grads:
        return
    factors = clip_factors(grads, norm, EPSILON)
    for grad in grads:
        backend, dtype = grad.device.backend, accumulation_dtype(grad.dtype)
        factor = factors[dtype].reshape(())  # for a gradient without dimensions, too
        wide = backend.astype(grad.array, dtype)
        backend.run("mul", wide, factor, out=wide)
        if wide is not grad.array:
            backend.run("cast", wide, out=grad.array)


def clip_factors(grads: list[Tensor], norm: float, epsilon: float = 0.0) -> dict[Any, Array]:
    """Return min(1, norm / (the norm of ``grads`` + epsilon)), shape (1,), by dtype, in float32 or wider.

    It is NaN if one is not finite, or if the norm is beyond its dtype. DeviceError: they are on several devices.
    """
    devices = {grad.device for grad in grads}
    if len(devices) > 1:
        raise DeviceError(
            f"clip: gradients are on {', '.join(sorted(map(str, devices)))}, and their norm needs them on one device"
        )
    backend = grads[0].device.backend
    run, dtypes = backend.run, {accumulation_dtype(grad.dtype) for grad in grads}
    widest = max(dtypes, key=lambda dtype: int(dtype.itemsize))
    parts = backend.empty((len(grads),), widest)
    for number, grad in enumerate(grads):
        _sum_squares(grad, out=parts[number : number + 1])
    total, root, rest, factor = (backend.empty((1,), widest) for _ in range(4))
    run("sum", parts, out=total, axes=(0,), keepdims=True)
    run("sqrt", total, out=root)
    run("sub", root, root, out=rest)  # 0, or NaN where the norm is not finite
    if epsilon:
        run("fill", out=total, value=epsilon)
        run("add", root, total, out=root)
    run("fill", out=factor, value=norm)
    run("div", factor, root, out=factor)
    run("clip", factor, out=factor, min=None, max=1.0)
    run("add", factor, rest, out=factor)
    factors = {widest: factor}
    for dtype in dtypes - {widest}:
        factors[dtype] = backend.empty((1,), dtype)
        run("cast", factor, out=factors[dtype])
    return factors


def _sum_squares(grad: Tensor, out: Array) -> None:
    """Write the sum of the squares of ``grad`` to ``out``, shape (1,)."""
    backend, dtype = grad.device.backend, accumulation_dtype(grad.dtype)
    squares = backend.empty((grad.size(),), dtype)
    backend.run("square", backend.astype(grad.array.reshape(-1), dtype), out=squares)
    total = out if dtype == out.dtype else backend.empty((1,), dtype)
    backend.run("sum", squares, out=total, axes=(0,), keepdims=True)
    if total is not out:
        backend.run("cast", total, out=out)
