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

from ..base import Array
from ..recurrent import Stack
from ._wide import wide, wide_dtype
from .cells import CELLS, Kept, sizes_kept

Shape = tuple[int, ...]


class Reserve:
    """Views into the reserve of one call.

    Attributes:
        kept: what each cell keeps.
        outputs: (T, N, directions * hidden) of each layer but the last.
    """

    def __init__(self, flat: Array, stack: Stack, steps: int, batch: int) -> None:
        self._flat, self._start = flat, 0
        shapes = sizes_kept(stack)
        self.kept = [
            Kept(*(self._take((steps, batch, size)) for size in shapes)) for _ in range(stack.num_cells)
        ]
        width = stack.num_directions * stack.hidden_size
        self.outputs = [self._take((steps, batch, width)) for _ in range(stack.num_layers - 1)]

    def _take(self, shape: Shape) -> Array:
        size = shape[0] * shape[1] * shape[2]
        self._start += size
        return self._flat[self._start - size : self._start].reshape(shape)


def num_kept(stack: Stack, steps: int, batch: int) -> int:
    """Elements of the reserve."""
    width = stack.num_directions * stack.hidden_size
    return steps * batch * (stack.num_cells * sum(sizes_kept(stack)) + (stack.num_layers - 1) * width)


class RecurrentKernels:
    """recurrent and its gradient, see KERNELS."""

    def recurrent_reserve_bytes(self, x_shape: Shape, dtype: Any, **options: Any) -> int:
        options.pop("lengths", None)
        stack = Stack(input_size=x_shape[2], **options)
        return num_kept(stack, *x_shape[:2]) * wide_dtype(np.dtype(dtype)).itemsize

    def recurrent(
        self,
        x: Array,
        w: Array,
        *states: Array,
        out: tuple[Array, ...],
        lengths: tuple[int, ...] | None = None,
        **options: Any,
    ) -> None:
        stack = Stack(input_size=x.shape[2], **options)
        steps, batch, _ = x.shape
        alive = alive_rows(steps, lengths)
        x, w = only(wide(x), alive), wide(w)
        last = out[1 : 1 + stack.num_states]
        flat = out[1 + stack.num_states].view(x.dtype) if len(out) > 1 + stack.num_states else None
        if flat is None:
            flat = np.empty(num_kept(stack, steps, batch), x.dtype)
        reserve = Reserve(flat, stack, steps, batch)
        y = out[0] if out[0].dtype == x.dtype else np.empty(out[0].shape, x.dtype)
        cells = stack.split(w)
        for layer, (given, made) in enumerate(pairwise([x, *reserve.outputs, y])):
            for direction in range(stack.num_directions):
                number = layer * stack.num_directions + direction
                part = slice(direction * stack.hidden_size, (direction + 1) * stack.hidden_size)
                cell = CELLS[stack.mode](cells[number])
                start = [wide(state[number]).copy() for state in states]
                end = run(cell, given, start, reserve.kept[number], made[:, :, part], direction, alive)
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
        num_states = 2 if options["mode"] == "lstm" else 1
        dlast, (x, w), states = inputs[:num_states], inputs[num_states:][:2], inputs[num_states + 2 : -1]
        stack = Stack(input_size=x.shape[2], **options)
        alive = alive_rows(len(x), lengths)
        x, w, y = only(wide(x), alive), wide(w), wide(inputs[-1])
        dw, dstart, reserve_bytes = out[0], out[1 : 1 + num_states], out[1 + num_states]
        dx = out[2 + num_states] if len(out) > 2 + num_states else None
        reserve = Reserve(reserve_bytes.view(x.dtype), stack, *x.shape[:2])
        dweights = dw if dw.dtype == x.dtype else np.empty(dw.shape, x.dtype)
        cells, dcells = stack.split(w), stack.split(dweights)
        layers = [x, *reserve.outputs, y]
        dmade = only(wide(dy), alive)
        for layer in reversed(range(stack.num_layers)):
            given, made = layers[layer], layers[layer + 1]
            dgiven = np.zeros(given.shape, x.dtype) if layer > 0 or dx is not None else None
            for direction in range(stack.num_directions):
                number = layer * stack.num_directions + direction
                part = slice(direction * stack.hidden_size, (direction + 1) * stack.hidden_size)
                cell = CELLS[stack.mode](cells[number])
                start = [wide(state[number]) for state in states]
                slopes = [wide(dstate[number]).copy() for dstate in dlast]
                walk = Walk(cell, reserve.kept[number], made[:, :, part], start, direction, alive)
                walk.back(dmade[:, :, part], slopes)
                walk.add_gradients(given, dgiven, dcells[number])
                for dstate, value in zip(dstart, walk.dstart, strict=True):
                    dstate[number] = value
            dmade = dgiven
        if dx is not None:
            dx[...] = dmade
        if dweights is not dw:
            dw[...] = dweights


def alive_rows(steps: int, lengths: tuple[int, ...] | None) -> Array | None:
    """(T, N, 1), whether a sequence still runs at a step; None if all run to the end."""
    if lengths is None:
        return None
    return (np.arange(steps)[:, None] < np.array(lengths, np.int64))[:, :, None]


def only(x: Array, alive: Array | None) -> Array:
    """``x`` with zeros behind the ends, whatever stands there."""
    return x if alive is None else np.where(alive, x, 0).astype(x.dtype, copy=False)


def rows_of(x: Array) -> Array:
    """(T, N, size) as (T N, size)."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def order(steps: int, direction: int) -> range:
    """The steps in the order in which a direction takes them."""
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
            kept.carry(t, after)
            y[t] = np.where(alive[t], after[0], 0)
        else:
            kept.carry(t, after)
            y[t] = after[0]
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
        self._slopes = np.empty_like(kept.gates)  # of what goes into the gates
        self._state_slopes = cell.state_slopes(self._slopes)  # of the state's share of it
        self.dstart: list[Array] = []

    def back(self, dy: Array, slopes: list[Array]) -> None:
        """From gradients of all outputs and of the last state to those of the gates and of the first state."""
        for t in reversed(self._order):
            later = list(slopes)
            dh = later[0] + dy[t]
            c_before = None if self._c_before is None else self._c_before[t]
            slopes = self._cell.backward(
                self._kept,
                t,
                self._before[t],
                c_before,
                [dh, *later[1:]],
                self._slopes[t],
                self._state_slopes[t],
            )
            if self._alive is not None:
                self._slopes[t] *= self._alive[t]
                if self._state_slopes is not self._slopes:
                    self._state_slopes[t] *= self._alive[t]
                slopes = [np.where(self._alive[t], new, old) for new, old in zip(slopes, later, strict=True)]
        self.dstart = slopes

    def add_gradients(self, x: Array, dx: Array | None, dcell: tuple[Any, ...]) -> None:
        """Write the gradients of a cell's weights, and add that of its input."""
        dw_x, dw_h, db_x, db_h = dcell
        slopes, state_slopes = rows_of(self._slopes), rows_of(self._state_slopes)
        np.matmul(slopes.T, rows_of(x), out=dw_x)
        np.matmul(state_slopes.T, rows_of(self._before), out=dw_h)
        if db_x is not None:
            np.sum(slopes, 0, out=db_x)
            np.sum(state_slopes, 0, out=db_h)
        if dx is not None:
            dx += (slopes @ self._cell.w_x).reshape(x.shape)


def previous(values: Array, start: Array, direction: int, alive: Array | None) -> Array:
    """(T, N, H): at each step what ``values`` were at the one a direction takes before it, first ``start``."""
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
