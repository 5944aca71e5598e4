# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers by their textbook equations: one sequence, one step, one gate at a time, in float64."""

from __future__ import annotations

import numpy as np

GATES = {"tanh": "h", "relu": "h", "lstm": "ifgo", "gru": "rzn"}


def sigmoid(a: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-a))


def unpacked(
    w: np.ndarray, mode: str, size: int, hidden: int, layers: int, directions: int, bias: bool
) -> dict[tuple, np.ndarray]:
    """(kind, layer, direction, gate) -> matrix or bias, in cuDNN's order; kinds W, R, bW, bR."""
    names, shapes = [], []
    for kinds in (("W", "R"), ("bW", "bR")):
        if kinds[0] == "bW" and not bias:
            continue
        for layer in range(layers):
            for direction in range(directions):
                for kind in kinds:
                    for gate in GATES[mode]:
                        columns = hidden if kind == "R" else size if layer == 0 else directions * hidden
                        names.append((kind, layer, direction, gate))
                        shapes.append((hidden,) if len(kind) == 2 else (hidden, columns))
    assert w.size == sum(int(np.prod(shape)) for shape in shapes)
    found, start = {}, 0
    for name, shape in zip(names, shapes, strict=True):
        count = int(np.prod(shape))
        found[name] = w[start : start + count].reshape(shape)
        start += count
    return found


def step(mode: str, of: dict[str, tuple], x: np.ndarray, h: np.ndarray, c: np.ndarray) -> tuple:
    """One step of one sequence; of: gate -> (W, R, bW, bR)."""

    def inputs(gate: str) -> np.ndarray:
        return of[gate][0] @ x + of[gate][2] + of[gate][1] @ h + of[gate][3]

    if mode == "tanh":
        return np.tanh(inputs("h")), c
    if mode == "relu":
        return np.maximum(inputs("h"), 0), c
    if mode == "lstm":
        i, f, o = (sigmoid(inputs(gate)) for gate in "ifo")
        c = f * c + i * np.tanh(inputs("g"))
        return o * np.tanh(c), c
    r, z = sigmoid(inputs("r")), sigmoid(inputs("z"))
    w, recurrent, b_w, b_r = of["n"]
    n = np.tanh(w @ x + b_w + r * (recurrent @ h + b_r))
    return (1 - z) * n + z * h, c


def recurrent_by_hand(
    x: np.ndarray,
    w: np.ndarray,
    h0: np.ndarray,
    c0: np.ndarray | None = None,
    *,
    hidden_size: int,
    mode: str = "lstm",
    num_layers: int = 1,
    bias: bool = True,
    bidirectional: bool = False,
    lengths: tuple[int, ...] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(y, hy, cy) as autograd.recurrent gives them; cy means nothing but for lstm."""
    directions = 2 if bidirectional else 1
    weights = unpacked(w, mode, x.shape[2], hidden_size, num_layers, directions, bias)
    hy, cy = np.array(h0), np.array(h0 if c0 is None else c0)
    nothing = np.zeros(hidden_size)
    for layer in range(num_layers):
        y = np.zeros((*x.shape[:2], directions * hidden_size))
        for direction in range(directions):
            of = {
                gate: tuple(weights.get((k, layer, direction, gate), nothing) for k in ("W", "R", "bW", "bR"))
                for gate in GATES[mode]
            }
            cell = layer * directions + direction
            for n in range(x.shape[1]):
                end = x.shape[0] if lengths is None else lengths[n]
                for t in range(end) if direction == 0 else reversed(range(end)):
                    hy[cell, n], cy[cell, n] = step(mode, of, x[t, n], hy[cell, n], cy[cell, n])
                    y[t, n, direction * hidden_size : (direction + 1) * hidden_size] = hy[cell, n]
        x = y
    return x, hy, cy
