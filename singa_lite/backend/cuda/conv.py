# SPDX-License-Identifier: Apache-2.0
"""Convolutions by cuDNN.

What lives here: which plan a call uses, its workspace, and the cases cuDNN doesn't take. What does not: cuDNN's
calls and the choice of an algorithm (native/cuda/convolution.h).

Note [plans]: a plan is made once for every direction, dtype, shape and option, and remembered. Its algorithm is the
fastest of those timed on the call's own arrays, deterministic ones first. Nothing can be timed while the stream is
captured into a CUDA graph: then, and where ``measure_convolutions`` is off, cuDNN's own expectation is taken. Two
processes may find different algorithms the fastest, and so differ in the last bits; without measuring they don't.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ...config import state
from ..base import Array
from .cudnn import DTYPES, CudnnCaller

Pair = tuple[int, int]

FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT = range(3)

# Of scratch memory while algorithms are timed, the first that can be had. Only what the chosen ones need is kept.
WORKSPACE_BYTES = (1 << 30, 256 << 20, 32 << 20)


class ConvKernels(CudnnCaller):
    """conv2d and its two gradients. NCHW, sums in float32 or wider; TF32 where ``device.allow_tf32`` said so."""

    measure_convolutions = True  # see Note [plans]

    def conv2d(
        self,
        x: Array,
        w: Array,
        b: Array | None = None,
        *,
        out: Array,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
    ) -> None:
        options = (x.shape, w.shape, out.shape, stride, padding, dilation, groups)
        if out.size:
            self._convolve(FORWARD, x, w, out, b, options)

    def conv2d_backward_data(
        self, dy: Array, w: Array, *, out: Array, stride: Pair, padding: Pair, dilation: Pair, groups: int
    ) -> None:
        options = (out.shape, w.shape, dy.shape, stride, padding, dilation, groups)
        if out.size:
            self._convolve(BACKWARD_DATA, w, dy, out, None, options)

    def conv2d_backward_weight(
        self,
        dy: Array,
        x: Array,
        *,
        out: Array | tuple[Array, Array],
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
    ) -> None:
        dw, db = out if isinstance(out, tuple) else (out, None)
        if dy.size:
            options = (x.shape, dw.shape, dy.shape, stride, padding, dilation, groups)
            self._convolve(BACKWARD_WEIGHT, x, dy, dw, db, options)
        else:  # of an empty batch
            for gradient in (dw, db):
                if gradient is not None:
                    self.find("fill")(out=gradient, value=0.0)

    @cached_property
    def _workspaces(self) -> list[Array]:
        """Grows by doubling, and keeps the smaller ones: a captured graph may hold their addresses."""
        return []

    def _convolve(
        self, direction: int, a: Array, b: Array, out: Array, bias: Array | None, options: tuple[Any, ...]
    ) -> None:
        """Inputs in cuDNN's order: (x, w) forward, (w, dy) backward data, (x, dy) backward weight."""
        a, b = self._aligned(a), self._aligned(b)
        target = self._target(out)
        key = ("convolution", direction, out.dtype.char, state.allow_tf32, options)
        plan = self._plan(key, lambda: self._make_plan(direction, a, b, target, options))
        workspace = self._workspace(plan.workspace_bytes)
        pointers = (array.data.ptr if array is not None else 0 for array in (a, b, target, bias, workspace))
        plan.run(self.stream.ptr, *pointers, plan.workspace_bytes)
        self._deliver(target, out)

    def _make_plan(self, direction: int, a: Array, b: Array, out: Array, options: tuple[Any, ...]) -> Any:
        """A plan with its algorithm chosen; ``out`` is overwritten."""
        plan = self._new_plan("Convolution", direction, DTYPES[out.dtype.char], *options, state.allow_tf32)
        if not self.measure_convolutions or self.stream.is_capturing():
            plan.estimate(WORKSPACE_BYTES[0])
            return plan
        for workspace_bytes in WORKSPACE_BYTES:
            try:
                scratch = self.empty((workspace_bytes,), "uint8")
            except MemoryError:
                continue
            pointers = (array.data.ptr for array in (a, b, out, scratch))
            plan.measure(self.stream.ptr, *pointers, workspace_bytes)
            return plan
        plan.estimate(0)
        return plan

    def _workspace(self, size_bytes: int) -> Array | None:
        if size_bytes == 0:
            return None
        kept = self._workspaces
        if not kept or kept[-1].size < size_bytes:
            doubled = min(2 * kept[-1].size, WORKSPACE_BYTES[0]) if kept else 0
            kept.append(self.empty((max(size_bytes, doubled),), "uint8"))
        return kept[-1]
