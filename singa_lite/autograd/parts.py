# SPDX-License-Identifier: Apache-2.0
"""Gradients in parts, each of parameters that may change while the rest of backward still runs.

An optimizer that updates a part at once gives the memory of its gradients back for those that follow: together they
are as large as the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import GraphError
from ..graph.memory import root_of
from ..tensor import Tensor
from ..tensor.pytree import leaves
from .engine import Node, backward, nodes_behind

Pair = tuple[Tensor, Tensor]  # a parameter and its gradient


class BackwardPairs:
    """The parameters and gradients of a backward pass that runs when they are asked for: all, or once in parts.

    Args:
        y: as in ``backward``, of one element.
        part_bytes: of gradients, before they are a part.
    """

    def __init__(self, y: Tensor, part_bytes: int) -> None:
        self._pairs: Iterator[Pair] | None = backward(y)
        assert y.creator is not None  # or backward would have raised
        self._nodes, self._part_bytes = nodes_behind(y.creator), part_bytes
        self._all: list[Pair] | None = None

    def __iter__(self) -> Iterator[Pair]:
        """Run backward to its end, if it has not; iterate over all pairs, as often as asked."""
        if self._all is None:
            self._all = list(self._start())
        return iter(self._all)

    def parts(self) -> Iterator[list[Pair]]:
        """Run backward; yield lists, each as soon as no operator that is left reads its parameters. Keeps none of them.

        An operator reads what its context has saved. One from outside the package may keep arrays elsewhere, on itself
        as SINGA's do: with such a one there is a single list, as there is if all pairs were asked for before.

        Raises:
            GraphError: it was called before.
        """
        pairs = iter(self) if self._all is not None else self._start()
        may_part = all(type(node.op).__module__.startswith(f"{__package__}.") for node in self._nodes)
        waiting: list[Pair] = []
        num_bytes = 0
        for pair in pairs:
            waiting.append(pair)
            num_bytes += pair[1].array.nbytes
            if may_part and self._all is None and num_bytes >= self._part_bytes:
                read = _read_by(self._nodes, type(pair[0].array))
                ready = [pair for pair in waiting if id(root_of(pair[0].array)) not in read]
                waiting = [pair for pair in waiting if id(root_of(pair[0].array)) in read]
                num_bytes = 0
                del pair  # the caller alone has the gradients
                if ready:
                    yield ready
                del ready
        if waiting:
            yield waiting

    def _start(self) -> Iterator[Pair]:
        pairs, self._pairs = self._pairs, None
        if pairs is None:
            raise GraphError(
                "these gradients were applied in parts, which keeps none; make a list of the pairs to use them again"
            )
        return pairs


def _read_by(nodes: Sequence[Node], kind: type) -> set[int]:
    """Return ids of the arrays, of type ``kind``, that own what ``nodes`` read which backward has not visited yet."""
    saved = [node.context.saved for node in nodes if node.context is not None]
    return {id(root_of(array)) for array in leaves(saved, kind)}
