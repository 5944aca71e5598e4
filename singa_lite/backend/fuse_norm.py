# SPDX-License-Identifier: Apache-2.0
"""What stands beside a batch norm becomes part of it: a residual, a ReLU, and their gradients.

The calls made here are in Note [lowered calls] in base.py. A backend says by ``takes`` which it has kernels for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..graph.rewrite import GraphRewriter
from .fuse import are_alike

Takes = Callable[..., bool]  # (call, *views): whether it is fused with what has these arrays


def add_residual(graph: GraphRewriter, last: int, takes: Takes) -> None:
    """batchnorm_2d_train, add(x), relu -> batchnorm_2d_train with residual and ReLU."""
    found = graph.addition(last, "batchnorm_2d_train")
    if found is None:
        return
    first, norm, add, _, residual = found
    is_alike = add.inputs[0].shape == add.inputs[1].shape and are_alike(add.out, *add.inputs)
    if not is_alike or add.out.memory is add.inputs[0].memory or not takes(norm, *add.inputs, add.out):
        return
    if len(norm.inputs) == 3 and not norm.attributes.get("relu"):
        inputs, out = (*norm.inputs, residual), (add.out, *norm.outputs[1:])
        graph.merge(first, last, replace(norm, inputs=inputs, out=out))


def relu_after(graph: GraphRewriter, last: int, takes: Takes, names: tuple[str, ...]) -> None:
    """One of ``names``, relu -> the same with ReLU."""
    pair = graph.pair(last, "relu", *names)
    if pair is None:
        return
    first, call, relu = pair
    is_same = call.outputs[0].shape == relu.out.shape and are_alike(call.outputs[0], relu.out)
    if is_same and takes(call, relu.inputs[0], relu.out):
        out = (relu.out, *call.outputs[1:]) if isinstance(call.out, tuple) else relu.out
        graph.merge(first, last, replace(call, out=out, attributes={**call.attributes, "relu": True}))


def relu_in_norm_backward(graph: GraphRewriter, last: int, takes: Takes) -> None:
    """relu_backward, batchnorm_2d_backward -> batchnorm_2d_backward that computes the ReLU's gradient from x."""
    pair = graph.pair(last, "batchnorm_2d_backward", "relu_backward")
    forward_call = None if pair is None else graph.maker(pair[1].inputs[1], "batchnorm_2d_train")
    if pair is None or forward_call is None:
        return
    (first, relu, norm), (forward_number, forward) = pair, forward_call
    if len(norm.inputs) != 5 or len(forward.inputs) != 3 or not forward.attributes.get("relu"):
        return  # with a residual x alone does not decide the sign
    is_alike = are_alike(*norm.inputs[:2], relu.inputs[0])
    copied = graph.maker(forward.inputs[1], "copy")  # of the scale, where the output is computed again
    scale_number, scale = (
        (forward_number, forward.inputs[1]) if copied is None else (copied[0], copied[1].inputs[0])
    )
    if (
        is_alike
        and takes(norm, *relu.inputs, relu.out, *forward.inputs)
        and (forward.inputs[0], scale) == norm.inputs[1:3]
        and not graph.is_changed(scale, scale_number, last)
        and not any(graph.is_changed(view, forward_number, last) for view in forward.inputs)
    ):
        graph.merge(first, last, replace(norm, inputs=(relu.inputs[0], *norm.inputs[1:], forward.inputs[2])))
        if not any(view.memory.owner is not None or graph.readers(view) for view in forward.outputs):
            graph.put(forward_number, None)  # one that was computed again for the ReLU alone
