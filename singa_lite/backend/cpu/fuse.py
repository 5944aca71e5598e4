# SPDX-License-Identifier: Apache-2.0
"""Fewer kernels for a recorded step: what follows a convolution, a product or a batch norm becomes part of it.

The calls made here are in Note [lowered calls] in ../base.py; only compiled kernels know them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from ...dtypes import bfloat16, is_narrow
from ...graph.memory import View, row_major
from ...graph.nodes import Kernel, Node
from ...graph.rewrite import GraphRewriter
from ..fuse import apply_rules, are_alike, relu_before_pooling
from ..fuse_norm import add_residual, relu_after, relu_in_norm_backward
from .fuse_rows import RULES


def is_compiled_dtype(view: View) -> bool:
    """Return whether it is a float32 or bfloat16 array in this machine's byte order."""
    return bool(view.dtype in (np.float32, bfloat16) and view.dtype.isnative)


def _is_compiled(call: Kernel, *others: View) -> bool:
    """Return whether there is compiled code for these arrays and ``others``: numpy's kernels have no fused calls."""
    views = (*call.inputs, *call.outputs)
    if any(0 in view.shape or not view.is_row_major for view in (*views, *others)):
        return False
    if call.name == "conv2d" and not takes_convolution(call):
        return False
    a, b = views[0].shape, views[1].shape
    return call.name != "matmul" or (len(a) == len(b) and a[:-2] == b[:-2])


def takes_convolution(call: Kernel) -> bool:
    """Return whether there is compiled code for the dtypes of a convolution, or of one of its gradients.

    Beside images of 16 bits there is none for a bias, or for gradients of weights and a bias, that have 16 bits too, as
    those do that the step has computed.
    """
    is_weight_gradient = call.name == "conv2d_backward_weight"
    images, rest = call.inputs[0], call.outputs if is_weight_gradient else call.inputs[2:]
    return not is_narrow(images.dtype) or all(view.dtype == np.float32 for view in rest)


def fuse(nodes: list[Node]) -> list[Node]:
    """Return the same step in fewer kernels."""
    rules = (
        _add_bias,
        partial(add_residual, takes=_is_compiled),
        partial(relu_after, takes=_is_compiled, names=("conv2d", "matmul", "batchnorm_2d_train")),
        relu_before_pooling,
        partial(relu_in_norm_backward, takes=_is_compiled),
        *RULES,
    )
    return apply_rules(nodes, is_compiled_dtype, rules)


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
        and are_alike(add.out, product, call.out)
        and add.out.shape == product.shape
        and add.out.strides == row_major(add.out.shape, add.out.dtype)
        and _is_compiled(call, bias, product)
    ):
        out = replace(add.out, shape=call.out.shape, strides=row_major(call.out.shape, add.out.dtype))
        graph.merge(first, last, replace(call, inputs=(*call.inputs, bias), out=out))
