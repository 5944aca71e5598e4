# SPDX-License-Identifier: Apache-2.0
"""Matrix products, the bias that follows them, and attention, which is made of them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...dtypes import accumulation_dtype, is_narrow
from ...errors import OptionError, ShapeError, check_bool, check_int, check_number, is_one_of
from ...tensor import Tensor, broadcast_shape
from ..engine import Array, Context, Operator
from ._common import (
    broadcasting,
    check_floats,
    check_floats_beside,
    check_ndim,
    scaled,
    sum_to,
)

__all__ = ["add_bias", "attention", "gemm", "matmul"]


def product_of(
    context: Context,
    a: Array,
    b: Array,
    transpose_a: bool = False,
    transpose_b: bool = False,
    dtype: Any = None,
) -> Array:
    """Return the batched product of two raw arrays, in ``dtype`` (None: theirs)."""
    rows = a.shape[-1] if transpose_a else a.shape[-2]
    columns = b.shape[-2] if transpose_b else b.shape[-1]
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = context.empty((*batch, rows, columns), a.dtype if dtype is None else dtype)
    context.run("matmul", a, b, out=out, transpose_a=transpose_a, transpose_b=transpose_b)
    return out


def rows_of(x: Array) -> Array:
    """Return (..., k) as (rows, k); k may be 0."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


class Matmul(Operator):
    autocast = "low"

    def check(self, *inputs: Tensor) -> None:
        check_floats("matmul", *inputs)
        x, w = inputs
        if x.ndim() < 2 or w.ndim() < 2 or x.shape[-1] != w.shape[-2]:
            raise ShapeError(
                f"matmul: x (..., m, k) and w (..., k, n) must agree in k, got {x.shape} and {w.shape}"
            )
        broadcast_shape("matmul", x.shape[:-2], w.shape[:-2])

    def forward(self, context: Context, *inputs: Array) -> Array:
        x, w = inputs
        context.save(x, w)
        if w.ndim == 2:  # one big product instead of one per batch element
            return product_of(context, rows_of(x), w).reshape(*x.shape[:-1], w.shape[1])
        return product_of(context, x, w)

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        (dy,), (x, w), (needs_x, needs_w) = dys, context.saved, context.needs_grad
        x_dtype, w_dtype = context.gradient_dtype(0, x.dtype), context.gradient_dtype(1, w.dtype)
        dx = dw = None
        if w.ndim == 2:
            rows = rows_of(dy)
            if needs_x:
                dx = product_of(context, rows, w, transpose_b=True, dtype=x_dtype).reshape(x.shape)
            if needs_w:
                dw = product_of(context, rows_of(x), rows, transpose_a=True, dtype=w_dtype)
            return dx, dw
        if needs_x:
            wide = x_dtype if dy.shape[:-2] == x.shape[:-2] else accumulation_dtype(x_dtype)
            dx = sum_to(context, product_of(context, dy, w, transpose_b=True, dtype=wide), x.shape, x_dtype)
        if needs_w:
            wide = w_dtype if dy.shape[:-2] == w.shape[:-2] else accumulation_dtype(w_dtype)
            dw = sum_to(context, product_of(context, x, dy, transpose_a=True, dtype=wide), w.shape, w_dtype)
        return dx, dw


def matmul(x: Tensor, w: Tensor) -> Tensor:
    """Return the matrix product over the last two axes; the axes before them broadcast.

    Args:
        x: float tensor (..., m, k).
        w: float tensor (..., k, n).

    Returns:
        (..., m, n), the dtype of the inputs. Accumulated in float32 or wider.

    Raises:
        ShapeError: fewer than two axes, k differs, or the axes before do not broadcast.
    """
    return Matmul()(x, w)  # type: ignore[no-any-return]


class AddBias(Operator):
    autocast = "keep"

    def __init__(self, axis: int = 0) -> None:
        if not is_one_of(axis, (0, 1)):
            raise OptionError(f"add_bias: axis = {axis} must be 0 (b to every row) or 1 (b to every column)")
        self.axis = axis

    def check(self, *inputs: Tensor) -> None:
        check_floats_beside("add_bias", 1, *inputs)
        x, b = inputs
        if x.ndim() < 2 or (self.axis == 1 and x.ndim() != 2):
            raise ShapeError(f"add_bias: x must have two axes, but its shape is {x.shape}")
        wanted = (x.shape[-1],) if self.axis == 0 else (x.shape[0],)
        if b.shape != wanted:
            raise ShapeError(
                f"add_bias: b must have shape {wanted} for x {x.shape} and axis {self.axis}, not {b.shape}"
            )

    def forward(self, context: Context, *inputs: Array) -> Array:
        x, b = inputs
        context.save(b.shape, b.dtype)
        return broadcasting(context, "add", x, b if self.axis == 0 else b.reshape(-1, 1))

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        (dy,), (shape, dtype), (needs_x, needs_b) = dys, context.saved, context.needs_grad
        db = None
        if needs_b:
            db = sum_to(context, dy, shape if self.axis == 0 else (*shape, 1), dtype).reshape(shape)
        return dy if needs_x else None, db


