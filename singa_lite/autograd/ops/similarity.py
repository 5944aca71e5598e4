# SPDX-License-Identifier: Apache-2.0
"""How alike vectors are."""

from __future__ import annotations

from ...dtypes import accumulation_dtype
from ...errors import ShapeError
from ...tensor import Tensor
from ..engine import Array, Context, Operator
from ._common import as_array, check_floats, check_ndim, like

__all__ = ["cossim"]


class CosSim(Operator):
    autocast = "float32"

    def check(self, *inputs: Tensor) -> None:
        a, b = inputs
        check_floats("cossim", a, b)
        check_ndim("cossim", "a", a, 2, "(N, C)")
        if a.shape != b.shape:
            raise ShapeError(f"cossim: a and b must have one shape, got {a.shape} and {b.shape}")

    def forward(self, context: Context, *inputs: Array) -> Array:
        a, b = (context.cast(x, accumulation_dtype(x.dtype)) for x in inputs)
        lengths = _length(context, a), _length(context, b)
        units = like(context, "div", a, lengths[0]), like(context, "div", b, lengths[1])
        cosines = _dot(context, *units)
        context.save(units, lengths, cosines, inputs[0].dtype)
        return context.cast(cosines.reshape(-1), inputs[0].dtype)

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        units, lengths, cosines, dtype = context.saved
        dy = context.cast(dys[0], cosines.dtype).reshape(cosines.shape)
        dxs = []
        for unit, other, length in zip(units, reversed(units), lengths, strict=True):
            across = like(context, "sub", other, like(context, "mul", unit, cosines))
            dxs.append(context.cast(like(context, "mul", across, like(context, "div", dy, length)), dtype))
        return tuple(dxs)


def _dot(context: Context, a: Array, b: Array) -> Array:
    """Return the products of rows, (N, 1)."""
    products = context.empty((a.shape[0], 1), a.dtype)
    context.run("sum", like(context, "mul", a, b), out=products, axes=(1,), keepdims=True)
    return products


def _length(context: Context, a: Array) -> Array:
    """Return the lengths of rows, (N, 1), as ``cossim`` has them."""
    return like(context, "sqrt", like(context, "add", _dot(context, a, a), as_array(context, 1e-16, a.dtype)))


def cossim(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of the angle between the rows of two matrices.

    The length of a row is sqrt(its squares' sum + 1e-16): a row of zeros has the cosine 0, and a gradient of up to 1e8,
    which in float16 is infinite. Where squares overflow, in float32 from 1e19 on, cosine and gradient are 0.

    Args:
        a: float (N, C).
        b: same shape and dtype.

    Returns:
        Shape (N,), the dtype of ``a``.

    Raises:
        ShapeError: the shapes differ, or are not (N, C).
    """
    return CosSim()(a, b)  # type: ignore[no-any-return]
