# SPDX-License-Identifier: Apache-2.0
"""Fewer kernels for recorded transformers: products finished row by row.

The kernels made here, ``LOWERED``, are compiled ones that no backend has otherwise; product.cc and layer_norm.cc in
native/kernels say what they compute. That they take a call is checked here, as there is no other code for it.

Note [casts]: in mixed precision a product of bfloat16 numbers, added up in float32, is rounded and widened again before
it is added to float32 activations, and the norm of these is rounded for the next product. Those casts become part of
the product and of the norm, so a product is then not rounded in between.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ...dtypes import bfloat16
from ...graph.memory import View, row_major
from ...graph.nodes import Kernel
from ...graph.rewrite import GraphRewriter

LOWERED = frozenset(
    {
        "layer_norm_backward_add",
        "matmul_add",
        "matmul_add_norm",
        "matmul_gelu",
        "matmul_mul",
    }
)


def _are_plain(*views: View, dtype: Any = None) -> bool:
    """Return whether all are row-major arrays with elements, in this machine's byte order.

    Args:
        dtype: which they must have; None: float32 or bfloat16, each its own.
    """
    return all(
        (view.dtype in (np.float32, bfloat16) if dtype is None else view.dtype == dtype)
        and view.dtype.isnative
        and 0 not in view.shape
        and view.is_row_major
        for view in views
    )


def _product(call: Kernel, num_inputs: int, *others: View) -> bool:
    """Return whether ``call`` is a product of two plain matrices, the first as it is, without a ReLU.

    Args:
        num_inputs: how many it has, of which a third is a float32 row.
        others: what a fused product would read or write beside it: float32 where the matrices are.
    """
    a, b, *bias = call.inputs
    dtype = np.float32 if a.dtype == np.float32 else None
    attributes = call.attributes
    return (
        len(call.inputs) == num_inputs
        and len(a.shape) == len(b.shape) == 2
        and _are_plain(a, b, dtype=a.dtype)
        and _are_plain(*bias, dtype=np.float32)
        and _are_plain(call.out, *others, dtype=dtype)
        and not attributes.get("transpose_a")
        and not attributes.get("relu")
    )


def _linear(call: Kernel, *others: View) -> bool:
    """Return whether ``call`` is a product with a bias, neither matrix transposed; ``others`` as for ``_product``."""
    return _product(call, 3, *others) and not call.attributes.get("transpose_b")


def gelu_after_product(graph: GraphRewriter, last: int) -> None:
    """matmul with bias, gelu, gelu_backward -> matmul_gelu, which keeps the derivative, and a product with that."""
    gelu = graph.kernel(last, "gelu")
    found = None if gelu is None else graph.maker(gelu.inputs[0], "matmul")
    if gelu is None or found is None or found[1].out.memory.owner is not None:
        return
    first, call = found
    others = [number for number in graph.readers(call.out) if number != last]
    gradient = graph.kernel(others[0], "gelu_backward") if len(others) == 1 else None
    if gradient is None or gradient.inputs[1].memory is not call.out.memory:
        return
    views = (gelu.inputs[0], gelu.out, *gradient.inputs, gradient.out)
    if not _linear(call, *views) or not graph.can_move(first, last):
        return
    size = math.prod(call.out.shape)
    if call.out.is_whole and all(math.prod(view.shape) == size for view in views):
        fused = replace(call, name="matmul_gelu", out=(gelu.out, call.out), attributes={})
        graph.merge(first, last, fused)
        graph.put(others[0], replace(gradient, name="mul", attributes={}))


def multiply_after_product(graph: GraphRewriter, last: int) -> None:
    """matmul, mul -> matmul_mul."""
    pair = graph.pair(last, "mul", "matmul")
    if pair is None:
        return
    first, call, mul = pair
    product, factor = mul.inputs
    if (
        _product(call, 2, product, factor, mul.out)
        and product.shape == factor.shape
        and math.prod(product.shape) == math.prod(call.out.shape)
        and mul.out.memory is not factor.memory
    ):
        attributes = {"transpose_b": bool(call.attributes.get("transpose_b"))}
        fused = replace(
            call, name="matmul_mul", inputs=(*call.inputs, factor), out=mul.out, attributes=attributes
        )
        graph.merge(first, last, fused)


def add_after_product(graph: GraphRewriter, last: int) -> None:
    """matmul with bias, add -> matmul_add."""
    found = graph.addition(last, "matmul")
    if found is None:
        return
    first, call, add, product, residual = found
    if (
        _linear(call, product, residual, add.out)
        and product.shape == residual.shape
        and math.prod(product.shape) == math.prod(call.out.shape)
        and add.out.memory is not residual.memory
    ):
        fused = replace(call, name="matmul_add", inputs=(*call.inputs, residual), out=add.out, attributes={})
        graph.merge(first, last, fused)


def norm_after_add(graph: GraphRewriter, last: int) -> None:
    """matmul_add, layer_norm -> matmul_add_norm, which gives the sum as well."""
    norm = graph.kernel(last, "layer_norm")
    found = None if norm is None else graph.maker(norm.inputs[0], "matmul_add")
    if norm is None or found is None:
        return
    first, call = found
    x, scale, shift = norm.inputs
    if (
        _are_plain(x, norm.out[0], dtype=x.dtype)
        and _are_plain(scale, shift, *norm.out[1:], dtype=np.float32)
        and x.dtype == call.out.dtype
        and math.prod(x.shape) == math.prod(call.out.shape)
        and scale.shape == shift.shape == call.inputs[2].shape
        and graph.can_move(first, last)
    ):
        fused = replace(
            call,
            name="matmul_add_norm",
            inputs=(*call.inputs, scale, shift),
            out=(call.out, *norm.outputs),
            attributes=norm.attributes,
        )
        graph.merge(first, last, fused)


def add_after_norm_gradient(graph: GraphRewriter, last: int) -> None:
    """layer_norm_backward, add -> layer_norm_backward_add: the gradient that goes around the norm is added."""
    found = graph.addition(last, "layer_norm_backward")
    if found is None:
        return
    first, call, add, dx, addend = found
    if (
        dx == call.outputs[0]
        and _are_plain(*call.inputs[:2], dx, addend, add.out, dtype=dx.dtype)
        and _are_plain(*call.inputs[2:], *call.outputs[1:], dtype=np.float32)
        and addend.shape == dx.shape == add.out.shape
    ):
        fused = replace(
            call,
            name="layer_norm_backward_add",
            inputs=(*call.inputs, addend),
            out=(add.out, *call.outputs[1:]),
        )
        graph.merge(first, last, fused)


def cast_after_product(graph: GraphRewriter, last: int) -> None:
    """matmul of bfloat16, cast -> matmul with a float32 result; see Note [casts]."""
    pair = graph.pair(last, "cast", "matmul")
    if pair is None:
        return
    first, call, cast = pair
    product, a = cast.inputs[0], call.inputs[0]
    if (
        a.dtype == product.dtype == bfloat16
        and len(call.out.shape) == 2
        and _are_plain(*call.inputs[:2], call.out, product, cast.out)
        and math.prod(product.shape) == math.prod(call.out.shape)
    ):
        out = replace(cast.out, shape=call.out.shape, strides=row_major(call.out.shape, cast.out.dtype))
        graph.merge(first, last, replace(call, out=out))


def cast_after_norm(graph: GraphRewriter, last: int) -> None:
    """layer_norm or matmul_add_norm, cast -> the same with a bfloat16 norm; see Note [casts]."""
    pair = graph.pair(last, "cast", "layer_norm", "matmul_add_norm")
    if pair is None:
        return
    first, call, cast = pair
    number = 0 if call.name == "layer_norm" else 1  # of the norm among its results
    normal = call.outputs[number]
    is_taken = call.inputs[0].dtype == (np.float32 if call.name == "layer_norm" else bfloat16)
    if (
        is_taken
        and cast.out.dtype == bfloat16
        and cast.inputs[0].memory is normal.memory
        and _are_plain(normal, cast.inputs[0], dtype=np.float32)
        and _are_plain(cast.out, *call.inputs, *call.outputs)
        and math.prod(cast.out.shape) == math.prod(normal.shape)
    ):
        out = replace(cast.out, shape=normal.shape, strides=row_major(normal.shape, cast.out.dtype))
        outputs = (*call.outputs[:number], out, *call.outputs[number + 1 :])
        graph.merge(first, last, replace(call, out=outputs))


RULES = (
    cast_after_product,
    gelu_after_product,
    multiply_after_product,
    add_after_product,
    norm_after_add,
    cast_after_norm,
    add_after_norm_gradient,
)
