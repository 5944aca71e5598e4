# SPDX-License-Identifier: Apache-2.0
"""One step of each kind of recurrent cell, forward and backward, on all gates of a batch at once.

Symbols: a = W x + b_x + R h + b_h per gate, s = sigmoid.

    tanh  h' = tanh(a)          relu  h' = max(a, 0)
    lstm  i, f, o = s(a), g = tanh(a);  c' = f c + i g;  h' = o tanh(c')
    gru   r, z = s(a);  n = tanh(W x + b_x + r (R h + b_h));  h' = (1 - z) n + z h

Source: Hochreiter, Schmidhuber, "Long Short-Term Memory", 1997, with the forget gate of Gers et al., 2000; Cho et al.,
"Learning Phrase Representations using RNN Encoder-Decoder", 2014, with the reset gate behind the product, as in cuDNN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..base import Array
from ..recurrent import RnnConfig


@dataclass
class Kept:
    """Arrays that a cell keeps of its forward pass for its backward, each (T, N, size).

    Attributes:
        gates: what goes into the gates, and from its step on what they give.
        c: lstm: the state c after each step; gru: the state's share of the candidate, R h + b_h.
        tanh_c: lstm: tanh(c).
    """

    gates: Array
    c: Array = None
    tanh_c: Array = None

    def carry(self, t: int, state: list[Array]) -> None:
        """Keep the c after step t."""
        if len(state) == 2:
            self.c[t] = state[1]


def sizes_kept(config: RnnConfig) -> tuple[int, ...]:
    """Features of each member of Kept that the mode has."""
    return (config.num_rows, *(config.hidden_size,) * {"lstm": 2, "gru": 1}.get(config.mode, 0))


class Cell:
    """The weights of one layer in one direction; forward and backward of a step.

    Attributes:
        w_x, w_h, b_x, b_h: as ``RnnConfig.split`` gives them.
        b_in_sum: what of b_h is added to the gates' inputs before any step.
    """

    def __init__(self, weights: tuple[Array, Array, Array, Array]) -> None:
        self.w_x, self.w_h, self.b_x, self.b_h = weights
        self.w_h_across = np.ascontiguousarray(self.w_h.T)
        self.b_in_sum = self.b_h

    def state_dgates(self, dgates: Array) -> Array:
        """Return the array for the gradients of R h + b_h: that for W x + b_x's, as they are added."""
        return dgates

    def forward(self, kept: Kept, t: int, state: list[Array]) -> list[Array]:
        """Return the state after step t; overwrites kept.gates[t], W x + biases, by the gates' outputs."""
        raise NotImplementedError

    def backward(
        self,
        kept: Kept,
        t: int,
        before: Array,
        c_before: Array | None,
        dstates: list[Array],
        dgates: Array,
        state_dgates: Array,
    ) -> list[Array]:
        """Return the gradients of the state before step t from those of the state after it.

        Args:
            before: h before the step.
            c_before: c before it, for lstm.
            dstates: gradients of h and c after it.
            dgates: receives the gradients of the gates' inputs.
            state_dgates: receives those of the state's share of it; ``dgates`` itself where they are the same.
        """
        raise NotImplementedError


class TanhCell(Cell):
    def forward(self, kept: Kept, t: int, state: list[Array]) -> list[Array]:
        gates = kept.gates[t]
        gates += state[0] @ self.w_h_across
        return [np.tanh(gates, out=gates)]

    def backward(
        self, kept: Kept, t: int, before: Array, c_before: Array | None, dstates: list[Array], dgates: Array,
        state_dgates: Array,
    ) -> list[Array]:  # fmt: skip
        h = kept.gates[t]
        np.multiply(dstates[0], 1 - h * h, out=dgates)
        return [dgates @ self.w_h]


class ReluCell(Cell):
    def forward(self, kept: Kept, t: int, state: list[Array]) -> list[Array]:
        gates = kept.gates[t]
        gates += state[0] @ self.w_h_across
        return [np.maximum(gates, 0, out=gates)]

    def backward(
        self, kept: Kept, t: int, before: Array, c_before: Array | None, dstates: list[Array], dgates: Array,
        state_dgates: Array,
    ) -> list[Array]:  # fmt: skip
        np.multiply(dstates[0], kept.gates[t] > 0, out=dgates)
        return [dgates @ self.w_h]


