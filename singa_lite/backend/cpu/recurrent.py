# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers: one product for the inputs of all steps, then one product a step for all gates of the state.

What lives here: the walk over layers, directions and steps. What does not: what one step of a cell computes (cells.py).

Note [reserve on the CPU]: float32, or wider for wider weights; cell by cell what its forward pass kept, see ``Kept`` in
cells.py; then the outputs of all layers but the last.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ...dtypes import accumulation_dtype
from ..base import Array
from ..recurrent import RnnConfig, split_backward
from ._accumulation import pairwise_sum, upcast
from .cells import CELLS, Kept, sizes_kept

Shape = tuple[int, ...]


class Reserve:
    """Views into the reserve of one call.

    Attributes:
        kept: what each cell keeps.
        outputs: (T, N, directions * hidden) of each layer but the last.
    """

    def __init__(self, flat: Array, config: RnnConfig, steps: int, batch: int) -> None:
        self._flat, self._start = flat, 0
        shapes = sizes_kept(config)
        self.kept = [
            Kept(*(self._take((steps, batch, size)) for size in shapes)) for _ in range(config.num_cells)
        ]
        width = config.num_directions * config.hidden_size
        self.outputs = [self._take((steps, batch, width)) for _ in range(config.num_layers - 1)]

    def _take(self, shape: Shape) -> Array:
        size = shape[0] * shape[1] * shape[2]
        self._start += size
        return self._flat[self._start - size : self._start].reshape(shape)


def num_kept(config: RnnConfig, steps: int, batch: int) -> int:
    """Elements of the reserve."""
    width = config.num_directions * config.hidden_size
    return steps * batch * (config.num_cells * sum(sizes_kept(config)) + (config.num_layers - 1) * width)


class RecurrentKernels:
    """recurrent and its gradient, see KERNELS."""

    def recurrent_reserve_bytes(self, x_shape: Shape, dtype: Any, **options: Any) -> int:
        options.pop("lengths", None)
        config = RnnConfig(input_size=x_shape[2], **options)
        return num_kept(config, *x_shape[:2]) * accumulation_dtype(np.dtype(dtype)).itemsize

    def recurrent(
        self,
        x: Array,
        w: Array,
        *states: Array,
        out: tuple[Array, ...],
        lengths: tuple[int, ...] | None = None,
        **options: Any,
    ) -> None:
        config = RnnConfig(input_size=x.shape[2], **options)
        steps, batch, _ = x.shape
        alive = alive_rows(steps, lengths)
        x, w = only(upcast(x), alive), upcast(w)
        last = out[1 : 1 + config.num_states]
        flat = out[1 + config.num_states].view(x.dtype) if len(out) > 1 + config.num_states else None
        if flat is None:
            flat = np.empty(num_kept(config, steps, batch), x.dtype)
        reserve = Reserve(flat, config, steps, batch)
        y = out[0] if out[0].dtype == x.dtype else np.empty(out[0].shape, x.dtype)
        cells = config.split(w)
        for layer, (layer_x, layer_y) in enumerate(pairwise([x, *reserve.outputs, y])):
            for direction in range(config.num_directions):
                number = layer * config.num_directions + direction
                part = slice(direction * config.hidden_size, (direction + 1) * config.hidden_size)
                cell = CELLS[config.mode](cells[number])
                start = [upcast(state[number]).copy() for state in states]
                end = run(cell, layer_x, start, reserve.kept[number], layer_y[:, :, part], direction, alive)
                for state, value in zip(last, end, strict=True):
                    state[number] = value
        if y is not out[0]:
            out[0][...] = y

    def recurrent_backward(
        self,
        dy: Array,
        *inputs: Array,
        out: tuple[Array, ...],
        lengths: tuple[int, ...] | None = None,
        **options: Any,
    ) -> None:
        given, written = split_backward(options["mode"], inputs, out)
        dlast, x, w, states, y = given
        dw, dstart, reserve_bytes, dx = written
        config = RnnConfig(input_size=x.shape[2], **options)
        alive = alive_rows(len(x), lengths)
        x, w, y = only(upcast(x), alive), upcast(w), upcast(y)
        reserve = Reserve(reserve_bytes.view(x.dtype), config, *x.shape[:2])
        dweights = dw if dw.dtype == x.dtype else np.empty(dw.shape, x.dtype)
        cells, dcells = config.split(w), config.split(dweights)
        layers = [x, *reserve.outputs, y]
        layer_dy = only(upcast(dy), alive)
        for layer in reversed(range(config.num_layers)):
            layer_x, layer_y = layers[layer], layers[layer + 1]
            layer_dx = np.zeros(layer_x.shape, x.dtype) if layer > 0 or dx is not None else None
            for direction in range(config.num_directions):
                number = layer * config.num_directions + direction
                part = slice(direction * config.hidden_size, (direction + 1) * config.hidden_size)
                cell = CELLS[config.mode](cells[number])
                start = [upcast(state[number]) for state in states]
                dstates = [upcast(dstate[number]).copy() for dstate in dlast]
                walk = Walk(cell, reserve.kept[number], layer_y[:, :, part], start, direction, alive)
                walk.back(layer_dy[:, :, part], dstates)
                walk.add_gradients(layer_x, layer_dx, dcells[number])
                for dstate, value in zip(dstart, walk.dstart, strict=True):
                    dstate[number] = value
            layer_dy = layer_dx
        if dx is not None:
            dx[...] = layer_dy
        if dweights is not dw:
            dw[...] = dweights


