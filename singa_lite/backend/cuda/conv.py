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

import cupy

from ...config import state
from ...errors import DeviceError
from ...graph import View
from ..base import Array
from .cudnn import DTYPES, CudnnCaller, is_aligned

Pair = tuple[int, int]

FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT = range(3)
PLAIN = (1, 1)
TENSOR_CORE = 8  # channels

# Of scratch memory while algorithms are timed, the first that can be had. Only what the chosen ones need is kept.
WORKSPACE_BYTES = (1 << 30, 256 << 20, 32 << 20)


class ConvKernels(CudnnCaller):
    """conv2d and its two gradients. Sums in float32 or wider; TF32 where ``device.allow_tf32`` said so."""

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
        blocks: Pair = PLAIN,
    ) -> None:
        options = (x.shape, w.shape, out.shape, stride, padding, dilation, groups)
        if out.size:
            self._convolve(FORWARD, x, w, out, b, options, (blocks[0], 1, blocks[1]))

    def conv2d_backward_data(
        self,
        dy: Array,
        w: Array,
        *,
        out: Array,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
        blocks: Pair = PLAIN,
    ) -> None:
        options = (out.shape, w.shape, dy.shape, stride, padding, dilation, groups)
        if out.size:
            self._convolve(BACKWARD_DATA, w, dy, out, None, options, (1, blocks[1], blocks[0]))

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
        blocks: Pair = PLAIN,
    ) -> None:
        dw, db = out if isinstance(out, tuple) else (out, None)
        if dy.size:
            options = (x.shape, dw.shape, dy.shape, stride, padding, dilation, groups)
            self._convolve(BACKWARD_WEIGHT, x, dy, dw, db, options, (*blocks, 1))
        else:  # of an empty batch
            for gradient in (dw, db):
                if gradient is not None:
                    self.find("fill")(out=gradient, value=0.0)

    @cached_property
    def _workspaces(self) -> list[list[Array]]:
        """Each lane's grows by doubling, and keeps the smaller ones: a captured graph may hold their addresses."""
        return [[] for _ in self.lanes.all]

    def _convolve(
        self,
        direction: int,
        a: Array,
        b: Array,
        out: Array,
        bias: Array | None,
        options: tuple[Any, ...],
        blocks: tuple[int, int, int],
    ) -> None:
        """Inputs in cuDNN's order: (x, w) forward, (w, dy) backward data, (x, dy) backward weight.

        ``blocks``: of a, b and out.
        """
        key = (direction, DTYPES[out.dtype.char], max(blocks) > 1, *options, state.allow_tf32)
        plan, is_channels_last = self._plan(("convolution", *key), lambda: self._make_plan(key, a, b, out))
        arrays = a, b, out
        orders = [(had, x.shape[1] if is_channels_last else 1) for x, had in zip(arrays, blocks, strict=True)]
        places = [self._place(x, order) for x, order in zip(arrays, orders, strict=True)]
        for x, place, order in zip((a, b), places, orders, strict=False):
            self._bring(x, place, order)
        workspace = self._workspace(plan.workspace_bytes)
        pointers = (x.data.ptr if x is not None else 0 for x in (*places, bias, workspace))
        plan.run(self.stream.ptr, *pointers, plan.workspace_bytes)
        self._bring(places[2], out, orders[2][::-1])

    def _place(self, x: Array, order: Pair) -> Array:
        """``x`` if a plan can read or write it where it is, else another array; ``order``: its blocks, the plan's."""
        return x if is_same(x, order) and is_aligned(x) else self.empty(x.shape, x.dtype)

    def _bring(self, x: Array, out: Array, order: Pair) -> None:
        """Copy ``x``, with blocks of order[0] channels, to ``out``, with blocks of order[1]."""
        if is_same(x, order):
            self._deliver(x, out)
        else:
            self.find("reorder")(x, out=out, blocks=order)

    def _make_plan(self, key: tuple[Any, ...], a: Array, b: Array, out: Array) -> tuple[Any, bool]:
        """A plan with its algorithm chosen, and whether its channels are last.

        cuDNN does not say which convolutions it knows with channels last; where it refuses, they are row-major.
        """
        if key[2]:
            try:
                return self._choose(key, a, b, out), True
            except DeviceError:
                key = (*key[:2], False, *key[3:])
        return self._choose(key, a, b, out), False

    def _choose(self, key: tuple[Any, ...], a: Array, b: Array, out: Array) -> Any:
        """A plan with its algorithm chosen; of the arrays only their memory is used."""
        plan = self._new_plan("Convolution", *key)
        if not self.measure_convolutions or self.stream.is_capturing():
            plan.estimate(WORKSPACE_BYTES[0])
            return plan
        a, b, target = self._aligned(a), self._aligned(b), self._target(out)
        for workspace_bytes in WORKSPACE_BYTES:
            try:
                # a pool of its own gives it back to the system; others, a graph's perhaps, would keep it
                with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
                    scratch = self.empty((workspace_bytes,), "uint8")
            except MemoryError:
                continue
            pointers = (array.data.ptr for array in (a, b, target, scratch))
            plan.measure(self.stream.ptr, *pointers, workspace_bytes)
            return plan
        plan.estimate(0)
        return plan

    def _workspace(self, size_bytes: int) -> Array | None:
        if size_bytes == 0:
            return None
        kept = self._workspaces[self.lanes.number]
        if not kept or kept[-1].size < size_bytes:
            doubled = min(2 * kept[-1].size, WORKSPACE_BYTES[0]) if kept else 0
            kept.append(self.empty((max(size_bytes, doubled),), "uint8"))
        return kept[-1]


def blocks_wanted(
    kernel: str, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], has_bias: bool, **geometry: Any
) -> Pair | None:
    """Blocks of x and y that suit tensor cores, which read the channels of a pixel together; see ../layout.py.

    An image of few channels, as the first is, stays as it is. So does one whose bias is added afterwards (fuse.py).
    """
    if has_bias or geometry["groups"] > 1 or y[1] % TENSOR_CORE:
        return None
    return (1 if x[1] % TENSOR_CORE else x[1]), y[1]


def uses_tensor_cores(x: View) -> bool:
    """Whether products of such numbers are made by tensor cores."""
    return bool(x.dtype == "float16" or (x.dtype == "float32" and state.allow_tf32))


def is_same(x: Array, order: Pair) -> bool:
    """Whether both orders, row-major and channels last, are the same memory."""
    return bool(order[0] == order[1] or x.shape[2:] == (1, 1))
