# SPDX-License-Identifier: Apache-2.0
"""Fewer kernels for a recorded step: what follows a convolution, a product or a batch norm becomes part of it.

The calls made here are in Note [lowered calls] in ../base.py; only compiled kernels know them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...dtypes import bfloat16
from ...graph.memory import View, row_major
from ...graph.nodes import Kernel, Node
from ...graph.rewrite import GraphRewriter
from ..fuse import relu_before_pooling
from .fuse_rows import RULES


def is_compiled_dtype(view: View) -> bool:
    """Return whether it is a float32 or bfloat16 array in this machine's byte order."""
    return bool(view.dtype in (np.float32, bfloat16) and view.dtype.isnative)


def _are_alike(*views: View) -> bool:
    """Return whether all have the dtype of the first."""
    return all(view.dtype == views[0].dtype for view in views)


def _is_compiled(call: Kernel, *others: View) -> bool:
    """Return whether there is compiled code for these arrays and ``others``: numpy's kernels have no fused calls."""
    views = (*call.inputs, *call.outputs)
    if any(0 in view.shape or not view.is_row_major for view in (*views, *others)):
        return False
    a, b = views[0].shape, views[1].shape
    return call.name != "matmul" or (len(a) == len(b) and a[:-2] == b[:-2])


def fuse(nodes: list[Node]) -> list[Node]:
    """Return the same step in fewer kernels."""
    graph = GraphRewriter(nodes, is_compiled_dtype)
    for rule in (_add_bias, _add_residual, _relu_after, relu_before_pooling, _relu_in_norm_backward, *RULES):
        for number in range(len(nodes)):
            rule(graph, number)
    return graph.rest()


def _add_bias(graph: GraphRewriter, last: int) -> None:
    """matmul, add(row) -> matmul with bias, also where the product has other axes for the add."""
    pair = graph.pair(last, "add", "matmul")
    if pair is None:
        return
    first, call, add = pair
    product, bias = add.inputs
    is_product = product == call.out or (product.is_whole and call.out.is_whole)
    is_row = len(call.out.shape) == 2 and product.shape[-1:] == call.out.shape[1:] == bias.shape
    if (
        len(call.inputs) == 2
        and is_product
        and is_row
        and bias.dtype == np.float32
        and _are_alike(add.out, product, call.out)
        and add.out.shape == product.shape
        and add.out.strides == row_major(add.out.shape, add.out.dtype)
        and _is_compiled(call, bias, product)
    ):
        out = replace(add.out, shape=call.out.shape, strides=row_major(call.out.shape, add.out.dtype))
        graph.merge(first, last, replace(call, inputs=(*call.inputs, bias), out=out))


def _add_residual(graph: GraphRewriter, last: int) -> None:
    """batchnorm_2d_train, add(x), relu -> batchnorm_2d_train with residual and ReLU."""
    found = graph.addition(last, "batchnorm_2d_train")
    if found is None:
        return
    first, norm, add, _, residual = found
    is_alike = add.inputs[0].shape == add.inputs[1].shape and _are_alike(add.out, *add.inputs)
    if not is_alike or add.out.memory is add.inputs[0].memory or not _is_compiled(norm, *add.inputs, add.out):
        return
    if len(norm.inputs) == 3 and not norm.attributes.get("relu"):
        inputs, out = (*norm.inputs, residual), (add.out, *norm.outputs[1:])
        graph.merge(first, last, replace(norm, inputs=inputs, out=out))


def _relu_after(graph: GraphRewriter, last: int) -> None:
    """conv2d | matmul | batchnorm_2d_train, relu -> the same with ReLU."""
    pair = graph.pair(last, "relu", "conv2d", "matmul", "batchnorm_2d_train")
    if pair is None:
        return
    first, call, relu = pair
    is_same = call.outputs[0].shape == relu.out.shape and _are_alike(call.outputs[0], relu.out)
    if is_same and _is_compiled(call, relu.inputs[0], relu.out):
        out = (relu.out, *call.outputs[1:]) if isinstance(call.out, tuple) else relu.out
        graph.merge(first, last, replace(call, out=out, attributes={**call.attributes, "relu": True}))


def _relu_in_norm_backward(graph: GraphRewriter, last: int) -> None:
    """relu_backward, batchnorm_2d_backward -> batchnorm_2d_backward that computes the ReLU's gradient from x."""
    pair = graph.pair(last, "batchnorm_2d_backward", "relu_backward")
    forward_call = None if pair is None else graph.maker(pair[1].inputs[1], "batchnorm_2d_train")
    if pair is None or forward_call is None:
        return
    (first, relu, norm), (forward_number, forward) = pair, forward_call
    if len(norm.inputs) != 5 or len(forward.inputs) != 3 or not forward.attributes.get("relu"):
        return  # with a residual x alone does not decide the sign
    is_alike = _are_alike(*norm.inputs[:2], relu.inputs[0])
    copied = graph.maker(forward.inputs[1], "copy")  # of the scale, where the output is computed again
    scale_number, scale = (
        (forward_number, forward.inputs[1]) if copied is None else (copied[0], copied[1].inputs[0])
    )
    if (
        is_alike
        and _is_compiled(norm, *relu.inputs, relu.out, *forward.inputs)
        and (forward.inputs[0], scale) == norm.inputs[1:3]
        and not graph.is_changed(scale, scale_number, last)
        and not any(graph.is_changed(view, forward_number, last) for view in forward.inputs)
    ):
        graph.merge(first, last, replace(norm, inputs=(relu.inputs[0], *norm.inputs[1:], forward.inputs[2])))
        if not any(view.memory.owner is not None or graph.readers(view) for view in forward.outputs):
            graph.put(forward_number, None)  # one that was computed again for the ReLU alone