class LstmCell(Cell):
    def __init__(self, weights: tuple[Array, Array, Array, Array]) -> None:
        super().__init__(weights)
        # s(a) = (1 + tanh(a / 2)) / 2, so that one tanh does for all gates
        self._hidden = self.w_h.shape[1]
        self._half = np.full(4 * self._hidden, 0.5, self.w_h.dtype)
        self._half[2 * self._hidden : 3 * self._hidden] = 1
        self._rest = 1 - self._half

    def forward(self, kept: Kept, t: int, state: list[Array]) -> list[Array]:
        gates = kept.gates[t]
        gates += state[0] @ self.w_h_across
        gates *= self._half
        np.tanh(gates, out=gates)
        gates *= self._half
        gates += self._rest
        i, f, g, o = np.split(gates, 4, 1)
        c = f * state[1]
        c += i * g
        tanh_c = np.tanh(c, out=kept.tanh_c[t])
        return [o * tanh_c, c]

    def backward(
        self, kept: Kept, t: int, before: Array, c_before: Array | None, dstates: list[Array], dgates: Array,
        state_dgates: Array,
    ) -> list[Array]:  # fmt: skip
        i, f, g, o = np.split(kept.gates[t], 4, 1)
        di, df, dg, do = np.split(dgates, 4, 1)
        dh, dc = dstates
        tanh_c = kept.tanh_c[t]
        dc = dc + dh * o * (1 - tanh_c * tanh_c)
        np.multiply(dc * g, i * (1 - i), out=di)
        np.multiply(dc * c_before, f * (1 - f), out=df)
        np.multiply(dc * i, 1 - g * g, out=dg)
        np.multiply(dh * tanh_c, o * (1 - o), out=do)
        return [dgates @ self.w_h, dc * f]


class GruCell(Cell):
    def __init__(self, weights: tuple[Array, Array, Array, Array]) -> None:
        super().__init__(weights)
        self._hidden = hidden = self.w_h.shape[1]
        if self.b_h is not None:  # the candidate's is multiplied by r first
            self.b_in_sum = self.b_h.copy()
            self.b_in_sum[2 * hidden :] = 0

    def state_dgates(self, dgates: Array) -> Array:
        return np.empty_like(dgates)

    def forward(self, kept: Kept, t: int, state: list[Array]) -> list[Array]:
        hidden, gates, h = self._hidden, kept.gates[t], state[0]
        of_state = h @ self.w_h_across
        switches = gates[:, : 2 * hidden]
        switches += of_state[:, : 2 * hidden]
        switches *= 0.5
        np.tanh(switches, out=switches)
        switches *= 0.5
        switches += 0.5
        kept.c[t] = of_state[:, 2 * hidden :]
        if self.b_h is not None:
            kept.c[t] += self.b_h[2 * hidden :]
        r, z, n = np.split(gates, 3, 1)
        n += r * kept.c[t]
        np.tanh(n, out=n)
        return [n + z * (h - n)]

    def backward(
        self, kept: Kept, t: int, before: Array, c_before: Array | None, dstates: list[Array], dgates: Array,
        state_dgates: Array,
    ) -> list[Array]:  # fmt: skip
        hidden, dh = self._hidden, dstates[0]
        r, z, n = np.split(kept.gates[t], 3, 1)
        dr, dz, dn = np.split(dgates, 3, 1)
        np.multiply(dh * (1 - z), 1 - n * n, out=dn)
        np.multiply(dh * (before - n), z * (1 - z), out=dz)
        np.multiply(dn * kept.c[t], r * (1 - r), out=dr)
        state_dgates[:, : 2 * hidden] = dgates[:, : 2 * hidden]
        np.multiply(dn, r, out=state_dgates[:, 2 * hidden :])
        return [state_dgates @ self.w_h + dh * z]


CELLS = {"tanh": TanhCell, "relu": ReluCell, "lstm": LstmCell, "gru": GruCell}
