# SPDX-License-Identifier: Apache-2.0
"""Recorded attention keeps no probabilities.

The kernels made here, ``LOWERED``, are compiled ones that no backend has otherwise; native/kernels/block_attention.cc
says what they compute. That they take a call is checked here, as there is no other code for it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...graph.memory import Memory, View, row_major
from ...graph.rewrite import GraphRewriter

LOWERED = frozenset(
    {
        "block_attention",
        "block_attention_backward",
    }
)


def _are_plain(*views: View) -> bool:
    """Return whether all are row-major float32 arrays with elements, in this machine's byte order."""
    return all(
        view.dtype == "float32"
        and view.dtype.isnative
        and 0 not in view.shape
        and view.strides == row_major(view.shape, view.dtype)
        for view in views
    )


def attention_without_probabilities(graph: GraphRewriter, number: int) -> None:
    """attention, attention_backward -> block_attention and its gradient, which computes probabilities again."""
    call = graph.kernel(number, "attention")
    if call is None or not _are_plain(*call.inputs, *call.outputs):
        return
    y, probabilities = call.outputs
    readers = graph.readers(probabilities)
    if probabilities.memory.owner is not None or len(readers) > 1:
        return
    gradient = graph.kernel(readers[0], "attention_backward") if readers else None
    if readers and (
        gradient is None
        or gradient.inputs[1] != probabilities
        or not _are_plain(*gradient.inputs, *gradient.outputs)
    ):
        return
    shape, dtype = probabilities.shape[:3], probabilities.dtype
    logsumexp = View(Memory(math.prod(shape) * dtype.itemsize), 0, shape, dtype, row_major(shape, dtype))
    graph.put(number, replace(call, name="block_attention", out=(y, logsumexp)))
    if gradient is not None:
        inputs = (gradient.inputs[0], logsumexp, *gradient.inputs[2:])
        graph.put(readers[0], replace(gradient, name="block_attention_backward", inputs=inputs))


RULES = (attention_without_probabilities,)
