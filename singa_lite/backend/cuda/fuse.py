# SPDX-License-Identifier: Apache-2.0
"""Fewer and smaller kernels for a recorded step: a ReLU becomes part of the addition before it.

The calls made here have an attribute that only this backend's ``add`` knows, ``relu``.
"""

from __future__ import annotations

from dataclasses import replace

from ...graph import View
from ..base import Call
from ..steps import Steps, relu_before_pooling


def fuse(calls: list[Call]) -> list[Call]:
    """The same step, the same bits."""
    steps = Steps(calls, is_float)
    for rule in (relu_before_pooling, _bias_and_relu, _add_and_relu):
        for number in range(len(calls)):
            rule(steps, number)
    return steps.rest()


def is_float(view: View) -> bool:
    return bool(view.dtype.kind == "f")


def _bias_and_relu(steps: Steps, last: int) -> None:
    """conv2d with bias, relu -> conv2d, add with ReLU."""
    relu = steps.kernel(last, "relu")
    first = None if relu is None else steps.maker(relu.inputs[0], "conv2d")
    conv = None if first is None else steps.kernel(first, "conv2d")
    if relu is None or first is None or conv is None or len(conv.inputs) != 3:
        return
    y = conv.outputs[0]
    if y != relu.inputs[0] or not steps.is_private(y) or not steps.can_move(first, last):
        return
    *images, bias = conv.inputs
    itemsize = bias.dtype.itemsize
    row = View(bias.memory, bias.offset, (*bias.shape, 1, 1), bias.dtype, (itemsize,) * 3)
    steps.put(first, replace(conv, inputs=tuple(images)))
    steps.put(last, replace(relu, kernel="add", inputs=(y, row), attributes={"relu": True}))


def _add_and_relu(steps: Steps, last: int) -> None:
    """add, relu -> add with ReLU."""
    relu = steps.kernel(last, "relu")
    first = None if relu is None else steps.maker(relu.inputs[0], "add")
    add = None if first is None else steps.kernel(first, "add")
    if relu is None or first is None or add is None:
        return
    if add.out == relu.inputs[0] and steps.is_private(add.out) and steps.can_move(first, last):
        steps.merge(first, last, replace(add, out=relu.out, attributes={"relu": True}))
