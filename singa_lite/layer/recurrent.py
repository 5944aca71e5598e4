# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers: RNN and LSTM over lists of steps, CudnnRNN over whole sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .. import autograd
from ..autograd.ops.dropout import check_ratio
from ..autograd.ops.recurrent import check_lengths, unbind
from ..backend.recurrent import RnnConfig
from ..errors import DTypeError, OptionError, ShapeError, check_bool, check_choice, check_int, is_one_of
from ..tensor import Tensor, to_numpy
from .base import Layer

__all__ = ["LSTM", "RNN", "CudnnRNN", "RNN_Base"]

INITIAL_STD = 0.01  # of the weights of RNN and LSTM, as in SINGA
MODES = {"vanilla": "tanh", "tanh": "tanh", "relu": "relu", "lstm": "lstm", "gru": "gru"}


class RNN_Base(Layer):
    """Base of RNN and LSTM: one layer in one direction over a list of steps.

    Steps and state are joined to what ``autograd.recurrent`` takes, so the whole list is one call of it.

    Args:
        input_size: features of a step, >= 1.
        hidden_size: features of the state, >= 1.
        nonlinearity: of the state.
        num_layers, batch_first, dropout, bidirectional: SINGA takes them and does without; here all but these
            values are an OptionError. CudnnRNN has them.
        bias: whether there are biases.
    """

    mode = "tanh"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        nonlinearity: str,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self.input_size = check_int(where, "input_size", input_size, 1)
        self.hidden_size = check_int(where, "hidden_size", hidden_size, 1)
        given = {"num_layers": num_layers, "batch_first": batch_first, "dropout": dropout}
        given["bidirectional"] = bidirectional
        for (name, value), only in zip(given.items(), (1, False, 0, False), strict=True):
            if not is_one_of(value, (only,)):
                raise OptionError(
                    f"{where}: {name} = {value!r} does nothing for a list of steps, only {only!r} can be given; "
                    "CudnnRNN has such layers, on every device"
                )
        self.nonlinearity = nonlinearity
        self.bias = check_bool(where, "bias", bias)

    def _matrix_pair(self, suffix: str, like: Tensor) -> None:
        """Make the parameters Wx and Wh of one gate."""
        for name, rows in ((f"Wx{suffix}", self.input_size), (f"Wh{suffix}", self.hidden_size)):
            setattr(self, name, self.new_parameter(name, (rows, self.hidden_size), like))
            getattr(self, name).gaussian(0.0, INITIAL_STD)

    def _check(self, xs: object, states: Sequence[object]) -> list[Tensor]:
        """Return the steps as a list; a typed error unless they and the states fit."""
        if not isinstance(xs, (list, tuple)):
            raise DTypeError(f"{self!r}: expected a list of Tensors, one a step, got {type(xs).__name__}")
        if not xs:
            raise ShapeError(f"{self!r}: expected at least one step")
        for tensor in (*xs, *states):
            self.check_float(tensor)
        batch = xs[0].shape[0] if xs[0].ndim() else 0
        self._check_shapes("step", xs, (batch, self.input_size))
        self._check_shapes("state", states, (batch, self.hidden_size))
        return list(xs)

    def _check_shapes(self, what: str, tensors: Sequence[Any], shape: tuple[int, ...]) -> None:
        for tensor in tensors:
            if tensor.shape != shape:
                raise ShapeError(f"{self!r}: every {what} must have the shape {shape}, not {tensor.shape}")

    def _run(self, xs: list[Tensor], weights: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """(outputs of all steps (T, N, H), each state after the last (N, H))."""
        batch = xs[0].shape[0]
        joined = xs[0] if len(xs) == 1 else autograd.cat(xs, 0)
        y, *last = autograd.recurrent(
            autograd.reshape(joined, (len(xs), batch, self.input_size)),
            weights,
            *(autograd.reshape(state, (1, batch, self.hidden_size)) for state in states),
            hidden_size=self.hidden_size,
            mode=self.mode,
            bias=self.bias,
        )
        return (y, *(autograd.reshape(state, (batch, self.hidden_size)) for state in last))


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Matrices side by side, each (rows, H), as the packed rows of their transposes."""
    joined = tensors[0] if len(tensors) == 1 else autograd.cat(tensors, 1)
    return autograd.reshape(autograd.transpose(joined, (1, 0)), (-1,))


class RNN(RNN_Base):
    """h' = f(x Wx + h Wh + b) for each step of a list, f being tanh or relu.

    Wx (input, hidden) and Wh (hidden, hidden) start as N(0, 0.01^2), b (hidden,) as zeros.

    Args:
        nonlinearity: "tanh" or "relu".
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: see RNN_Base.

    Raises:
        OptionError: an option is out of range, or one that a list of steps cannot have.
        ShapeError, DTypeError: at a call, if a step is not (N, input_size) or h0 not (N, hidden_size).
    """

    Wx: Tensor
    Wh: Tensor
    b: Tensor

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
    ) -> None:
        check_choice("RNN", "nonlinearity", nonlinearity, ("tanh", "relu"))
        super().__init__(
            input_size, hidden_size, nonlinearity, num_layers, bias, batch_first, dropout, bidirectional
        )
        self.mode = nonlinearity

    def initialize(self, xs: Sequence[Tensor], h0: Tensor) -> None:
        first = self._check(xs, [h0])[0]
        self._matrix_pair("", first)
        if self.bias:
            self.b = self.new_parameter("b", (self.hidden_size,), first)

    def forward(self, xs: Sequence[Tensor], h0: Tensor) -> tuple[list[Tensor], Tensor]:
        """Steps (N, input_size) and first state (N, hidden_size) -> (the states after each step, the last one)."""
        outputs = unbind(self._run(self._check(xs, [h0]), self._weights(), h0)[0])
        return list(outputs), outputs[-1]

    def step_forward(
        self,
        x: Tensor,
        h: Tensor,
        Wx: Tensor | None = None,
        Wh: Tensor | None = None,
        b: Tensor | None = None,
    ) -> Tensor:
        """Return the state after one step, with other weights if they are given.

        Raises:
            OptionError: some are given, not all. ShapeError: one has another shape than this layer's.
        """
        given = {"Wx": Wx, "Wh": Wh, **({"b": b} if self.bias or b is not None else {})}
        if all(weight is None for weight in given.values()):
            return self([x], h)[1]  # type: ignore[no-any-return]
        if Wx is None or Wh is None or (b is None) == self.bias:
            wanted = "Wx, Wh and b" if self.bias else "Wx and Wh, as there is no bias"
            raise OptionError(f"{self!r}: step_forward: give all of {wanted}, or none")
        shapes = (
            (self.input_size, self.hidden_size),
            (self.hidden_size, self.hidden_size),
            (self.hidden_size,),
        )
        for (name, weight), shape in zip(given.items(), shapes, strict=False):
            self.check_float(weight)
            self._check_shapes(name, [weight], shape)
        return self._run(self._check([x], [h]), self._packed(Wx, Wh, b), h)[1]

    def _weights(self) -> Tensor:
        return self._packed(self.Wx, self.Wh, self.b if self.bias else None)

    def _packed(self, Wx: Tensor, Wh: Tensor, b: Tensor | None) -> Tensor:
        """Return all weights, see Note [packed weights]; the second bias of cuDNN's is zero."""
        parts = [flat([Wx]), flat([Wh])]
        if b is not None:
            parts += [b, Tensor(b.shape, b.device, b.dtype, requires_grad=False)]
        return autograd.cat(parts, 0)


class LSTM(RNN_Base):
    """i, f, o = sigmoid(x Wx + Bx + h Wh + Bh), g = tanh of the same; c' = f c + i g; h' = o tanh(c').

    Each gate has its own Wx_* (input, hidden), Wh_* (hidden, hidden), which start as N(0, 0.01^2), and Bx_*, Bh_*
    (hidden,), which start as zeros.

    Args:
        nonlinearity: "tanh"; SINGA takes any and uses tanh.
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: see RNN_Base.

    Raises:
        OptionError: an option is out of range, or one that a list of steps cannot have.
        ShapeError, DTypeError: at a call, if a step is not (N, input_size) or a state not (N, hidden_size).
    """

    mode = "lstm"
    gates = "ifgo"  # in the order of Note [packed weights]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        nonlinearity: str = "tanh",
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
    ) -> None:
        check_choice("LSTM", "nonlinearity", nonlinearity, ("tanh",))
        super().__init__(
            input_size, hidden_size, nonlinearity, num_layers, bias, batch_first, dropout, bidirectional
        )

    def initialize(self, xs: Sequence[Tensor], h0_c0: Sequence[Tensor]) -> None:
        first = self._check(xs, self._pair(h0_c0))[0]
        for gate in "ifog":
            self._matrix_pair(f"_{gate}", first)
        for name in [f"{kind}_{gate}" for kind in ("Bx", "Bh") for gate in "ifog"] if self.bias else []:
            setattr(self, name, self.new_parameter(name, (self.hidden_size,), first))

    def forward(self, xs: Sequence[Tensor], h0_c0: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Steps (N, input_size), states (h0, c0), each (N, hidden_size) -> (h after each step, the last h, last c)."""
        states = self._pair(h0_c0)
        y, *last = self._run(self._check(xs, states), self._weights(), *states)
        outputs = unbind(y)
        return list(outputs), outputs[-1], last[1]

    def step_forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the states h and c after one step."""
        _, h, c = self.forward([x], (h, c))
        return h, c

    def _pair(self, h0_c0: object) -> Sequence[Tensor]:
        if not isinstance(h0_c0, (list, tuple)) or len(h0_c0) != 2:
            raise ShapeError(f"{self!r}: expected the states as (h0, c0), got {type(h0_c0).__name__}")
        return h0_c0

    def _weights(self) -> Tensor:
        parts = [flat([getattr(self, f"{kind}_{gate}") for gate in self.gates]) for kind in ("Wx", "Wh")]
        if self.bias:
            parts += [getattr(self, f"{kind}_{gate}") for kind in ("Bx", "Bh") for gate in self.gates]
        return autograd.cat(parts, 0)


class CudnnRNN(Layer):
    """A stack of recurrent layers over whole sequences, on every device; on CUDA it is cuDNN's.

    One parameter W holds all weights in cuDNN's order, see Note [packed weights] in backend/recurrent.py. It starts
    uniform in +-1 / sqrt(hidden_size), biases included.

    Args:
        hidden_size: features of the state, >= 1.
        activation: "tanh"; SINGA takes any and lets rnn_mode decide.
        num_layers: >= 1; each but the first has the output of the one below as its input.
        bias: whether there are biases, two a gate. SINGA always has them.
        batch_first: whether x is (N, T, features), else (T, N, features).
        dropout: share of each layer's output but the last's that is zeroed while training, 0 <= . < 1.
        bidirectional: whether every layer runs in both directions; outputs are joined, forward first.
        rnn_mode: "lstm", "gru", "relu", "tanh", or "vanilla", which is tanh.
        use_mask: whether calls give ``seq_lengths``. Those of a Tensor are read on the host, so such steps run eagerly;
            with a tuple of ints as an argument of the step each tuple has a record of its own.
        return_sequences: True: the outputs of all steps; False: the last layer's state after the last step. SINGA's
            second is the output of step T, of which the backward direction has seen one step only.

    Raises:
        OptionError: an option is unknown or out of range; at a call, if seq_lengths don't go with use_mask.
        ShapeError, DTypeError: at a call, if an argument does not fit.
    """

    W: Tensor

    def __init__(
        self,
        hidden_size: int,
        activation: str = "tanh",
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0,
        bidirectional: bool = False,
        rnn_mode: str = "lstm",
        use_mask: bool = False,
        return_sequences: bool = True,
    ) -> None:
        super().__init__()
        if not is_one_of(activation, ("tanh",)):
            raise OptionError(
                f"CudnnRNN: activation = {activation!r} would do nothing; rnn_mode = 'relu' is the layer with relu"
            )
        check_choice("CudnnRNN", "rnn_mode", rnn_mode, tuple(MODES))
        self.rnn_mode = rnn_mode
        self.hidden_size = check_int("CudnnRNN", "hidden_size", hidden_size, 1)
        self.num_layers = check_int("CudnnRNN", "num_layers", num_layers, 1)
        self.bias = check_bool("CudnnRNN", "bias", bias)
        self.batch_first = check_bool("CudnnRNN", "batch_first", batch_first)
        self.dropout = check_ratio("CudnnRNN", dropout)
        self.bidirectional = check_bool("CudnnRNN", "bidirectional", bidirectional)
        self.use_mask = check_bool("CudnnRNN", "use_mask", use_mask)
        self.return_sequences = check_bool("CudnnRNN", "return_sequences", return_sequences)
        self.input_size: int | None = None

    def initialize(
        self,
        x: Tensor,
        hx: Tensor | None = None,
        cx: Tensor | None = None,
        seq_lengths: Tensor | Sequence[int] | None = None,
    ) -> None:
        self._check(x, cx)
        self.input_size = x.shape[2]
        self.W = self.new_parameter("W", (self._config(x).num_weights,), x)
        limit = 1 / math.sqrt(self.hidden_size)
        self.W.uniform(-limit, limit)

    def forward(
        self,
        x: Tensor,
        hx: Tensor | None = None,
        cx: Tensor | None = None,
        seq_lengths: Tensor | Sequence[int] | None = None,
    ) -> Tensor:
        """Map x (N, T, features) or (T, N, features) to (the same, directions * hidden) or (N, directions * hidden).

        Args:
            x: the sequences.
            hx: first state (layers * directions, N, hidden), forward before backward; None is zeros.
            cx: likewise, for rnn_mode "lstm" alone.
            seq_lengths: with use_mask, where each sequence ends, N ints in 1 .. T; outputs behind that are 0.
        """
        self._check(x, cx)
        lengths = self._lengths(seq_lengths)
        y, hy, *_ = autograd.recurrent(
            autograd.transpose(x, (1, 0, 2)) if self.batch_first else x,
            self.W,
            hx,
            cx,
            hidden_size=self.hidden_size,
            mode=MODES[self.rnn_mode],
            num_layers=self.num_layers,
            bias=self.bias,
            bidirectional=self.bidirectional,
            dropout=self.dropout,
            lengths=lengths,
        )
        if self.return_sequences:
            return autograd.transpose(y, (1, 0, 2)) if self.batch_first else y
        return self._last_layer(hy)

    def _last_layer(self, hy: Tensor) -> Tensor:
        """(layers * directions, N, H) -> (N, directions * H) of the last layer."""
        outputs = unbind(hy)
        return autograd.cat(outputs[-2:], 1) if self.bidirectional else outputs[-1]

    def _config(self, x: Tensor) -> RnnConfig:
        mode = MODES[self.rnn_mode]
        return RnnConfig(mode, x.shape[2], self.hidden_size, self.num_layers, self.bidirectional, self.bias)

    def _check(self, x: Tensor, cx: Tensor | None) -> None:
        self.check_float(x)
        if x.ndim() != 3:
            axes = "(N, T, features)" if self.batch_first else "(T, N, features)"
            raise ShapeError(f"{self!r}: x must be {axes}, but its shape is {x.shape}")
        if self.input_size is not None:
            self.check_size("features", x.shape[2], self.input_size)
        if cx is not None and self.rnn_mode != "lstm":
            raise OptionError(f"{self!r}: cx is a state of rnn_mode 'lstm', not of {self.rnn_mode!r}")

    def _lengths(self, seq_lengths: Tensor | Sequence[int] | None) -> tuple[int, ...] | None:
        if (seq_lengths is not None) != self.use_mask:
            raise OptionError(
                f"{self!r}: seq_lengths go with use_mask=True, and use_mask is {self.use_mask}; give both or neither"
            )
        if isinstance(seq_lengths, Tensor):
            if seq_lengths.dtype.kind != "i" or seq_lengths.ndim() != 1:
                raise DTypeError(
                    f"{self!r}: seq_lengths must be integers (N,), not {seq_lengths.dtype} {seq_lengths.shape}"
                )
            return check_lengths(repr(self), to_numpy(seq_lengths).tolist())
        return check_lengths(repr(self), seq_lengths)
