# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers by cuDNN.

What lives here: which plan a call uses, the order of its weights, and the cases cuDNN doesn't take. What does not:
cuDNN's calls (native/cuda/rnn.h).

Note [order of weights]: Note [packed weights] in ../recurrent.py is the order of cuDNN 9, so a parameter is passed to
it as it is. cuDNN promises no order, so a plan reads the offset of each weight; were that another, weights and their
gradients would go through an array in its order.
Note [lengths]: cuDNN reads them on the host, and needs one sequence at least to have all steps. So it gets the steps up
to the last end; what comes behind is ours to fill with zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...config import state
from ..base import Array
from ..recurrent import split_backward
from .cudnn import DTYPES, CudnnCaller, addresses

MODES = {"relu": 0, "tanh": 1, "lstm": 2, "gru": 3}  # cuDNN's numbers
Lengths = tuple[int, ...] | None


class RecurrentKernels(CudnnCaller):
    """recurrent and its gradient. Sums in float32 or wider; TF32 with ``device.allow_tf32``."""

    def recurrent_reserve_bytes(
        self, x_shape: tuple[int, ...], dtype: Any, lengths: Lengths = None, **options: Any
    ) -> int:
        if not x_shape[0] or not x_shape[1]:
            return 0
        self.activate()
        return int(self._recurrent_plan(x_shape, dtype, lengths, options).reserve_bytes)

    def recurrent(
        self,
        x: Array,
        w: Array,
        *states: Array,
        out: tuple[Array, ...],
        lengths: Lengths = None,
        **options: Any,
    ) -> None:
        y, last, reserve = out[0], out[1 : 1 + len(states)], out[1 + len(states) :]
        if not x.shape[0] or not x.shape[1]:
            for start, end in zip(states, last, strict=True):
                self.find("copy")(start, out=end)
            return
        plan = self._recurrent_plan(x.shape, x.dtype, lengths, options)
        outputs = [*map(self._target, (y, *last))]
        if lengths is not None:
            self.find("fill")(out=outputs[0], value=0.0)
        given = [*map(self._aligned, (x, self._weights_for(plan, w), *states))]
        pointers = (*addresses(given, 4), *addresses(outputs, 3))  # the last of each is c, which may be none
        workspace = self.scratch(plan.workspace_bytes)
        plan.forward(self.stream.ptr, *pointers, workspace.data.ptr, reserve[0].data.ptr if reserve else 0)
        for target, result in zip(outputs, (y, *last), strict=True):
            self._deliver(target, result)

    def recurrent_backward(
        self,
        dy: Array,
        *inputs: Array,
        out: tuple[Array, ...],
        lengths: Lengths = None,
        **options: Any,
    ) -> None:
        (dlast, x, w, states, y), (dw, dstart, reserve, dx) = split_backward(options["mode"], inputs, out)
        if not x.shape[0] or not x.shape[1]:
            self.find("fill")(out=dw, value=0.0)
            for dstate, result in zip(dlast, dstart, strict=True):
                self.find("copy")(dstate, out=result)
            return
        plan = self._recurrent_plan(x.shape, x.dtype, lengths, options)
        dx = self.empty(x.shape, x.dtype) if dx is None else dx  # cuDNN needs one anyway
        dweights = self.empty((plan.weight_bytes // w.itemsize,), w.dtype) if plan.pieces else dw
        outputs = [*map(self._target, (dx, dweights, *dstart))]
        # cuDNN adds to the gradient of the weights
        for target in outputs[:2] if lengths is not None else outputs[1:2]:
            self.find("fill")(out=target, value=0.0)
        grads = [*map(self._aligned, (dy, *dlast))]
        given = [*map(self._aligned, (x, self._weights_for(plan, w), *states))]
        y = self._aligned(y)
        pointers = (*addresses(grads, 3), *addresses(given, 4), y.data.ptr, *addresses(outputs, 4))
        workspace = self.scratch(plan.workspace_bytes)
        plan.backward(self.stream.ptr, *pointers, workspace.data.ptr, reserve.data.ptr)
        for target, result in zip(outputs, (dx, dweights, *dstart), strict=True):
            self._deliver(target, result)
        for ours, theirs, count in plan.pieces:
            self.find("copy")(dweights[theirs : theirs + count], out=dw[ours : ours + count])

    def _recurrent_plan(
        self, x_shape: tuple[int, ...], dtype: Any, lengths: Lengths, options: dict[str, Any]
    ) -> Any:
        steps, batch, features = x_shape
        if lengths is not None:  # see Note [lengths]
            steps = max(lengths)
            lengths = None if min(lengths) == steps else lengths
        names = ("hidden_size", "num_layers", "bidirectional", "bias")
        sizes = (MODES[options["mode"]], features, *(options[name] for name in names), steps, batch)
        arguments = (DTYPES[np.dtype(dtype).char], *sizes, lengths or (), state.allow_tf32)
        return self._plan(("recurrent", *arguments), lambda: self._new_plan("Recurrent", *arguments))

    def _weights_for(self, plan: Any, w: Array) -> Array:
        """Weights in cuDNN's order: ``w`` itself wherever that is ours, see Note [order of weights]."""
        if not plan.pieces:
            return w
        weights = self.empty((plan.weight_bytes // w.itemsize,), w.dtype)
        self.find("fill")(out=weights, value=0.0)
        for ours, theirs, count in plan.pieces:
            self.find("copy")(w[ours : ours + count], out=weights[theirs : theirs + count])
        return weights
