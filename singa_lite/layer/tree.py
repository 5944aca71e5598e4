# SPDX-License-Identifier: Apache-2.0
"""A model's layers as records of its steps look at them (slots.Tree)."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import state
from ..tensor import Tensor
from .base import Layer, items


class LayerTree:
    """A layer and all layers below it, each once.

    Args:
        root: where the tree begins.
    """

    def __init__(self, root: Layer) -> None:
        self._root = root

    def layers(self) -> Iterator[tuple[str, Layer]]:
        """Give each layer with its path from the root."""
        return _walk(self._root, "", set())

    def states(self) -> list[Tensor]:
        """Return parameters and buffers."""
        return list(self._root.get_states().values())

    def generation(self) -> int:
        """Return a number that changes when an attribute of any layer is set."""
        return state.generation


def _walk(layer: Layer, path: str, seen: set[int]) -> Iterator[tuple[str, Layer]]:
    """``seen`` holds the id() of layers that are alive because the root holds them."""
    seen.add(id(layer))
    yield path, layer
    for name, value in vars(layer).items():
        for label, entry in items(f"{path}.{name}" if path else name, value):
            if isinstance(entry, Layer) and id(entry) not in seen:
                yield from _walk(entry, label, seen)