def add_bias(x: Tensor, b: Tensor, axis: int = 0) -> Tensor:
    """Return x + b with b added to every row (axis 0) or every column (axis 1). x is not changed.

    Args:
        x: float tensor (..., n) for axis 0, (m, n) for axis 1.
        b: shape (n,) for axis 0, (m,) for axis 1; dtype of ``x``, or float32 where that has 16 bits.
        axis: 0 or 1.

    Returns:
        Same shape and dtype as ``x``.

    Raises:
        ShapeError: b does not fit.
        OptionError: another axis.
    """
    return AddBias(axis)(x, b)  # type: ignore[no-any-return]


class Gemm(Operator):
    """Args: as ``gemm``."""

    autocast = "low"
    autocast_inputs = 2  # not C

    def __init__(self, alpha: float, beta: float, trans_a: bool, trans_b: bool) -> None:
        self.alpha, self.beta, self.trans_a, self.trans_b = alpha, beta, trans_a, trans_b

    def check(self, *inputs: Tensor) -> None:
        check_floats_beside("gemm", 2, *inputs)
        for name, matrix in zip("AB", inputs, strict=False):
            check_ndim("gemm", name, matrix, 2, "(rows, columns)")
        a, b = inputs[0].shape[:: -1 if self.trans_a else 1], inputs[1].shape[:: -1 if self.trans_b else 1]
        if a[1] != b[0]:
            raise ShapeError(f"gemm: {a} times {b} (after transA and transB): the inner sizes differ")
        if len(inputs) == 3 and broadcast_shape("gemm", (a[0], b[1]), inputs[2].shape) != (a[0], b[1]):
            raise ShapeError(f"gemm: C {inputs[2].shape} does not broadcast to {(a[0], b[1])}")

    def forward(self, context: Context, *inputs: Array) -> Array:
        a, b, *rest = inputs
        context.save(a, b, *((c.shape, c.dtype) for c in rest))
        is_product = self.alpha == 1 and not rest
        y = product_of(
            context, a, b, self.trans_a, self.trans_b, a.dtype if is_product else accumulation_dtype(a.dtype)
        )
        y = y if self.alpha == 1 else scaled(context, y, self.alpha)
        for c in rest:
            if self.beta != 1:
                c = scaled(context, context.cast(c, accumulation_dtype(c.dtype)), self.beta)
            y = broadcasting(context, "add", y, c)
        return context.cast(y, a.dtype)

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        (dy,), (a, b, *others), (needs_a, needs_b, *needs_c) = dys, context.saved, context.needs_grad
        dtype_a, dtype_b = context.gradient_dtype(0, a.dtype), context.gradient_dtype(1, b.dtype)
        # of 16 bits the products are scaled, before they are rounded
        dab = dy if self.alpha == 1 or is_narrow(dy.dtype) else scaled(context, dy, self.alpha)
        da = db = None
        if needs_a:
            factors = (b, dab, self.trans_b, True) if self.trans_a else (dab, b, False, not self.trans_b)
            da = self.gradient(context, factors, dtype_a)
        if needs_b:
            factors = (dab, a, True, self.trans_a) if self.trans_b else (a, dab, not self.trans_a, False)
            db = self.gradient(context, factors, dtype_b)
        dcs = [
            self.gradient_of_c(context, dy, shape, dtype) if needed else None
            for (shape, dtype), needed in zip(others, needs_c, strict=True)
        ]
        return da, db, *dcs

    def gradient(self, context: Context, factors: tuple[Array, Array, bool, bool], dtype: Any) -> Array:
        """Return the product of ``factors``, of 16 bits times alpha, in ``dtype``."""
        if self.alpha == 1 or not is_narrow(factors[0].dtype):
            return product_of(context, *factors, dtype=dtype)
        product = product_of(context, *factors, dtype=accumulation_dtype(dtype))
        return context.cast(scaled(context, product, self.alpha), dtype)

    def gradient_of_c(self, context: Context, dy: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return beta times the sum of dy to ``shape``, in ``dtype``."""
        if self.beta == 1 or not is_narrow(dy.dtype):
            return sum_to(context, dy if self.beta == 1 else scaled(context, dy, self.beta), shape, dtype)
        return context.cast(
            scaled(context, sum_to(context, dy, shape, accumulation_dtype(dtype)), self.beta), dtype
        )


def gemm(
    A: Tensor,
    B: Tensor,
    C: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """alpha A B + beta C for matrices, where A or B may be given transposed (names are SINGA's and ONNX's).

    Args:
        A: float tensor (m, k), or (k, m) with ``transA``.
        B: float tensor (k, n), or (n, k) with ``transB``.
        C: broadcasts to (m, n), of their dtype, or float32 beside 16 bits; None adds nothing.
        alpha: factor of the product.
        beta: factor of C.
        transA: whether A is transposed first.
        transB: whether B is transposed first.

    Returns:
        Shape (m, n), the dtype of the inputs.

    Raises:
        ShapeError: no matrices, or sizes that do not fit.
        OptionError: a factor is not a number.
    """
    factors = check_number("gemm", "alpha", alpha), check_number("gemm", "beta", beta)
    op = Gemm(*factors, check_bool("gemm", "transA", transA), check_bool("gemm", "transB", transB))
    return op(A, B, *(() if C is None else (C,)))  # type: ignore[no-any-return]


class Attention(Operator):
    """Args: as ``attention``."""

    autocast = "low"

    def __init__(self, num_heads: int, causal: bool) -> None:
        self.num_heads, self.causal = (
            check_int("attention", "num_heads", num_heads, 1),
            check_bool("attention", "causal", causal),
        )

    def check(self, *inputs: Tensor) -> None:
        check_floats("attention", *inputs)
        parts = (3,) if len(inputs) == 1 else (1, 2)
        for name, tensor, count in zip(("x", "memory"), inputs, parts, strict=False):
            check_ndim("attention", name, tensor, 3, f"(batch, length, {count} width)")
            if tensor.shape[2] % (count * self.num_heads) or tensor.size() == 0:
                raise ShapeError(
                    f"attention: the last axis of {name} {tensor.shape} must be {count} times a width that "
                    f"divides by num_heads = {self.num_heads}, and no axis may be empty"
                )
        if len(inputs) == 2:
            x, memory = inputs
            if self.causal:
                raise OptionError("attention: causal=True is for attention within x; leave memory out")
            if memory.shape[0] != x.shape[0] or memory.shape[2] != 2 * x.shape[2]:
                raise ShapeError(
                    f"attention: memory must be (batch, length, 2 width) for x {x.shape}, not {memory.shape}"
                )

    def forward(self, context: Context, *inputs: Array) -> Array:
        batch, length, columns = inputs[0].shape
        width = columns // (3 if len(inputs) == 1 else 1)
        y = context.empty((batch, length, width), inputs[0].dtype)
        context.run("attention", *inputs, out=y, num_heads=self.num_heads, causal=self.causal)
        context.save(*inputs)
        return y

    def backward(self, context: Context, *dys: Array) -> tuple[Array, ...]:
        inputs = context.saved
        out = tuple(context.empty(x.shape, x.dtype) for x in inputs)
        options = {"num_heads": self.num_heads, "causal": self.causal}
        single = out if len(out) > 1 else out[0]
        context.run("attention_backward", dys[0], *inputs, out=single, **options)
        return out


def attention(x: Tensor, memory: Tensor | None = None, *, num_heads: int, causal: bool = False) -> Tensor:
    """Average values by the softmax of scaled products of queries and keys, for each head on its own.

    y = softmax(Q K^T / sqrt(d)) V with Q, K and V of shape (length, d) for each sample and head, d = width / num_heads.
    SINGA has no such operator.

    Args:
        x: float tensor (batch, length, 3 width), the projections Q, K and V side by side; with ``memory`` Q alone,
            (batch, length, width).
        memory: projections K and V of another sequence, (batch, other length, 2 width); None: those in ``x``.
        num_heads: >= 1, divides width; head i has columns i d to (i + 1) d of each projection.
        causal: whether position i averages positions 0 .. i only; not with ``memory``.

    Returns:
        Shape (batch, length, width), the dtype of ``x``. Accumulated in float32 or wider.

    Raises:
        ShapeError: shapes do not fit, or are empty.
        OptionError: num_heads is not an int >= 1, or ``causal`` comes with ``memory``.

    Source: Vaswani et al., "Attention Is All You Need", 2017.
    """
    inputs = (x,) if memory is None else (x, memory)
    return Attention(num_heads, causal)(*inputs)  # type: ignore[no-any-return]
