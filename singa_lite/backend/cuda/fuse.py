# SPDX-License-Identifier: Apache-2.0
"""Fewer and smaller kernels for a recorded step: a ReLU becomes part of the addition before it.

The calls made here are in Note [lowered calls] in ../base.py.
"""

from __future__ import annotations

from dataclasses import replace

from ...dtypes import is_float
from ...graph.memory import View
from ...graph.nodes import Node
from ...graph.rewrite import GraphRewriter
from ..fuse import relu_before_pooling


def fuse(nodes: list[Node]) -> list[Node]:
    """Return the same step in fewer kernels, the same bits."""
    graph = GraphRewriter(nodes, lambda view: is_float(view.dtype))
    for rule in (relu_before_pooling, _bias_and_relu, _add_and_relu):
        for number in range(len(nodes)):
            rule(graph, number)
    return graph.rest()


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