def alive_rows(steps: int, lengths: tuple[int, ...] | None) -> Array | None:
    """Return (T, N, 1), whether a sequence still runs at a step; None if all run to the end."""
    if lengths is None:
        return None
    return (np.arange(steps)[:, None] < np.array(lengths, np.int64))[:, :, None]


def only(x: Array, alive: Array | None) -> Array:
    """Return ``x`` with zeros behind the ends, whatever its values are."""
    return x if alive is None else np.where(alive, x, 0).astype(x.dtype, copy=False)


def rows_of(x: Array) -> Array:
    """Return (T, N, size) as (T N, size)."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def order(steps: int, direction: int) -> range:
    """Return the steps in the order in which a direction takes them."""
    return range(steps) if direction == 0 else range(steps - 1, -1, -1)


def run(
    cell: Any, x: Array, state: list[Array], kept: Kept, y: Array, direction: int, alive: Array | None
) -> list[Array]:
    """Walk one cell over all steps; a sequence that has ended, or not begun, keeps its state and gives zeros."""
    np.matmul(rows_of(x), cell.w_x.T, out=rows_of(kept.gates))
    if cell.b_x is not None:
        kept.gates += cell.b_x + cell.b_in_sum
    for t in order(len(x), direction):
        after = cell.forward(kept, t, state)
        if alive is not None:
            after = [np.where(alive[t], new, old) for new, old in zip(after, state, strict=True)]
        y[t] = after[0] if alive is None else np.where(alive[t], after[0], 0)
        kept.carry(t, after)
        state = after
    return state


class Walk:
    """The way back of one cell.

    Attributes:
        dstart: gradients of the first state, once ``back`` was called.
    """

    def __init__(
        self, cell: Any, kept: Kept, y: Array, start: list[Array], direction: int, alive: Array | None
    ) -> None:
        self._cell, self._kept, self._alive = cell, kept, alive
        self._order = order(len(y), direction)
        self._before = previous(y, start[0], direction, alive)
        self._c_before = previous(kept.c, start[1], direction, None) if len(start) == 2 else None
        self._dgates = np.empty_like(kept.gates)  # of the gates' inputs
        self._state_dgates = cell.state_dgates(self._dgates)  # of the state's share of it
        self.dstart: list[Array] = []

    def back(self, dy: Array, dstates: list[Array]) -> None:
        """Compute the gradients of the gates and the first state from those of all outputs and the last state."""
        for t in reversed(self._order):
            later = list(dstates)
            dh = later[0] + dy[t]
            c_before = None if self._c_before is None else self._c_before[t]
            dstates = self._cell.backward(
                self._kept,
                t,
                self._before[t],
                c_before,
                [dh, *later[1:]],
                self._dgates[t],
                self._state_dgates[t],
            )
            if self._alive is not None:
                self._dgates[t] *= self._alive[t]
                if self._state_dgates is not self._dgates:
                    self._state_dgates[t] *= self._alive[t]
                dstates = [
                    np.where(self._alive[t], new, old) for new, old in zip(dstates, later, strict=True)
                ]
        self.dstart = dstates

    def add_gradients(self, x: Array, dx: Array | None, dcell: tuple[Any, ...]) -> None:
        """Write the gradients of a cell's weights, and add that of its input."""
        dw_x, dw_h, db_x, db_h = dcell
        dgates, state_dgates = rows_of(self._dgates), rows_of(self._state_dgates)
        np.matmul(dgates.T, rows_of(x), out=dw_x)
        np.matmul(state_dgates.T, rows_of(self._before), out=dw_h)
        if db_x is not None:
            db_x[...] = pairwise_sum(dgates, (0,))
            db_h[...] = pairwise_sum(state_dgates, (0,))
        if dx is not None:
            dx += (dgates @ self._cell.w_x).reshape(x.shape)


def previous(values: Array, start: Array, direction: int, alive: Array | None) -> Array:
    """Return (T, N, H): at each step what ``values`` were at the one a direction takes before it, first ``start``."""
    before = np.empty(values.shape, values.dtype)
    if len(values) == 0:
        return before
    if direction == 0:
        before[0], before[1:] = start, values[:-1]
    else:
        before[-1], before[:-1] = start, values[1:]
        if alive is not None:
            before[:-1] = np.where(alive[1:], before[:-1], start)
    return before
