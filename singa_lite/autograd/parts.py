# SPDX-License-Identifier: Apache-2.0
"""Gradients in parts, each of parameters that may change while the rest of backward still runs.

An optimizer that updates a part at once gives the memory of its gradients back for those that follow: together they
are as large as the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..graph.memory import root_of
from ..tensor import Tensor
from ..tensor.pytree import leaves
from .engine import Node, backward, nodes_behind

Pair = tuple[Tensor, Tensor]  # a parameter and its gradient


def backward_in_parts(y: Tensor, part_bytes: int) -> Iterator[list[Pair]]:
    """Run ``backward``; yield its pairs in lists, each once no operator that is left reads its parameters.

    An operator reads what its context has saved. One from outside the package may keep arrays elsewhere, on itself as
    SINGA's do: with such a one there is a single list.

    Args:
        y: as in ``backward``, of one element.
        part_bytes: of gradients, before they are a list. The last list has the rest, perhaps nothing.
    """
    pairs = backward(y)
    assert y.creator is not None  # or backward would have raised
    nodes = nodes_behind(y.creator)
    may_part = all(type(node.op).__module__.startswith(f"{__package__}.") for node in nodes)
    waiting: list[Pair] = []
    num_bytes = 0
    for pair in pairs:
        waiting.append(pair)
        num_bytes += pair[1].array.nbytes
        if may_part and num_bytes >= part_bytes:
            read = _read_by(nodes, type(pair[0].array))
            ready = [pair for pair in waiting if id(root_of(pair[0].array)) not in read]
            waiting = [pair for pair in waiting if id(root_of(pair[0].array)) in read]
            num_bytes = 0
            del pair  # the caller alone has the gradients
            yield ready
            del ready
    yield waiting


def _read_by(nodes: Sequence[Node], kind: type) -> set[int]:
    """Return ids of the arrays, of type ``kind``, that own what ``nodes`` read which backward has not visited yet."""
    saved = [node.context.saved for node in nodes if node.context is not None]
    return {id(root_of(array)) for array in leaves(saved, kind)}
