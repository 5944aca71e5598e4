# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers over whole sequences, and the way from a sequence to its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...backend.recurrent import GATES, RnnConfig
from ...errors import OptionError, ShapeError, check_bool, check_choice, check_int
from ...tensor import Tensor
from ..engine import Array, Context, Operator
from ._common import check_floats, check_ndim
from .dropout import check_ratio, drop

__all__ = ["recurrent"]


def check_lengths(where: str, lengths: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return ``lengths`` as a tuple; OptionError unless all are ints >= 1."""
    if lengths is None:
        return None
    try:
        return tuple(check_int(where, "length", length, 1) for length in lengths)
    except TypeError:
        raise OptionError(f"{where}: lengths = {lengths!r} must be a list of ints") from None


class Recurrent(Operator):
    """Outputs y, hy and, for lstm, cy.

    Note [dropout between layers]: while training with a dropout > 0 each layer is a kernel call of its own, with its
    piece of the weights, and our dropout kernel between two, so every device draws from its own random stream. Else
    one call does for all layers.
    """

    autocast = "float32"

    def __init__(self, config: RnnConfig, dropout: float, lengths: Sequence[int] | None) -> None:
        self.config = config
        self.dropout = check_ratio("recurrent", dropout)
        self.lengths = check_lengths("recurrent", lengths)

    def check(self, *inputs: Tensor) -> None:
        check_floats("recurrent", *inputs)
        (x, w, *states), config = inputs, self.config
        if w.shape != (config.num_weights,):
            raise ShapeError(
                f"recurrent: {config} has {config.num_weights} weights, w has the shape {w.shape}"
            )
        expected = (config.num_cells, x.shape[1], config.hidden_size)
        for name, tensor in zip(("h0", "c0"), states, strict=False):
            if tensor.shape != expected:
                raise ShapeError(
                    f"recurrent: {name} must be (layers * directions, batch, hidden) = {expected}, not {tensor.shape}"
                )
        if self.lengths is not None and (
            len(self.lengths) != x.shape[1] or max(self.lengths, default=0) > x.shape[0]
        ):
            raise ShapeError(
                f"recurrent: lengths must be {x.shape[1]} ints in 1 .. {x.shape[0]} for x {x.shape}, got {self.lengths}"
            )

    def forward(self, context: Context, *inputs: Array) -> tuple[Array, ...]:
        (x, w, *states), config = inputs, self.config
        last = tuple(context.empty(start.shape, x.dtype) for start in states)
        parts = self._parts(context, w)
        masks: list[Array] = []
        calls: list[tuple[Any, ...]] = []  # of each: what its gradient needs
        given = x
        for number, (weights, cells) in enumerate(parts):
            if number > 0:
                given, mask = drop(context, given, self.dropout)
                masks.append(mask)
            starts, ends = ([array[cells] for array in arrays] for arrays in (states, last))
            y = context.empty((*x.shape[:2], config.num_directions * config.hidden_size), x.dtype)
            options = self._options(len(parts))
            reserve: tuple[Array, ...] = ()
            if any(context.needs_grad):
                size = context.backend.recurrent_reserve_bytes(given.shape, x.dtype, **options)
                reserve = (context.empty((size,), "uint8"),)
            context.run("recurrent", given, weights, *starts, out=(y, *ends, *reserve), **options)
            calls.append((given, weights, starts, y, *reserve))
            given = y
        context.save(calls, masks, w.shape)
        return (given, *last)

    def backward(self, context: Context, *dys: Array) -> tuple[Array | None, ...]:
        calls, masks, w_shape = context.saved
        dy, dlast = dys[0], dys[1:]
        dstarts = tuple(context.empty(grad.shape, grad.dtype) for grad in dlast)
        dws: list[Array] = []
        dx = None
        for number in reversed(range(len(calls))):
            given, weights, starts, y, reserve = calls[number]
            cells = slice(0, None) if len(calls) == 1 else self._cells(number)
            dw = context.empty(weights.shape, weights.dtype)
            dx = context.empty(given.shape, given.dtype) if number > 0 or context.needs_grad[0] else None
            out = (dw, *(grad[cells] for grad in dstarts), reserve, *(() if dx is None else (dx,)))
            grads = (dy, *(grad[cells] for grad in dlast))
            options = self._options(len(calls))
            context.run("recurrent_backward", *grads, given, weights, *starts, y, out=out, **options)
            dws.insert(0, dw)
            if number > 0:
                dy = context.empty(given.shape, given.dtype)
                context.run("dropout_backward", dx, masks[number - 1], out=dy, ratio=self.dropout)
        return (dx, self._joined(context, dws, w_shape), *dstarts)

    def _options(self, num_calls: int) -> dict[str, Any]:
        """Attributes of one of so many kernel calls."""
        config = self.config
        return {
            "mode": config.mode,
            "hidden_size": config.hidden_size,
            "num_layers": config.num_layers if num_calls == 1 else 1,
            "bidirectional": config.bidirectional,
            "bias": config.bias,
            "lengths": self.lengths,
        }

    def _cells(self, layer: int) -> slice:
        directions = self.config.num_directions
        return slice(layer * directions, (layer + 1) * directions)

    def _parts(self, context: Context, w: Array) -> list[tuple[Array, slice]]:
        """(weights, which states) of every kernel call, see Note [dropout between layers]."""
        config = self.config
        if self.dropout == 0 or config.num_layers == 1 or not context.training:
            return [(w, slice(0, None))]
        sizes = [*zip(*config.sizes(), strict=True)]
        pieces = [context.empty((size,), w.dtype) for kind in sizes for size in kind]
        context.run("unpack", w, out=tuple(pieces))
        parts = []
        for layer in range(config.num_layers):
            matrices, biases = pieces[layer], pieces[config.num_layers + layer]
            weights = context.empty((matrices.size + biases.size,), w.dtype)
            context.run("pack", matrices, biases, out=weights)
            parts.append((weights, self._cells(layer)))
        return parts

    def _joined(self, context: Context, dws: list[Array], shape: tuple[int, ...]) -> Array:
        """Join the gradients that the kernel calls give into that of all weights."""
        if len(dws) == 1:
            return dws[0]
        pieces: list[list[Array]] = [[], []]
        for dw, sizes in zip(dws, self.config.sizes(), strict=True):
            parts = tuple(context.empty((size,), dw.dtype) for size in sizes)
            context.run("unpack", dw, out=parts)
            for kind, part in zip(pieces, parts, strict=True):
                kind.append(part)
        joined = context.empty(shape, dws[0].dtype)
        context.run("pack", *pieces[0], *pieces[1], out=joined)
        return joined


def recurrent(
    x: Tensor,
    w: Tensor,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    *,
    hidden_size: int,
    mode: str = "lstm",
    num_layers: int = 1,
    bias: bool = True,
    bidirectional: bool = False,
    dropout: float = 0.0,
    lengths: Sequence[int] | None = None,
) -> tuple[Tensor, ...]:
    """Run a stack of recurrent layers over whole sequences; the formulas are in backend/cpu/cells.py.

    T steps, N sequences, I features, H hidden features, L layers, D directions (2 if bidirectional). On CUDA it is
    cuDNN's. SINGA's ``_RNN`` takes a handle instead of the options.

    Args:
        x: float tensor (T, N, I); T or N may be 0.
        w: all weights in one flat tensor, in the order of Note [packed weights] in backend/recurrent.py.
        h0: first state (L * D, N, H), layer by layer, forward before backward; None is zeros.
        c0: likewise, for mode "lstm" alone.
        hidden_size: H, >= 1.
        mode: "tanh", "relu", "lstm" or "gru" (its reset gate acts on the product, as in cuDNN and PyTorch).
        num_layers: L, >= 1.
        bias: whether w has biases, two a gate.
        bidirectional: whether every layer runs in both directions.
        dropout: share of each layer's output but the last's that is zeroed while ``autograd.training``, 0 <= . < 1.
        lengths: where each of the N sequences ends, 1 .. T; None: all have T steps.

    Returns:
        (y, hy), for lstm (y, hy, cy): the last layer's output (T, N, D * H), 0 behind a sequence's end, and the
        states (L * D, N, H) after the last step. All of x's dtype; float16 is computed in float32.

    Raises:
        ShapeError: w, a state or lengths do not fit, or c0 was given to another mode.
        OptionError: an option is unknown or out of range.
    """
    check_floats("recurrent", x)
    check_floats("recurrent", w)
    check_ndim("recurrent", "x", x, 3, "(steps, batch, features)")
    check_choice("recurrent", "mode", mode, tuple(GATES))
    config = RnnConfig(
        mode,
        input_size=x.shape[2],
        hidden_size=check_int("recurrent", "hidden_size", hidden_size, 1),
        num_layers=check_int("recurrent", "num_layers", num_layers, 1),
        bidirectional=check_bool("recurrent", "bidirectional", bidirectional),
        bias=check_bool("recurrent", "bias", bias),
    )
    op = Recurrent(config, dropout, lengths)
    if c0 is not None and config.num_states == 1:
        raise ShapeError(f"recurrent: mode {mode!r} has no c0")
    shape = (config.num_cells, x.shape[1], config.hidden_size)
    states = [
        Tensor(shape, x.device, w.dtype, requires_grad=False) if given is None else given
        for given in (h0, c0)[: config.num_states]
    ]
    return op(x, w, *states)  # type: ignore[no-any-return]


class Unbind(Operator):
    autocast = "keep"

    def check(self, *inputs: Tensor) -> None:
        check_ndim("steps", "x", inputs[0], 3, "(steps, batch, features)")

    def forward(self, context: Context, *inputs: Array) -> tuple[Array, ...]:
        return tuple(inputs[0][step] for step in range(len(inputs[0])))

    def backward(self, context: Context, *dys: Array) -> Array:
        dx = context.empty((len(dys), *dys[0].shape), dys[0].dtype)
        context.run("pack", *dys, out=dx.reshape(-1))
        return dx


def unbind(x: Tensor) -> tuple[Tensor, ...]:
    """Split (T, N, F) into T tensors (N, F) that share its memory, T >= 1."""
    return Unbind()(x)  # type: ignore[no-any-return]
