# SPDX-License-Identifier: Apache-2.0
"""Fewer kernels for a recorded step: what follows a convolution, a product or a batch norm becomes part of it.

The calls made here are in Note [lowered calls] in ../base.py; only compiled kernels know them.
"""

from __future__ import annotations

from dataclasses import replace

from ...graph import KernelCall, View
from ..base import Call
from ..steps import Steps, relu_before_pooling


def is_float32(view: View) -> bool:
    """Whether it is a float32 array in this machine's byte order."""
    return bool(view.dtype == "float32" and view.dtype.isnative)


def _is_compiled(call: KernelCall) -> bool:
    """Whether there is compiled code for arrays of these shapes: numpy's kernels know no fused calls."""
    views = (*call.inputs, *call.outputs)
    if any(0 in view.shape for view in views):
        return False
    a, b = views[0].shape, views[1].shape
    return call.kernel != "matmul" or (len(a) == len(b) <= 3 and (len(a) == 2 or a[0] == b[0]))


def fuse(calls: list[Call]) -> list[Call]:
    """The same step in fewer calls."""
    steps = Steps(calls, is_float32)
    for rule in (_add_bias, _add_residual, _relu_after, relu_before_pooling, _relu_in_norm_backward):
        for number in range(len(calls)):
            rule(steps, number)
    return steps.rest()


def _add_bias(steps: Steps, last: int) -> None:
    """matmul, add(row) -> matmul with bias."""
    pair = steps.pair(last, "add", "matmul")
    if pair is None:
        return
    first, call, add = pair
    product, bias = add.inputs
    if (
        product == call.out
        and len(product.shape) == 2
        and product.shape[1:] == bias.shape
        and _is_compiled(call)
    ):
        steps.merge(first, last, replace(call, inputs=(*call.inputs, bias), out=add.out))


def _add_residual(steps: Steps, last: int) -> None:
    """batchnorm_2d_train, add(x), relu -> batchnorm_2d_train with residual and ReLU."""
    pairs = [(steps.pair(last, "add", "batchnorm_2d_train", argument=number), number) for number in (0, 1)]
    found = [(*pair, number) for pair, number in pairs if pair is not None]
    if not found:
        return
    first, norm, add, number = max(found, key=lambda place: place[0])
    if add.inputs[0].shape != add.inputs[1].shape or add.out.memory is add.inputs[0].memory:
        return
    if len(norm.inputs) == 3 and not norm.attributes.get("relu"):
        inputs, out = (*norm.inputs, add.inputs[1 - number]), (add.out, *norm.outputs[1:])
        steps.merge(first, last, replace(norm, inputs=inputs, out=out))


def _relu_after(steps: Steps, last: int) -> None:
    """conv2d | matmul | batchnorm_2d_train, relu -> the same with ReLU."""
    pair = steps.pair(last, "relu", "conv2d", "matmul", "batchnorm_2d_train")
    if pair is None:
        return
    first, call, relu = pair
    if call.outputs[0].shape == relu.out.shape and _is_compiled(call):
        out = (relu.out, *call.outputs[1:]) if isinstance(call.out, tuple) else relu.out
        steps.merge(first, last, replace(call, out=out, attributes={**call.attributes, "relu": True}))


def _relu_in_norm_backward(steps: Steps, last: int) -> None:
    """relu_backward, batchnorm_2d_backward -> batchnorm_2d_backward that computes the ReLU's gradient from x."""
    pair = steps.pair(last, "batchnorm_2d_backward", "relu_backward")
    made = None if pair is None else steps.maker(pair[1].inputs[1], "batchnorm_2d_train")
    if pair is None or made is None:
        return
    (first, relu, norm), (forward_number, forward) = pair, made
    if len(norm.inputs) != 5 or len(forward.inputs) != 3 or not forward.attributes.get("relu"):
        return  # with a residual x alone does not tell the sign
    if forward.inputs[0] == norm.inputs[1] and not steps.may_update(forward_number, last):
        steps.merge(first, last, replace(norm, inputs=(relu.inputs[0], *norm.inputs[1:], forward.inputs[2])))
