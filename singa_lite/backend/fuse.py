# SPDX-License-Identifier: Apache-2.0
"""What the rules of all backends for fewer kernels have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ..graph.memory import Memory, View
from ..graph.nodes import Node
from ..graph.rewrite import GraphRewriter


def are_alike(*views: View) -> bool:
    """Return whether all have the dtype of the first."""
    return all(view.dtype == views[0].dtype for view in views)


def apply_rules(
    nodes: list[Node], accepts: Callable[[View], bool], rules: Iterable[Callable[[GraphRewriter, int], None]]
) -> list[Node]:
    """Return a step after each rule was tried at each of its nodes, by number, in turn.

    Args:
        accepts: whether the rules take kernels that read and write an array.
    """
    graph = GraphRewriter(nodes, accepts)
    for rule in rules:
        for number in range(len(nodes)):
            rule(graph, number)
    return graph.rest()


def relu_before_pooling(graph: GraphRewriter, last: int) -> None:
    """max_pool_2d_backward, relu_backward -> relu_backward on the smaller side, max_pool_2d_backward.

    A winner of the pooling is positive where the window's result is.
    """
    pair = graph.pair(last, "relu_backward", "max_pool_2d_backward")
    if pair is None:
        return
    first, pooling, relu = pair
    grad, indices = pooling.inputs
    forward = graph.maker(indices, "max_pool_2d")
    if forward is None or forward[1].inputs[0] != relu.inputs[1] or relu.inputs[0] != pooling.out:
        return
    if any(graph.is_changed(view, forward[0], last) for view in (relu.inputs[1], forward[1].outputs[0])):
        return
    masked = View(Memory(grad.memory.num_bytes), grad.offset, grad.shape, grad.dtype, grad.strides)
    graph.put(first, replace(relu, inputs=(grad, forward[1].outputs[0]), out=masked))
    graph.put(last, replace(pooling, inputs=(masked, indices), out=relu.out))
