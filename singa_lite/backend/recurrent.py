# SPDX-License-Identifier: Apache-2.0
"""The shape of a stack of recurrent layers, the offsets of its weights in one packed array, and its kernels' arguments.

What lives here: sizes, offsets and orders. What does not: how a cell computes (cpu/recurrent.py, cuDNN on CUDA).

Note [packed weights]: one flat array holds all weights of a stack, in the order cuDNN gives them. First all matrices,
layer by layer, in a bidirectional layer forward before backward: those that multiply the layer's input, gate by gate
and each (hidden, input) row-major, then those that multiply its own last output, each (hidden, hidden). Then, in the
same order, all biases, each (hidden,), one beside each matrix. Gates: lstm input, forget, candidate, output; gru reset,
update, candidate; tanh and relu have one. So the gates of a layer are one matrix (gates * hidden, input), the layout of
PyTorch's ``weight_ih_l0``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GATES = {"tanh": 1, "relu": 1, "lstm": 4, "gru": 3}


@dataclass(frozen=True)
class RnnConfig:
    """Recurrent layers on top of each other; the output of one, all directions joined, is the input of the next.

    Attributes:
        mode: a key of GATES.
        input_size: features of the first layer's input.
        hidden_size: features of the state, and of each direction's output.
        num_layers: how many.
        bidirectional: whether every layer also runs from the last step to the first, with weights of its own.
        bias: whether there are biases.
    """

    mode: str
    input_size: int
    hidden_size: int
    num_layers: int = 1
    bidirectional: bool = False
    bias: bool = True

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def num_cells(self) -> int:
        """Pairs of a layer and a direction: states of one batch element."""
        return self.num_layers * self.num_directions

    @property
    def num_rows(self) -> int:
        """Gates times hidden features: rows of every matrix of a cell."""
        return GATES[self.mode] * self.hidden_size

    @property
    def num_states(self) -> int:
        """2 for lstm, whose cells keep c beside h, else 1."""
        return 2 if self.mode == "lstm" else 1

    def input_size_of(self, layer: int) -> int:
        """Features of the input of layer number ``layer``."""
        return self.input_size if layer == 0 else self.num_directions * self.hidden_size

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Numbers of elements: (all matrices, all biases) of each layer."""
        num_biases = 2 * self.num_directions * self.num_rows if self.bias else 0
        for layer in range(self.num_layers):
            columns = self.input_size_of(layer) + self.hidden_size
            yield self.num_directions * self.num_rows * columns, num_biases

    @property
    def num_weights(self) -> int:
        """Elements of the packed array."""
        return sum(map(sum, self.sizes()))

    def split(self, weights: Any) -> list[tuple[Any, Any, Any, Any]]:
        """Views into the packed array (numpy's or cupy's), one tuple a cell, layer by layer, direction by direction.

        Returns:
            of each cell: (matrix of the input (rows, input), matrix of the state (rows, hidden), bias of the first
            (rows,), bias of the second (rows,)); both biases None without.
        """
        start = 0

        def take(*shape: int) -> Any:
            nonlocal start
            size = shape[0] * (shape[1] if len(shape) == 2 else 1)
            start += size
            return weights[start - size : start].reshape(shape)

        rows, hidden = self.num_rows, self.hidden_size
        layers = [number // self.num_directions for number in range(self.num_cells)]
        matrices = [(take(rows, self.input_size_of(layer)), take(rows, hidden)) for layer in layers]
        biases = [(take(rows), take(rows)) if self.bias else (None, None) for _ in layers]
        return [(*pair, *both) for pair, both in zip(matrices, biases, strict=True)]


def split_backward(
    mode: str, inputs: tuple[Any, ...], out: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the arrays of the kernel ``recurrent_backward`` one by one, as the table of base.py orders them.

    Args:
        mode: a key of GATES.
        inputs: behind dy.
        out: what it writes.

    Returns:
        (the gradients of the last states, x, weights, states, y) and (dw, the gradients of the states, reserve, dx); dx
        is None where it is not asked for.
    """
    num_states = 2 if mode == "lstm" else 1
    x, w = inputs[num_states:][:2]
    dx = out[2 + num_states] if len(out) > 2 + num_states else None
    given = inputs[:num_states], x, w, inputs[num_states + 2 : -1], inputs[-1]
    return given, (out[0], out[1 : 1 + num_states], out[1 + num_states], dx)
