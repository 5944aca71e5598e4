# SPDX-License-Identifier: Apache-2.0
"""Fewer and smaller kernels for a recorded step: what follows an addition or a batch norm becomes part of it.

The calls made here are in Note [lowered calls] in ../base.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...dtypes import is_float
from ...graph.memory import View
from ...graph.nodes import Kernel, Node
from ...graph.rewrite import GraphRewriter
from ..fuse import apply_rules, relu_before_pooling
from ..fuse_norm import add_residual, relu_after, relu_in_norm_backward
from .batch_norm import has_fused_calls


def fuse(nodes: list[Node]) -> list[Node]:
    """Return the same step in fewer kernels."""
    return apply_rules(nodes, lambda view: is_float(view.dtype), RULES)


def _bias_and_relu(graph: GraphRewriter, last: int) -> None:
    """conv2d with bias, relu -> conv2d, add with ReLU."""
    pair = graph.pair(last, "relu", "conv2d")
    if pair is None:
        return
    first, conv, relu = pair
    if len(conv.inputs) != 3 or conv.out != relu.inputs[0]:
        return
    *images, bias = conv.inputs
    itemsize = bias.dtype.itemsize
    row = View(bias.memory, bias.offset, (*bias.shape, 1, 1), bias.dtype, (itemsize,) * 3)
    graph.put(first, replace(conv, inputs=tuple(images)))
    graph.put(last, replace(relu, name="add", inputs=(conv.out, row), attributes={"relu": True}))


def _add_and_relu(graph: GraphRewriter, last: int) -> None:
    """add, relu -> add with ReLU."""
    pair = graph.pair(last, "relu", "add")
    if pair is not None and pair[1].out == pair[2].inputs[0]:
        first, add, relu = pair
        graph.merge(first, last, replace(add, out=relu.out, attributes={"relu": True}))


def _add_and_gelu(graph: GraphRewriter, last: int) -> None:
    """add, gelu -> add_gelu, which keeps the sum for the gradient."""
    found = _sum_before(graph, last, "gelu")
    if found is not None and found[2].out.dtype == found[1].out.dtype:
        first, add, gelu = found
        graph.merge(first, last, replace(add, name="add_gelu", out=(gelu.out, add.out)))


def _add_and_norm(graph: GraphRewriter, last: int) -> None:
    """add, layer_norm -> layer_norm of two summands, which keeps the sum."""
    found = _sum_before(graph, last, "layer_norm")
    if found is None:
        return
    first, add, norm = found
    x, residual = add.inputs
    if all((view.shape, view.dtype) == (add.out.shape, add.out.dtype) for view in (x, residual)):
        inputs, out = (x, *norm.inputs[1:], residual), (*norm.out, add.out)
        graph.merge(first, last, replace(norm, inputs=inputs, out=out))


def _sum_before(graph: GraphRewriter, last: int, name: str) -> tuple[int, Kernel, Kernel] | None:
    """Return an addition whose result is what ``name`` at the number ``last`` begins with, if it may run there."""
    node = graph.kernel(last, name)
    found = None if node is None else graph.maker(node.inputs[0], "add")
    if node is None or found is None:
        return None
    first, add = found
    is_same = add.out == node.inputs[0] and not add.attributes
    is_in_place = add.out.memory in {view.memory for view in add.inputs}
    return (first, add, node) if is_same and not is_in_place and graph.can_move(first, last) else None


RULES = (
    relu_before_pooling,
    partial(add_residual, takes=has_fused_calls),
    partial(relu_after, takes=has_fused_calls, names=("batchnorm_2d_train",)),
    partial(relu_in_norm_backward, takes=has_fused_calls),
    *(_bias_and_relu, _add_and_relu, _add_and_gelu, _add_and_norm),
)
