# SPDX-License-Identifier: Apache-2.0
"""Convolutions by cuDNN, through ``_cudnn``.

What lives here: which plan a call uses, its workspace, and the cases cuDNN doesn't take. What does not: cuDNN's
calls and the choice of an algorithm (native/cuda/cudnn.h).

Note [plans]: a plan is made once for every direction, dtype, shape and option, and remembered. Its algorithm is the
fastest of those timed on the call's own arrays, deterministic ones first. Nothing can be timed while the stream is
captured into a CUDA graph: then, and where ``measure_convolutions`` is off, cuDNN's own expectation is taken. Two
processes may find different algorithms the fastest, and so differ in the last bits; without measuring they don't.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ... import _native
from ...config import state
from ...errors import DeviceError
from ..base import Array
from .launch import Launcher

Pair = tuple[int, int]

DTYPES = {"f": 0, "d": 1, "e": 2}  # cuDNN's numbers
FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT = range(3)
ALIGNMENT = 16  # bytes; the kernels for float16 load that much at once

# Of scratch memory while algorithms are timed, the first that can be had. Only what the chosen ones need is kept.
WORKSPACE_BYTES = (1 << 30, 256 << 20, 32 << 20)
MOST_PLANS = 4096  # a few KB each; the oldest goes first


def open_cudnn() -> Any:  # Any: a class of the compiled module
    """cuDNN 9; DeviceError with the cure where it cannot be had."""
    module, reason = _native.load("_cudnn")
    if module is None:
        raise DeviceError(f"convolutions on CUDA need the compiled module _cudnn: {reason}")
    try:
        return module.Cudnn(_native.library_names("SINGA_LITE_CUDNN_LIB", "nvidia.cudnn", "libcudnn.so.9"))
    except DeviceError as error:
        raise DeviceError(
            f"{error}; install nvidia-cudnn-cu12 or nvidia-cudnn-cu13 to match the CUDA of cupy, or name the "
            "library in SINGA_LITE_CUDNN_LIB"
        ) from None


def is_aligned(x: Array) -> bool:
    """Whether ``x`` begins where cuDNN's fastest kernels want it."""
    return bool(x.data.ptr % ALIGNMENT == 0)


class ConvKernels(Launcher):
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
    def _cudnn(self) -> tuple[Any, Any]:
        """The compiled module and this device's handle."""
        library = open_cudnn()
        module, _ = _native.load("_cudnn")
        return module, module.Handle(library)  # type: ignore[union-attr]

    @cached_property
    def _plans(self) -> dict[tuple[object, ...], Any]:
        return {}

    @cached_property
    def _workspaces(self) -> list[Array]:
        """Grows by doubling, and keeps the smaller ones: a captured graph may hold their addresses."""
        return []

    def _convolve(
        self, direction: int, a: Array, b: Array, out: Array, bias: Array | None, options: tuple[Any, ...]
    ) -> None:
        """Inputs in cuDNN's order: (x, w) forward, (w, dy) backward data, (x, dy) backward weight."""
        a, b = self._aligned(a), self._aligned(b)
        target = out if is_aligned(out) else self.empty(out.shape, out.dtype)
        key = (direction, out.dtype.char, state.allow_tf32, options)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(direction, a, b, target, options)
            if len(self._plans) > MOST_PLANS:
                del self._plans[next(iter(self._plans))]
        workspace = self._workspace(plan.workspace_bytes)
        pointers = (array.data.ptr if array is not None else 0 for array in (a, b, target, bias, workspace))
        plan.run(self.stream.ptr, *pointers, plan.workspace_bytes)
        if target is not out:
            self.find("copy")(target, out=out)

    def _aligned(self, x: Array) -> Array:
        """``x``, or an aligned copy."""
        if is_aligned(x):
            return x
        copy = self.empty(x.shape, x.dtype)
        self.find("copy")(x, out=copy)
        return copy

    def _make_plan(self, direction: int, a: Array, b: Array, out: Array, options: tuple[Any, ...]) -> Any:
        """A plan with its algorithm chosen; ``out`` is overwritten."""
        module, handle = self._cudnn
        plan = module.Convolution(handle, direction, DTYPES[out.dtype.char], *options, state.allow_tf32)
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
